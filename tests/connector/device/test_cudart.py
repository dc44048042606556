# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's own library and headers, without a driver or a device.

The library is asked for symbols, its version and the names of errors. The headers compile a stub of
it (stub_cudart.cpp), over which the copy device runs through the real ctypes calls: arrays of
addresses, attributes, handles, eight arguments or nine.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stratakv.connector.device import cuda_copy_runtime as cuda_runtime
from stratakv.connector.device.base import CopyDevice
from stratakv.connector.device.contract import CHECKS
from stratakv.connector.device.contract_rig import LAYOUTS, WAIT_SECONDS, Gate, Rig, Surroundings
from stratakv.connector.device.cuda import CudaCopyDevice
from stratakv.connector.device.cuda_api import SIGNATURES, STICKY, CudaApi
from stratakv.connector.device.cuda_copy_runtime import TorchRuntime
from stratakv.connector.device.device_choice import make_device
from stratakv.kernels.copy.copy_engine import Batch, CudaError, CudaRuntime, PageLockedMemory
from stratakv.kernels.kernel_choice import KernelRefused
from stratakv.tiers.block import BlockLayout

from . import cuda_headers
from .cuda_package import HOW_TO_GET, find_include, find_library, version_of
from .surroundings import host_gate, random_pool

INCLUDE, LIBRARY = find_include(), find_library()
STUB = Path(__file__).with_name("stub_cudart.cpp")
needs_library = pytest.mark.skipif(LIBRARY is None, reason=HOW_TO_GET)
needs_headers = pytest.mark.skipif(
    INCLUDE is None or shutil.which("g++") is None, reason=f"needs g++, or: {HOW_TO_GET}"
)


# The real library


@needs_library
def test_the_real_library_has_what_is_called() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    CudaApi(library)
    engine = CudaRuntime(library)
    assert engine.version in cuda_headers.VERSIONS
    if engine.refusal is not None:
        assert "newer driver" in engine.refusal, "the runtime itself has batched copies"
    for name in (*SIGNATURES, *cuda_headers.PROTOTYPES, "cudaMemcpyBatchAsync"):
        assert getattr(library, name), name


@needs_library
def test_the_real_library_names_errors_as_we_do() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    library.cudaGetErrorName.restype = ctypes.c_char_p
    said = {code: library.cudaGetErrorName(code).decode() for code in STICKY}
    assert said == STICKY


@needs_library
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_a_call_fails_and_says_so() -> None:
    library = ctypes.CDLL(str(LIBRARY))
    with pytest.raises(CudaError, match=r"cudaStream|cudaDevice") as failed:
        CudaApi(library).create_stream()
    assert failed.value.code != 0 and "cudaError" in str(failed.value)


@needs_headers
def test_the_table_is_what_the_headers_say(tmp_path: Path) -> None:
    assert INCLUDE is not None
    source = tmp_path / "check.cpp"
    source.write_text(cuda_headers.source_of_check(version_of(INCLUDE)))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", "-I", str(INCLUDE), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr


