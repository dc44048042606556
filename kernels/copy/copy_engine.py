# SPDX-License-Identifier: Apache-2.0
"""The copy engine (DMA) of a GPU: many copies in one call, and page-locked memory for such copies.

The module calls a few functions of torch's CUDA runtime by ctypes, because torch and CuPy do not
offer cudaMemcpyBatchAsync. The copies leave the GPU's multiprocessors free for kernels. A copy is
given by addresses and bytes. The module can be imported without CUDA.

A caller must do this:
- keep source and target memory alive, and registered, until the stream has run the batch;
- name no target twice in a batch, and no target that is also a source, because the copies of a
  batch run in no fixed order."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..kernel_choice import KernelRefused

Integers = Sequence[int] | npt.NDArray[np.int64]

# CUDA's order `any` is faster on some machines, but is not offered: under `any`, the copy engine
# may read a block before an earlier kernel of the stream has written the block.
ACCESS_ORDER_STREAM = 1
# A hint, which the driver may ignore: the copies run at the same time as kernels.
PREFER_OVERLAP_WITH_COMPUTE = 1
# Handles of the legacy default stream: null, and cudaStreamLegacy.
LEGACY_STREAMS = (0, 1)
FIRST_VERSION = 12080  # the first CUDA version with cudaMemcpyBatchAsync
VERSION_WITHOUT_FAIL_INDEX = 13000


class CudaError(RuntimeError):
    """A call of the CUDA runtime has failed. The message names the call and CUDA's error."""

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code

    @classmethod
    def from_code(cls, library: Any, code: int, what: str) -> CudaError:
        """Return the error for the failure `code`, and reset the error state of `library`.
        Otherwise torch would read that state after its next kernel and report a failure."""
        name = library.cudaGetErrorName(code).decode()
        text = library.cudaGetErrorString(code).decode()
        library.cudaGetLastError()
        return cls(f"{what} failed: {text} ({name}, {code})", code)


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CopyAttributes(ctypes.Structure):
    """The C structure `cudaMemcpyAttributes`; hints for managed memory stay unset."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_hint", _Location),
        ("target_hint", _Location),
        ("flags", ctypes.c_uint),
    )


class Batch:
    """A reusable list of copies by address, as the arrays that the CUDA runtime reads."""

    __slots__ = ("count", "sizes", "sizes_at", "sources", "sources_at", "targets", "targets_at")

    def __init__(self, sources: Integers, targets: Integers, sizes: Integers) -> None:
        """Raise KernelRefused unless the lists have the same length and all their numbers are above
        0."""
        counts = (len(sources), len(targets), len(sizes))
        if len(set(counts)) != 1:
            raise KernelRefused(
                f"expected as many sources, targets and sizes, got {', '.join(map(str, counts))}"
            )
        # The three lists share one array, so that its address is looked up only once.
        table = np.array((sources, targets, sizes), dtype=np.int64)
        self.count = counts[0]
        if self.count and table.min() <= 0:
            raise KernelRefused(
                "expected addresses and sizes above 0 (the runtime takes no empty copy), "
                f"got {int(table.min())}"
            )
        self.sources, self.targets, self.sizes = table
        first, row_bytes = int(table.ctypes.data), table.strides[0]
        self.sources_at, self.targets_at, self.sizes_at = (first + i * row_bytes for i in range(3))


def merge_neighbours(sources: Integers, targets: Integers, sizes: Integers) -> Batch:
    """Return a batch that joins copies which are adjacent in the list, the source and the target.

    The driver does not join copies, and many small copies are much slower than a large one. Callers
    should sort the copies by address, because only copies that are adjacent in the list are joined.
    """
    apart = Batch(sources, targets, sizes)
    if apart.count < 2:
        return apart
    is_start = np.ones(apart.count, dtype=np.bool_)
    is_start[1:] = apart.sources[1:] != apart.sources[:-1] + apart.sizes[:-1]
    is_start[1:] |= apart.targets[1:] != apart.targets[:-1] + apart.sizes[:-1]
    starts = np.flatnonzero(is_start)
    if len(starts) == apart.count:
        return apart
    return Batch(apart.sources[starts], apart.targets[starts], np.add.reduceat(apart.sizes, starts))


def copy_batch_plain(batch: Batch) -> None:
    """Copy a batch within CPU memory, by memmove. The copies have ended on return."""
    table = (batch.targets.tolist(), batch.sources.tolist(), batch.sizes.tolist())
    for target, source, size in zip(*table, strict=True):
        ctypes.memmove(target, source, size)


class CudaRuntime:
    """The functions of a CUDA runtime library. Any thread may call a CudaRuntime.

    The functions use the current device of the calling thread, which must be the device of the
    stream. `refusal` is the reason why the library has no batched copies, or None."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorName.restype = ctypes.c_char_p
        library.cudaGetErrorString.restype = ctypes.c_char_p
        self.version = _version(library.cudaRuntimeGetVersion)
        self.refusal = _reason_against_batches(self.version, _version(library.cudaDriverGetVersion))
        library.cudaHostRegister.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        library.cudaHostUnregister.argtypes = (ctypes.c_void_p,)
        self._has_fail_index = self.version < VERSION_WITHOUT_FAIL_INDEX
        if self.refusal is None:
            self._bind_batches(library)

    def _bind_batches(self, library: Any) -> None:
        pointers, size = [ctypes.c_void_p] * 3, ctypes.c_size_t
        library.cudaMemcpyBatchAsync.argtypes = (
            *(*pointers, size),
            *(ctypes.c_void_p, ctypes.c_void_p, size),
            *((ctypes.c_void_p,) if self._has_fail_index else ()),
            ctypes.c_void_p,
        )
        self._copy = library.cudaMemcpyBatchAsync
        # One set of attributes, which the driver only reads, for the copies from number 0 on.
        self._attributes = CopyAttributes(
            source_access_order=ACCESS_ORDER_STREAM, flags=PREFER_OVERLAP_WITH_COMPUTE
        )
        self._first = ctypes.c_size_t(0)
        self._attributes_at = ctypes.addressof(self._attributes)
        self._first_at = ctypes.addressof(self._first)

    def copy_batch(self, batch: Batch, stream: int) -> None:
        """Queue all copies of `batch` in the CUDA stream with the handle `stream`.

        `copy_batch` returns before the copies run. The copies read their sources after all earlier
        work of the stream. Raises KernelRefused if there is a `refusal`, and for the default
        stream, which cudaMemcpyBatchAsync does not accept. Raises CudaError if the call fails; some
        of the copies may have been queued."""
        if self.refusal is not None:
            raise KernelRefused(self.refusal)
        if stream in LEGACY_STREAMS:
            raise KernelRefused(
                "batched copies cannot be queued in CUDA's default stream; make one with "
                "torch.cuda.Stream() and give its cuda_stream"
            )
        if not batch.count:
            return
        fail_index = ctypes.c_size_t(0)
        code = self._copy(
            batch.targets_at,
            batch.sources_at,
            batch.sizes_at,
            batch.count,
            self._attributes_at,
            self._first_at,
            1,
            *((ctypes.addressof(fail_index),) if self._has_fail_index else ()),
            stream,
        )
        if code:
            raise CudaError.from_code(
                self._library, code, f"cudaMemcpyBatchAsync of {batch.count} copies"
            )

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-lock existing host memory, so that the device can access it.

        Raises KernelRefused for an empty range, and CudaError if CUDA fails."""
        if address <= 0 or num_bytes <= 0:
            raise KernelRefused(
                f"expected an address and a size above 0, got {address} and {num_bytes} bytes"
            )
        code = self._library.cudaHostRegister(address, num_bytes, 0)
        if code:
            raise CudaError.from_code(
                self._library, code, f"cudaHostRegister of {num_bytes} bytes at {address:#x}"
            )

    def unregister_host(self, address: int) -> None:
        """Unlock the memory that `register_host` locked, after its last copy. Raises CudaError."""
        code = self._library.cudaHostUnregister(address)
        if code:
            raise CudaError.from_code(self._library, code, f"cudaHostUnregister of {address:#x}")


def _version(ask: Callable[[Any], int]) -> int:
    number = ctypes.c_int(0)
    ask(ctypes.byref(number))
    return number.value


def _reason_against_batches(runtime: int, driver: int) -> str | None:
    """Return the reason why these runtime and driver versions have no batched copies, or None."""
    if runtime < FIRST_VERSION:
        return (
            f"batched copies need CUDA runtime {_shown(FIRST_VERSION)} or newer, and torch has "
            f"loaded {_shown(runtime)}; install a newer build of it"
        )
    if driver < FIRST_VERSION:
        return (
            f"batched copies need a driver for CUDA {_shown(FIRST_VERSION)} or newer, and this one "
            f"is for {_shown(driver)}; install a newer driver"
        )
    return None


def _shown(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.cache
def cuda_runtime() -> CudaRuntime:
    """Return torch's CUDA runtime. Raises KernelRefused if there is no CUDA or no GPU."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise KernelRefused("batched copies need a CUDA device, and torch sees none")
    torch.cuda.init()  # type: ignore[no-untyped-call]
    return CudaRuntime(cuda_library())


