# SPDX-License-Identifier: Apache-2.0
"""Devices by name, and the real runtime where there is no device or an old one."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from stratakv.connector.build import build_offload
from stratakv.connector.device import cuda_copy_runtime as cuda_runtime
from stratakv.connector.device.base import DeviceError
from stratakv.connector.device.contract_rig import WHOLE_PAGES
from stratakv.connector.device.cpu import CpuCopyDevice
from stratakv.connector.device.cuda_copy_runtime import CupyMemory, TorchRuntime
from stratakv.connector.device.device_choice import make_device
from stratakv.kernels.copy.copy_engine import Batch, CudaError, CudaRuntime
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.tier_settings import CpuSettings, TierSettings

from .test_cuda_api import EVENT, STREAM, Library

no_device = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")


def test_the_cpu_needs_nothing_of_cuda() -> None:
    device = make_device("cpu")
    assert isinstance(device, CpuCopyDevice)
    assert device.wait_locked(0.0) and device.close(1.0)
    code = (
        "import sys; from stratakv.connector.device.device_choice import make_device\n"
        "make_device('cpu')\n"
        "print([m for m in sys.modules if 'cuda_' in m and m.startswith('stratakv')"
        " or m in ('triton', 'cupy')])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:0,cuda:1", "names several GPUs, and blocks are copied from one; name one"),
        ("cuda:0,1", "names several GPUs"),
        ("cuda:", "a device is cpu, cuda or one GPU as cuda:1, not 'cuda:'"),
        ("cuda:-1", "a device is cpu, cuda or one GPU"),
        ("cuda:٣", "a device is cpu, cuda or one GPU"),
        ("gpu", "a device is cpu, cuda or one GPU"),
        ("", "a device is cpu, cuda or one GPU"),
    ],
)
def test_names_that_are_refused(name: str, message: str) -> None:
    with pytest.raises(TierConfigError, match=message):
        make_device(name)


@no_device
def test_no_device_is_said_before_anything_stays_open() -> None:
    settings = TierSettings(cpu=CpuSettings(capacity_bytes=4 * WHOLE_PAGES.slot_bytes))
    with pytest.raises(TierConfigError, match=r"offloading from cuda: no CUDA device can be used"):
        build_offload(WHOLE_PAGES, settings, namespace=b"n", device="cuda")


class Machine:
    """torch with two devices, over a library that records."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        self.library = Library(version)
        engine = CudaRuntime(self.library)
        monkeypatch.setattr(cuda_runtime, "cuda_runtime", lambda: engine)
        monkeypatch.setattr(cuda_runtime, "cuda_library", lambda: self.library)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def test_the_runtime_calls_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 13050)
    runtime = TorchRuntime(torch.device("cuda"))
    assert runtime.device == torch.device("cuda", 1), "the current one"
    assert runtime.batch_refusal is None
    batch = Batch([1000, 5000], [9000, 7000], [16, 24])
    runtime.enter_thread(is_own=False)
    assert [name for name, *_ in machine.library.calls] == ["cudaSetDevice"]
    runtime.enter_thread(is_own=True)
    assert machine.library.calls[-1][0] == "cudaThreadExchangeStreamCaptureMode"
    machine.library.calls.clear()
    runtime.copy_each(batch, STREAM, to_host=True)
    runtime.copy_each(batch, STREAM, to_host=False)
    assert machine.library.calls == [
        ("cudaMemcpyAsync", target, source, size, kind, STREAM)
        for kind in (2, 1)
        for target, source, size in ((9000, 1000, 16), (7000, 5000, 24))
    ]
    runtime.wait_event(STREAM, EVENT)
    runtime.copy_batch(batch, STREAM)
    assert [name for name, *_ in machine.library.calls[-2:]] == [
        "cudaStreamWaitEvent",
        "cudaMemcpyBatchAsync",
    ]


def test_an_old_driver_leaves_plain_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 12060)
    runtime = TorchRuntime(torch.device("cuda", 0))
    assert runtime.device == torch.device("cuda", 0)
    assert runtime.batch_refusal is not None and "12.8 or newer" in runtime.batch_refusal
    runtime.copy_each(Batch([1000], [9000], [16]), STREAM, to_host=True)
    assert machine.library.calls[-1] == ("cudaMemcpyAsync", 9000, 1000, 16, 2, STREAM)


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch, 13050)
    with pytest.raises(DeviceError, match="cuda:2 was named, and there are devices 0 to 1"):
        TorchRuntime(torch.device("cuda", 2))


def test_a_buffer_that_cannot_be_locked_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, 13050)
    runtime = TorchRuntime(torch.device("cuda", 0))
    machine.library.codes["cudaHostRegister"] = 2
    monkeypatch.setattr(cuda_runtime, "_cupy_memory", lambda n: None)  # without CuPy
    with pytest.raises(CudaError, match="cudaHostRegister"):
        runtime.page_locked(4096)
    memory = (ctypes.c_uint8 * 8192)()
    asked: list[int] = []

    class Pointer(bytearray):
        ptr = ctypes.addressof(memory)

    def allocate(num_bytes: int) -> Pointer:
        asked.append(num_bytes)
        return Pointer(2 * num_bytes)

    monkeypatch.setattr(cuda_runtime, "_cupy_memory", lambda n: CupyMemory(n, allocate))
    locked = runtime.page_locked(4096)
    assert asked == [4096] and locked.address == ctypes.addressof(memory)
    assert locked.tensor().shape == (4096,)
    locked.close()