# A library compiled against the headers


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    assert INCLUDE is not None
    library = tmp_path_factory.mktemp("stub") / "libcudart.so"
    command = [
        *("g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", "-Wall", "-Wextra"),
        *("-Werror", "-isystem", str(INCLUDE), str(STUB), "-o", str(library)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    loaded = ctypes.CDLL(str(library))
    loaded.stub_adopt.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    loaded.stub_held.restype = loaded.stub_batches.restype = ctypes.c_long
    loaded.stub_begin()
    yield loaded
    loaded.stub_end()


class StubRuntime(TorchRuntime):
    """The real one, but for what torch would do: its streams and its memory."""

    def __init__(self, library: Any, name: str = "cuda") -> None:
        self._stub = library
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda_runtime, "cuda_runtime", lambda: CudaRuntime(library))
            patch.setattr(cuda_runtime, "cuda_library", lambda: library)
            patch.setattr(torch.cuda, "device_count", lambda: 2)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
            super().__init__(torch.device(name))
        self.enter_thread(is_own=False)
        self.computing = self.create_stream()

    def compute_stream(self) -> int:
        return self.computing

    def move_blocks(self, *_: Any) -> None:
        raise KernelRefused("a stub runs no kernels")

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return self.adopt(torch.zeros(num_bytes, dtype=torch.uint8))

    def adopt(self, memory: torch.Tensor) -> torch.Tensor:
        self._stub.stub_adopt(memory.data_ptr(), memory.nbytes)
        return memory


class PoolInHostMemory(StubRuntime):
    """Calls what torch has as a CPU's tensors the device's."""

    def __init__(self, library: Any) -> None:
        super().__init__(library)
        self.device = torch.device("cpu")

    def enter_thread(self, *, is_own: bool) -> None:
        self._api.set_device(0)
        if is_own:
            self._api.relax_capture()


class StubSurroundings(Surroundings):
    """The CUDA device over the stub."""

    name = "stub"

    def __init__(self, library: Any) -> None:
        self.runtime = PoolInHostMemory(library)
        self._api = CudaApi(library)
        self._pages: list[torch.Tensor] = []  # what is written, locked until `close`

    def device(self) -> CopyDevice:
        self._device = CudaCopyDevice(self.runtime, piece_bytes=4 * 4096, staging_bytes=5000)
        return self._device

    def pool(self, num_blocks: int, layout: BlockLayout) -> torch.Tensor:
        return self.runtime.adopt(random_pool(num_blocks, layout))

    def gate(self, device: CopyDevice) -> Gate:
        return host_gate()

    def write(self, pool: torch.Tensor, block_id: int, value: int) -> None:
        """A copy in the computing stream, as a kernel would be."""
        block = pool[block_id]
        page = torch.full_like(block, value)
        self._pages.append(page)
        self.runtime.register_host(page.data_ptr(), page.nbytes)
        batch = Batch([page.data_ptr()], [block.data_ptr()], [page.nbytes])
        self.runtime.copy_each(batch, self.runtime.computing, to_host=False)

    def settle(self) -> None:
        assert self._device.wait_locked(WAIT_SECONDS)
        event = self._api.create_event()
        self._api.record_event(event, self.runtime.computing)
        self._api.synchronise_event(event)
        self._api.destroy_event(event)

    def close(self) -> None:
        for page in self._pages:
            self.runtime.unregister_host(page.data_ptr())
        self.runtime.destroy_stream(self.runtime.computing)


@needs_headers
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_contract_through_the_real_calls(stub: Any, check: Callable[[Rig], None]) -> None:
    before = stub.stub_held()
    with (
        contextlib.closing(StubSurroundings(stub)) as around,
        contextlib.closing(Rig(around, LAYOUTS[1])) as rig,
    ):
        check(rig)
    assert stub.stub_held() == before, "a handle or a locked piece is left"


@needs_headers
def test_batches_reach_the_library_whole(stub: Any, rng: Any) -> None:
    engine, api = CudaRuntime(stub), CudaApi(stub)
    assert INCLUDE is not None and engine.version == version_of(INCLUDE)
    assert engine.refusal is None
    there = np.frombuffer(rng.randbytes(64 * 4096), np.uint8).copy()
    back = np.zeros_like(there)
    for memory in (there, back):
        stub.stub_adopt(memory.ctypes.data, memory.nbytes)
    stream, event = api.create_stream(), api.create_event()
    before = stub.stub_batches()
    with PageLockedMemory(there.nbytes, engine) as locked:
        order = list(range(64))
        rng.shuffle(order)
        host = [locked.address + 4096 * place for place in order]
        out = [there.ctypes.data + 4096 * number for number in range(64)]
        home = [back.ctypes.data + 4096 * number for number in range(64)]
        engine.copy_batch(Batch(out, host, [4096] * 64), stream)
        engine.copy_batch(Batch(host, home, [4096] * 64), stream)
        api.record_event(event, stream)
        api.synchronise_event(event)
        assert api.has_ended(event) and (there == back).all()
        assert stub.stub_batches() == before + 2
        with pytest.raises(CudaError, match=r"of 1 copies failed: .*cudaErrorInvalidValue, 1"):
            engine.copy_batch(Batch([locked.address + there.nbytes], home[:1], [4096]), stream)
    api.destroy_event(event)
    api.destroy_stream(stream)
    with pytest.raises(CudaError, match="cudaErrorInvalidResourceHandle"):
        api.record_event(event, stream)


@needs_headers
@pytest.mark.parametrize(("name", "index"), [("cuda", 0), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_device_by_each_of_its_names(stub: Any, name: str, index: int) -> None:
    runtime = StubRuntime(stub, name)
    assert runtime.device == torch.device("cuda", index) and stub.stub_device() == index
    relaxed = stub.stub_relaxed()
    runtime.enter_thread(is_own=True)
    assert stub.stub_relaxed() == relaxed + 1, "beside a capture a thread of its own goes on"
    runtime.destroy_stream(runtime.computing)


@needs_headers
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_copy_device_by_each_of_its_names(
    stub: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine asks for it."""
    monkeypatch.setattr(cuda_runtime, "cuda_runtime", lambda: CudaRuntime(stub))
    monkeypatch.setattr(cuda_runtime, "cuda_library", lambda: stub)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    device = make_device(name)
    assert stub.stub_device() == 0 and device.close(WAIT_SECONDS)