def cuda_library() -> ctypes.CDLL:
    """Return torch's CUDA runtime library. Raises KernelRefused if it cannot be found."""
    version = (torch.version.cuda or "").split(".")[0]
    return load_library(f"libcudart.so.{version}")


def load_library(name: str) -> ctypes.CDLL:
    """Return the library `name` that this process has loaded, else load one from the system's
    folders."""
    try:
        return ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
    except OSError:
        pass  # torch contains the runtime; a second copy has the same streams and memory
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise KernelRefused(
            f"batched copies need {name}, which torch has not loaded and the system does not "
            f"find ({error}); install a build of torch that brings it"
        ) from error


class PageLockedMemory:
    """Page-locked host memory of exactly `num_bytes`, for the copy engine and for kernels.

    Torch's own page-locked memory has the next power of two as size. Call `close` after the last
    copy that uses the memory."""

    def __init__(self, num_bytes: int, runtime: CudaRuntime) -> None:
        """Raise KernelRefused or CudaError like `register_host`; OSError if memory is exhausted."""
        if num_bytes <= 0:
            raise KernelRefused(f"expected a size above 0, got {num_bytes} bytes")
        self._runtime = runtime
        self._memory = mmap.mmap(-1, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._is_registered = False
        try:
            runtime.register_host(self.address, num_bytes)
        except CudaError:
            self.close()
            raise
        self._is_registered = True

    def tensor(self) -> torch.Tensor:
        """Return all of the memory as uint8 `[bytes]`."""
        # A NumPy view, unlike torch.frombuffer, keeps the mapping until the tensor is freed.
        return torch.from_numpy(np.frombuffer(self._memory, dtype=np.uint8))

    def close(self) -> None:
        """Free the memory, at once or together with the last tensor over the memory. Idempotent.

        If CudaError is raised, the memory is not freed."""
        if self._is_registered:
            self._runtime.unregister_host(self.address)
            self._is_registered = False
        try:
            self._memory.close()
        except BufferError:
            pass  # the memory is freed with the last tensor over it

    def __enter__(self) -> PageLockedMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
