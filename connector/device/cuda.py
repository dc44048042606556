# SPDX-License-Identifier: Apache-2.0
"""A CUDA device as a copy device: a low-priority stream for each direction, and the copy engine.

    slab          page-locked in pieces, in the background
    stores        one stream; start after the last kernel that writes the blocks
    loads         another; start after the stores whose blocks or slots they touch
    each copy     neighbours merged, one `cudaMemcpyBatchAsync`, sources read in stream order

If batched copies are missing or slow on a machine, the fastest measured way replaces them: single
copies, copies through a page-locked buffer, or a kernel of few programs. An error that leaves CUDA
unusable closes the device, and later calls raise that error."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from ...kernels.copy.copy_engine import CudaError
from ...tiers.errors import InvalidBlock
from ...tiers.tag import payload_digest
from .base import CopyDevice, DeviceError, Event, SlabMemory, Stream
from .copy_plan import Geometry, Way, check_pairs, make_pairs
from .cpu import DEPENDENCY_SECONDS
from .cuda_api import STICKY
from .cuda_copier import Copier, Memory
from .cuda_copy_runtime import Runtime, TorchRuntime
from .cuda_events import ComputeEvent, CopyEvent, wait_for_point
from .cuda_lane import Job, Lane
from .cuda_slab import PIECE_BYTES, LockedSlab, Progress
from .cuda_staging import HALF_BYTES

log = logging.getLogger(__name__)

# The most blocks whose copy the caller queues itself, in the time of waking a thread.
QUICK_BLOCKS = 16


class CudaCopyDevice(CopyDevice):
    """A copy device on CUDA; see `base.py`. `runtime` is by default torch's current device.
    `dependency_seconds` bounds the wait of threads for `after` events; streams have no limit.
    `progress` is called with the number of page-locked bytes of the slab and of all its bytes."""

    def __init__(
        self,
        runtime: Runtime | None = None,
        *,
        progress: Progress | None = None,
        dependency_seconds: float = DEPENDENCY_SECONDS,
        piece_bytes: int = PIECE_BYTES,
        staging_bytes: int = HALF_BYTES,
    ) -> None:
        self._runtime = TorchRuntime(torch.device("cuda")) if runtime is None else runtime
        self._progress = progress
        self._piece_bytes = piece_bytes
        self._entered = threading.local()
        self._slab: LockedSlab | None = None
        self._slab_rows: torch.Tensor | None = None
        self._slot_bytes = 0
        self._memory: Memory | None = None
        self._refusal: str | None = None  # why a part of the slab is not page-locked
        self._lost: str | None = None  # why CUDA can no longer be used
        self._closed = False
        self._released = False
        self._said_cost = False
        self._makes_digests = False
        self._say_lock = threading.Lock()
        self._lanes: dict[Stream, Lane] = {}
        self._copiers: dict[Stream, Copier] = {}
        with self._blamed():
            self._enter()
            try:
                for stream in Stream:
                    self._lanes[stream] = Lane(
                        f"stratakv-copy-{stream.value}",
                        self._runtime,
                        self._blame,
                        dependency_seconds=dependency_seconds,
                    )
                    self._copiers[stream] = Copier(self._runtime, stream, staging_bytes)
            except CudaError:
                self.close(DEPENDENCY_SECONDS)
                raise

    def set_notify(self, notify: Callable[[], None]) -> None:
        for lane in self._lanes.values():
            lane.notify = notify

    def register_slab(self, slab: SlabMemory) -> None:
        slot = self._slot_bytes = slab.layout.slot_bytes
        memory = np.frombuffer(slab.memory(), dtype=np.uint8).reshape(slab.num_slots, slot)
        self._slab_rows = torch.from_numpy(memory)[:, : slab.layout.page_bytes]
        self._slab = LockedSlab(
            self._runtime,
            self._slab_rows.data_ptr(),
            slab.num_slots,
            slot,
            progress=self._progress,
            refused=self._slab_refused,
            piece_bytes=self._piece_bytes,
        )

    def make_digests(self) -> None:
        self._makes_digests = True

    def digests(self, store: Event) -> list[bytes] | None:
        return store.digests if isinstance(store, CopyEvent) else None

    def wait_locked(self, timeout_seconds: float) -> bool:
        return self._slab is not None and self._slab.wait(timeout_seconds)

    def register_pool(self, pool: torch.Tensor) -> None:
        """Register the pool, and measure the speed of each way to copy."""
        if self._slab is None or self._slab_rows is None:
            raise DeviceError("the slab must be registered before the pool")
        page = self._slab_rows.shape[1]
        if not pool.is_contiguous() or pool.device != self._runtime.device:
            raise InvalidBlock(
                f"the CUDA device needs a contiguous pool on {self._runtime.device}, "
                f"not one on {pool.device}"
            )
        actual = pool.nbytes // max(1, len(pool))
        if actual != page:
            raise InvalidBlock(f"a pool block has {actual} bytes, the slab's layout has {page}")
        with self._blamed():
            self._enter()
            if self._runtime.batch_refusal is not None:
                log.warning("copies are queued one by one: %s", self._runtime.batch_refusal)
            for stream, copier in self._copiers.items():
                copier.calibrate(self._lanes[stream].stream, page)
        geometry = Geometry(
            pool_address=pool.data_ptr(),
            num_blocks=len(pool),
            slab_address=self._slab_rows.data_ptr(),
            num_slots=len(self._slab_rows),
            page_bytes=page,
            slot_bytes=self._slot_bytes,
            piece_slots=self._slab.piece_slots,
        )
        pages = pool.detach().view(torch.uint8).reshape(len(pool), page)
        self._memory = Memory(geometry, pages, self._slab_rows)
        self._say_cost()

    def writer_event(self) -> Event:
        self._check_open()
        with self._blamed():
            self._enter()
            return ComputeEvent(self._runtime, self._blame)

    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        self._check_open()
        memory, slab = self._memory, self._slab
        if memory is None or slab is None:
            raise DeviceError("the device has no pool and slab yet")
        check_pairs(memory.geometry, block_ids, slots)
        with self._blamed():
            self._enter()
        job = _CopyJob(self._copiers[stream], memory, block_ids, slots, slab.num_locked, after)
        if self._makes_digests and stream is Stream.STORE:
            job.event.digests = []
        return self._lanes[stream].submit(job)

    def hold_compute(self, events: Sequence[Event], timeout_seconds: float) -> list[Event]:
        """Make the compute stream wait. The caller waits only until the copies are queued in CUDA,
        or for the end of an event if CUDA cannot make the stream wait for it."""
        deadline = time.monotonic() + timeout_seconds
        by_caller = []
        for event in [event for event in events if not event.done()]:
            try:
                self._enter()
                point = wait_for_point(event, deadline - time.monotonic())
                if point is not None:
                    self._runtime.wait_event(self._runtime.compute_stream(), point.handle)
            except CudaError as error:
                self._blame(error)
                by_caller.append(event)
            except DeviceError:
                by_caller.append(event)  # no time is left
        return super().hold_compute(by_caller, deadline - time.monotonic())

    def close(self, timeout_seconds: float) -> bool:
        self._closed = True
        if self._released:
            return True
        deadline = time.monotonic() + timeout_seconds
        ended = [lane.close(max(0.0, deadline - time.monotonic())) for lane in self._lanes.values()]
        if not all(ended):
            return False
        try:
            self._enter()
            slab = self._slab
            if slab is not None and not slab.close(max(0.0, deadline - time.monotonic())):
                return False
            self._slab = None
            for copier in self._copiers.values():
                copier.close()
        except CudaError as error:
            # No copy runs now. The end of the process unlocks the memory that is still locked.
            log.warning("page-locked memory was not given back: %s", self._blame(error))
        self._memory = self._slab_rows = None
        self._released = True
        return True

    def _slab_refused(self, reason: str) -> None:
        self._refusal = reason
        self._say_cost()

    def _say_cost(self) -> None:
        """Warn once that a part of the slab is not page-locked, once reason and cost are known."""
        with self._say_lock:
            if self._said_cost or self._refusal is None or self._memory is None:
                return
            self._said_cost = True
        costs = ", ".join(copier.cost_of_pageable() for copier in self._copiers.values())
        log.warning("%s. The rest is served as ordinary memory: %s", self._refusal, costs)

    def _enter(self) -> None:
        """Set the calling thread's current device, at the first call of each thread."""
        if not getattr(self._entered, "done", False):
            self._runtime.enter_thread(is_own=False)
            self._entered.done = True

    def _check_open(self) -> None:
        if self._lost is not None:
            raise DeviceError(self._lost)
        if self._closed:
            raise DeviceError("the device is closed")

    def _blame(self, error: CudaError) -> DeviceError:
        """Return the DeviceError for a CudaError. After a STICKY error all later calls raise it."""
        if error.code in STICKY:
            if self._lost is None:
                self._lost = (
                    f"the CUDA device is lost and the copy device closed: {error}. Every further "
                    "call of CUDA in this process fails the same way; restart it"
                )
                log.error("%s", self._lost)
            return DeviceError(self._lost)
        return DeviceError(str(error))

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except CudaError as error:
            raise self._blame(error) from error


class _CopyJob(Job):
    """The copies of one call of `copy`. Slots below `num_locked` are page-locked."""

    def __init__(
        self,
        copier: Copier,
        memory: Memory,
        block_ids: Sequence[int],
        slots: Sequence[int],
        num_locked: int,
        after: Sequence[Event],
    ) -> None:
        is_by_cpu = len(slots) > 0 and max(slots) >= num_locked
        is_quick = not is_by_cpu and len(slots) <= QUICK_BLOCKS and copier.locked is Way.BATCHED
        super().__init__(after, is_quick=is_quick, is_by_cpu=is_by_cpu)
        # Copies of the lists, because a thread reads them later.
        self._work = (copier, memory, list(block_ids), list(slots), num_locked)

    def run(self, stream: int) -> None:
        copier, memory, block_ids, slots, num_locked = self._work
        copier.run(memory, make_pairs(block_ids, slots), num_locked, stream)

    def arrived(self) -> None:
        """Hash the stored slots, if digests are wanted, while most are in the CPU's cache."""
        digests = self.event.digests
        if digests is not None:
            _, memory, _, slots, _ = self._work
            for slot in slots:
                digests.append(payload_digest(memory.slab[slot].numpy().data))
