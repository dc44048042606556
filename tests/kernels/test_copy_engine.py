# SPDX-License-Identifier: Apache-2.0
"""The batched copies: what the runtime is given, what is refused, and bytes that arrive.

A library that records its calls, and copies with memmove, takes the place of the CUDA runtime; the
tests marked gpu use the real one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stratakv.kernels.copy import copy_engine
from stratakv.kernels.copy.copy_engine import (
    Batch,
    CopyAttributes,
    CudaError,
    CudaRuntime,
    PageLockedMemory,
    copy_batch_plain,
    cuda_runtime,
    load_library,
    merge_neighbours,
)
from stratakv.kernels.kernel_choice import KernelRefused

STREAM = 0x7F00_1234
NAMES = {2: "cudaErrorMemoryAllocation", 713: "cudaErrorHostMemoryNotRegistered"}


class RecordingLibrary:
    """The functions of libcudart that are used, with their signatures for one version."""

    def __init__(self, version: int = 13000, code: int = 0, driver: int = 13000) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.copies: list[tuple[int, int, int]] = []
        self.attributes: bytes = b""
        self.code = code

        def version_of(value: int) -> Callable[[Any], int]:
            def get_version(number: Any) -> int:
                number._obj.value = value
                return 0

            return get_version

        def copy_batch(*arguments: Any) -> int:
            # CUDA 13 took the index of the failed copy out of the middle.
            assert len(arguments) == (8 if version >= 13000 else 9)
            targets, sources, sizes, count, attributes, indices, num_attributes = arguments[:7]
            lists = [
                list((ctypes.c_size_t * count).from_address(place))
                for place in (targets, sources, sizes)
            ]
            self.copies = list(zip(*lists, strict=True))
            self.attributes = ctypes.string_at(attributes, 24)
            assert ctypes.c_size_t.from_address(indices).value == 0 and num_attributes == 1
            if version < 13000:
                ctypes.c_size_t.from_address(arguments[7]).value = 3
            return self.code

        # Functions, because a method takes no `argtypes`.
        self.cudaRuntimeGetVersion = version_of(version)
        self.cudaDriverGetVersion = version_of(driver)
        self.cudaMemcpyBatchAsync = self._recording("copy", copy_batch)
        self.cudaHostRegister = self._recording("register", lambda *_: self.code)
        self.cudaHostUnregister = self._recording("unregister", lambda *_: self.code)
        self.cudaGetLastError = self._recording("last error", lambda: self.code)
        self.cudaGetErrorName = self._recording("name", lambda code: NAMES[code].encode())
        self.cudaGetErrorString = self._recording("text", lambda code: b"what CUDA says")

    def _recording(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append((name, arguments))
            return function(*arguments)

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_the_layout_of_the_header() -> None:
    """driver_types.h of CUDA 12.8.57 and of 13.0.48, where it is the same:

    enum cudaMemcpySrcAccessOrder { Invalid = 0, Stream = 1, DuringApiCall = 2, Any = 3 }
    enum cudaMemcpyFlags { Default = 0, PreferOverlapWithCompute = 1 }
    struct cudaMemLocation { enum type; int id; }
    struct cudaMemcpyAttributes { enum srcAccessOrder; cudaMemLocation srcLocHint, dstLocHint;
                                  unsigned int flags; }
    #define cudaStreamLegacy ((cudaStream_t)0x1)
    """
    assert ctypes.sizeof(CopyAttributes) == 24
    offsets = [getattr(CopyAttributes, name).offset for name, *_ in CopyAttributes._fields_]
    assert offsets == [0, 4, 12, 20]
    assert (copy_engine.ACCESS_ORDER_STREAM, copy_engine.PREFER_OVERLAP_WITH_COMPUTE) == (1, 1)
    assert copy_engine.LEGACY_STREAMS == (0, 1)


@pytest.mark.parametrize(("version", "arguments"), [(12080, 9), (12090, 9), (13000, 8), (13020, 8)])
def test_what_the_runtime_is_given(version: int, arguments: int) -> None:
    library = RecordingLibrary(version)
    runtime = CudaRuntime(library)
    runtime.copy_batch(Batch([1000, 5000], [90_000, 70_000], [16, 24]), STREAM)
    [(name, given_arguments)] = library.calls
    assert name == "copy" and len(given_arguments) == arguments and given_arguments[-1] == STREAM
    assert library.copies == [(90_000, 1000, 16), (70_000, 5000, 24)]
    # Access order "stream", hints empty, overlap preferred.
    assert np.frombuffer(library.attributes, dtype=np.uint32).tolist() == [1, 0, 0, 0, 0, 1]
    types = library.cudaMemcpyBatchAsync.argtypes  # type: ignore[attr-defined]
    assert len(types) == arguments
    sizes = [index for index, kind in enumerate(types) if kind is ctypes.c_size_t]
    assert sizes == [3, 6], "the numbers of copies and of attributes; the others are pointers"


@pytest.mark.parametrize("stream", [0, 1])
def test_the_default_stream_is_refused(stream: int) -> None:
    library = RecordingLibrary()
    with pytest.raises(KernelRefused, match=r"make one with torch\.cuda\.Stream"):
        CudaRuntime(library).copy_batch(Batch([8], [16], [4]), stream)
    assert library.calls == []


def test_no_copies_are_no_call() -> None:
    library = RecordingLibrary()
    CudaRuntime(library).copy_batch(Batch([], [], []), STREAM)
    assert library.calls == []


@pytest.mark.parametrize("version", [12080, 13000])
def test_a_failure_is_named_and_taken_from_the_runtime(version: int) -> None:
    library = RecordingLibrary(version, code=2)
    with pytest.raises(
        CudaError,
        match=r"^cudaMemcpyBatchAsync of 2 copies failed: what CUDA says "
        r"\(cudaErrorMemoryAllocation, 2\)$",
    ):
        CudaRuntime(library).copy_batch(Batch([8, 80], [16, 160], [4, 4]), STREAM)
    assert library.names == ["copy", "name", "text", "last error"]


@pytest.mark.parametrize(
    ("version", "driver", "message"),
    [
        (12060, 13000, r"CUDA runtime 12\.8 or newer, and torch has loaded 12\.6; install a newer"),
        (11080, 13000, r"CUDA runtime 12\.8 or newer, and torch has loaded 11\.8; install a newer"),
        (
            12080,
            12040,
            r"a driver for CUDA 12\.8 or newer, and this one is for 12\.4; install a new",
        ),
        (13000, 0, r"a driver for CUDA 12\.8 or newer, and this one is for 0\.0; install a newer"),
    ],
)
def test_versions_without_batches(version: int, driver: int, message: str) -> None:
    library = RecordingLibrary(version, driver=driver)
    runtime = CudaRuntime(library)
    with pytest.raises(KernelRefused, match=f"batched copies need {message}"):
        runtime.copy_batch(Batch([8], [16], [4]), STREAM)
    assert library.calls == []
    with PageLockedMemory(4096, runtime):
        assert library.names == ["register"], "the rest is there"


@pytest.mark.parametrize(
    ("sources", "targets", "sizes", "message"),
    [
        ([1, 2], [3], [4, 5], "as many sources, targets and sizes, got 2, 1, 2"),
        ([1], [2], [0], "above 0 .* got 0"),
        ([1, -7], [2, 3], [1, 1], "above 0 .* got -7"),
        ([1], [0], [1], "above 0 .* got 0"),
    ],
)
def test_batches_that_are_refused(
    sources: list[int], targets: list[int], sizes: list[int], message: str
) -> None:
    for make in (Batch, merge_neighbours):
        with pytest.raises(KernelRefused, match=message):
            make(sources, targets, sizes)


def entries(batch: Batch) -> list[tuple[int, int, int]]:
    return list(
        zip(batch.sources.tolist(), batch.targets.tolist(), batch.sizes.tolist(), strict=True)
    )


@pytest.mark.parametrize(
    ("copies", "merged"),
    [
        ([], []),
        ([(100, 900, 10)], [(100, 900, 10)]),
        ([(100, 900, 10), (110, 910, 5), (115, 915, 1)], [(100, 900, 16)]),
        ([(100, 900, 10), (110, 911, 5)], [(100, 900, 10), (110, 911, 5)]),  # a gap at the target
        ([(100, 900, 10), (111, 910, 5)], [(100, 900, 10), (111, 910, 5)]),  # at the source
        ([(110, 910, 5), (100, 900, 10)], [(110, 910, 5), (100, 900, 10)]),  # the wrong way round
        (
            [(1, 1001, 4), (5, 1005, 4), (50, 1009, 4), (54, 1013, 4), (58, 1017, 4)],
            [(1, 1001, 8), (50, 1009, 12)],
        ),
        ([(2**40, 2**46, 2**30), (2**40 + 2**30, 2**46 + 2**30, 1)], [(2**40, 2**46, 2**30 + 1)]),
    ],
)
def test_neighbours_are_merged(
    copies: list[tuple[int, int, int]], merged: list[tuple[int, int, int]]
) -> None:
    columns = [list(column) for column in zip(*copies, strict=True)] or [[], [], []]
    assert entries(merge_neighbours(*columns)) == merged
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    assert entries(merge_neighbours(*arrays)) == merged


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=12), st.integers(1, 3))
def test_merging_moves_the_same_bytes(pairs: list[tuple[int, int]], size: int) -> None:
    # No target twice: those have no order.
    pairs = list({target: (source, target) for source, target in pairs}.values())
    source = np.arange(1, 40, dtype=np.uint8)
    targets = [np.zeros(40, dtype=np.uint8) for _ in range(2)]
    columns = ([place for place, _ in pairs], [place for _, place in pairs])
    for target, make in zip(targets, (Batch, merge_neighbours), strict=True):
        batch = make(
            [source.ctypes.data + place * size for place in columns[0]],
            [target.ctypes.data + place * size for place in columns[1]],
            [size] * len(pairs),
        )
        copy_batch_plain(batch)
        assert batch.sizes.sum() == size * len(pairs)
    assert np.array_equal(*targets)
    for start, end in pairs:
        assert np.array_equal(
            targets[0][end * size : (end + 1) * size], source[start * size : (start + 1) * size]
        )


def test_page_locked_memory_has_the_size_asked_for() -> None:
    library = RecordingLibrary()
    with PageLockedMemory(5000, CudaRuntime(library)) as memory:
        assert library.calls == [("register", (memory.address, 5000, 0))]
        tensor = memory.tensor()
        assert tensor.shape == (5000,) and tensor.data_ptr() == memory.address
        tensor[4999] = 7
        assert memory.tensor()[4999] == 7
        del tensor
    memory.close()
    assert library.calls[1:] == [("unregister", (memory.address,))]


def test_page_locked_memory_outlives_its_owner_under_a_tensor() -> None:
    memory = PageLockedMemory(1 << 20, CudaRuntime(RecordingLibrary()))
    tensor = memory.tensor()
    tensor.fill_(9)
    memory.close()
    assert int(tensor.sum()) == 9 << 20


def test_memory_that_cannot_be_page_locked() -> None:
    library = RecordingLibrary(code=2)
    with pytest.raises(CudaError, match=r"cudaHostRegister of 4096 bytes at 0x[0-9a-f]+ failed"):
        PageLockedMemory(4096, CudaRuntime(library))
    assert library.names == ["register", "name", "text", "last error"], "nothing to unregister"


def test_memory_that_stays_page_locked() -> None:
    library = RecordingLibrary()
    memory = PageLockedMemory(4096, CudaRuntime(library))
    library.code = 713
    with pytest.raises(
        CudaError, match=r"cudaHostUnregister of .*cudaErrorHostMemoryNotRegistered"
    ):
        memory.close()
    assert memory.tensor().sum() == 0, "it is still there"
    library.code = 0
    memory.close()


@pytest.mark.parametrize(("address", "size"), [(0, 10), (4096, 0), (4096, -1)])
def test_no_memory_to_page_lock(address: int, size: int) -> None:
    library = RecordingLibrary()
    with pytest.raises(KernelRefused, match=f"above 0, got {address} and {size} bytes"):
        CudaRuntime(library).register_host(address, size)
    with pytest.raises(KernelRefused, match=r"above 0, got 0 bytes"):
        PageLockedMemory(0, CudaRuntime(library))
    assert library.calls == []


def test_the_library_is_the_one_that_is_loaded() -> None:
    assert load_library("libc.so.6")._handle == ctypes.CDLL("libc.so.6")._handle
    with pytest.raises(KernelRefused, match=r"need libnone\.so\.1, which torch has not loaded"):
        load_library("libnone.so.1")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device() -> None:
    with pytest.raises(KernelRefused, match="need a CUDA device, and torch sees none"):
        cuda_runtime()


@pytest.mark.gpu
def test_blocks_go_out_and_in_on_a_device() -> None:
    runtime, stream = cuda_runtime(), torch.cuda.Stream()
    pool = torch.randint(0, 256, (32, 4096), dtype=torch.uint8, device="cuda")
    order = torch.randperm(32)
    places = np.arange(32) * 4096
    sizes = np.full(32, 4096)
    with PageLockedMemory(32 * 4096, runtime) as memory:
        slab = memory.tensor().view(32, 4096)
        assert slab[3].is_pinned()
        expected = pool[order.cuda()].cpu()
        torch.cuda.synchronize()
        out = merge_neighbours(
            pool.data_ptr() + order.numpy() * 4096, memory.address + places, sizes
        )
        runtime.copy_batch(out, stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(slab, expected)
        pool.zero_()
        torch.cuda.synchronize()
        runtime.copy_batch(Batch(out.targets, out.sources, out.sizes), stream.cuda_stream)
        stream.synchronize()
        assert torch.equal(pool[order.cuda()].cpu(), expected)


@pytest.mark.gpu
def test_a_block_is_read_after_the_kernel_that_writes_it() -> None:
    runtime, stream = cuda_runtime(), torch.cuda.Stream()
    blocks = torch.zeros(64, 1 << 16, dtype=torch.uint8, device="cuda")
    with PageLockedMemory(blocks.nbytes, runtime) as memory:
        slab = memory.tensor().view_as(blocks)
        places = np.arange(64) * blocks.shape[1]
        batch = Batch(
            blocks.data_ptr() + places, memory.address + places, np.full(64, blocks.shape[1])
        )
        torch.cuda.synchronize()
        for number in range(1, 21):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
                blocks.fill_(number)
                runtime.copy_batch(batch, stream.cuda_stream)
            stream.synchronize()
            assert bool((slab == number).all()), f"round {number} read an older block"
