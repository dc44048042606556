# SPDX-License-Identifier: Apache-2.0
"""The CUDA device's interface to CUDA: a protocol, and its implementation with torch.

The protocol is minimal, so that tests can replace CUDA by queues. Streams and events are handles of
the CUDA runtime; addresses are numbers. A thread must call `enter_thread` before the other methods.
Every method may raise CudaError."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ...kernels.copy.copy_blocks import transfer_blocks
from ...kernels.copy.copy_engine import (
    Batch,
    CudaError,
    PageLockedMemory,
    cuda_library,
    cuda_runtime,
)
from ...kernels.kernel_choice import TRITON, KernelRefused
from .base import DeviceError
from .cuda_api import MEMCPY_DEVICE_TO_HOST, MEMCPY_HOST_TO_DEVICE, CudaApi

log = logging.getLogger(__name__)

# The programs of a copy kernel, few enough not to slow decode steps down.
FEW_PROGRAMS = 12


class PageLocked(Protocol):
    """A buffer of page-locked memory."""

    address: int

    def tensor(self) -> torch.Tensor:
        """Return the whole buffer as uint8."""

    def close(self) -> None:
        """Release the memory, which no copy may use any more."""


class Runtime(Protocol):
    """A device, and the CUDA runtime that torch has loaded."""

    device: torch.device
    batch_refusal: str | None  # why batched copies are missing; None if they work

    def enter_thread(self, *, is_own: bool) -> None:
        """Set the current device of the calling thread, before its other calls. With `is_own`, for
        threads of the copy device, allow calls while another thread captures a CUDA graph."""

    def compute_stream(self) -> int:
        """Return the stream of the calling thread's kernels."""

    def create_stream(self) -> int:
        """Create a stream of the lowest priority."""

    def destroy_stream(self, stream: int) -> None: ...

    def create_event(self) -> int:
        """Create an event that records its time; threads sleep while they wait for the event."""

    def destroy_event(self, event: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def wait_event(self, stream: int, event: int) -> None:
        """Make the stream, not the caller, wait for the event's last recording, if any."""

    def has_ended(self, event: int) -> bool: ...

    def synchronise_event(self, event: int) -> None:
        """Sleep until the event has ended, without a time limit; releases the GIL."""

    def seconds_between(self, start: int, end: int) -> float: ...

    def copy_batch(self, batch: Batch, stream: int) -> None:
        """Queue all copies in one call, read in stream order. Needs page-locked memory."""

    def copy_each(self, batch: Batch, stream: int, *, to_host: bool) -> None:
        """Queue the copies one by one. With pageable memory the call may wait, and may read sources
        on the host before earlier work of the stream has run."""

    def move_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        stream: int,
    ) -> None:
        """Queue a copy kernel of FEW_PROGRAMS programs. Raises KernelRefused without a kernel."""

    def register_host(self, address: int, num_bytes: int) -> None:
        """Page-lock memory that was allocated elsewhere."""

    def unregister_host(self, address: int) -> None: ...

    def page_locked(self, num_bytes: int) -> PageLocked:
        """Allocate page-locked memory."""

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        """Allocate device memory, as uint8."""


class TorchRuntime:
    """The CUDA runtime that torch has loaded. Raises DeviceError without CUDA or this device."""

    def __init__(self, device: torch.device) -> None:
        try:
            engine = cuda_runtime()
        except KernelRefused as refusal:
            raise DeviceError(f"no CUDA device can be used: {refusal}") from refusal
        count = torch.cuda.device_count()
        index = device.index if device.index is not None else torch.cuda.current_device()
        if index >= count:
            raise DeviceError(f"cuda:{index} was named, and there are devices 0 to {count - 1}")
        self.device = torch.device("cuda", index)
        self.batch_refusal = engine.refusal
        api = self._api = CudaApi(cuda_library())
        self.create_stream = api.create_stream
        self.destroy_stream = api.destroy_stream
        self.create_event = api.create_event
        self.destroy_event = api.destroy_event
        self.record_event = api.record_event
        self.wait_event = api.wait_event
        self.has_ended = api.has_ended
        self.synchronise_event = api.synchronise_event
        self.seconds_between = api.seconds_between
        self.copy_batch = engine.copy_batch
        self.register_host = engine.register_host
        self.unregister_host = engine.unregister_host
        self._engine = engine

    def enter_thread(self, *, is_own: bool) -> None:
        self._api.set_device(self.device.index)
        if is_own:
            self._api.relax_capture()

    def compute_stream(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def copy_each(self, batch: Batch, stream: int, *, to_host: bool) -> None:
        kind = MEMCPY_DEVICE_TO_HOST if to_host else MEMCPY_HOST_TO_DEVICE
        table = (batch.targets.tolist(), batch.sources.tolist(), batch.sizes.tolist())
        for target, source, size in zip(*table, strict=True):
            self._api.memcpy_async(target, source, size, kind, stream)

    def move_blocks(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        stream: int,
    ) -> None:
        queue = torch.cuda.ExternalStream(stream, self.device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(queue):
            # A copy from pageable memory would make this thread wait for earlier work.
            ids = torch.tensor([source_ids, target_ids]).pin_memory()
            ids = ids.to(self.device, non_blocking=True)
            transfer_blocks(
                source, target, ids[0], ids[1], max_programs=FEW_PROGRAMS, kernel=TRITON
            )

    def page_locked(self, num_bytes: int) -> PageLocked:
        try:
            return PageLockedMemory(num_bytes, self._engine)
        except (CudaError, OSError) as error:
            # Memory that the driver allocates does not count against the limit of locked memory.
            memory = _cupy_memory(num_bytes)
            if memory is None:
                raise
            log.info("a page-locked buffer is CuPy's, because %s", error)
            return memory

    def device_memory(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class CupyMemory:
    """Page-locked memory that the driver allocates for CuPy."""

    def __init__(self, num_bytes: int, allocate: Callable[[int], Any]) -> None:
        self._memory: Any = allocate(num_bytes)
        self._num_bytes = num_bytes
        self.address = int(self._memory.ptr)

    def tensor(self) -> torch.Tensor:
        # CuPy's memory may be longer than `num_bytes`.
        return torch.from_numpy(np.frombuffer(self._memory, np.uint8, self._num_bytes))

    def close(self) -> None:
        """Release the memory, which is freed with the last tensor that uses it."""
        self._memory = None


def _cupy_memory(num_bytes: int) -> CupyMemory | None:
    """Allocate page-locked memory with CuPy; return None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    return CupyMemory(num_bytes, cupy.cuda.alloc_pinned_memory)
