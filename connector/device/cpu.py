# SPDX-License-Identifier: Apache-2.0
"""The CPU as a copy device, with a thread for each stream, and events for which threads wait.

The pool is ordinary memory and the forward pass runs on the caller's thread, so the last writer of
a block has finished when a copy is queued. If the forward pass would wait for a store, the calling
thread makes the copy itself, unless it is large, because waking another thread costs as much as
copying half a megabyte. All other rules of a copy device are the same as on CUDA."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...tiers.errors import InvalidBlock
from ...tiers.native.native_library import LEAST_BYTES, Rows, copy_rows_and_digest, has_digests
from ...tiers.tag import payload_digest
from .base import CopyDevice, DeviceError, Event, SlabMemory, Stream
from .copy_plan import merge_runs

# The most queued jobs. A job has all blocks of a step, so a full queue means a stuck stream.
QUEUE_JOBS = 1024
# The longest wait for an event of the other stream; a copy takes milliseconds.
DEPENDENCY_SECONDS = 60.0
# The largest store that the caller copies itself; a thread copies larger stores meanwhile.
HELD_BYTES = 16 * 1024**2

Bytes = npt.NDArray[np.uint8]


class CpuEvent:
    """An event that ends when its creator calls `mark_done`. Each copy has an event, but threads
    wait for few events, so the first waiter makes the lock."""

    __slots__ = ("_ended", "_error", "_gate", "_seconds", "digests", "pages")

    _making_gate = threading.Lock()

    def __init__(self) -> None:
        self._ended = False
        self._gate: threading.Lock | None = None  # held until the end; None without a waiter
        self._error: Exception | None = None
        self._seconds = 0.0
        self.digests: list[bytes] | None = None  # a list if digests are to be made
        self.pages: Bytes | None = None  # the slab's pages to hash

    def mark_done(self, error: Exception | None = None, seconds: float = 0.0) -> None:
        """End the event, well or with an error, and wake all waiters. The event's creator calls
        this method from one thread at a time; only the first call counts."""
        if self._ended:
            return
        self._error = error
        self._seconds = seconds
        self._ended = True  # set before `_gate` is read, because `wait` makes a gate first
        if self._gate is not None:
            self._gate.release()

    def done(self) -> bool:
        return self._ended

    def wait(self, timeout_seconds: float) -> bool:
        if self._ended:
            return True
        with self._making_gate:
            if self._gate is None:
                gate = threading.Lock()
                gate.acquire()
                self._gate = gate
        if not self._ended and self._gate.acquire(timeout=max(0.0, timeout_seconds)):
            self._gate.release()  # for the next waiter
        return self._ended

    def error(self) -> Exception | None:
        return self._error

    def seconds(self) -> float:
        return self._seconds


# Arrays that each contain one part of all pages; usually a single array contains whole pages.
Parts = Sequence[Bytes]

# Source, source pages, target, target pages; both as rows if the native library can copy and hash
# them; the events to wait for; the copy's event. A tuple is quick to make.
_Job = tuple[
    Parts, Sequence[int], Parts, Sequence[int], tuple[Rows, Rows] | None, Sequence[Event], CpuEvent
]


def _run(job: _Job) -> None:
    """Make the copies of a job, and end its event."""
    sources, source_pages, targets, target_pages, rows, _, event = job
    began = time.monotonic()
    error: Exception | None = None
    try:
        if event.digests is None or event.pages is None:
            runs = merge_runs(source_pages, target_pages)
            for source, target in zip(sources, targets, strict=True):
                _copy_runs(source, target, runs)
        elif rows is not None:
            # The native library hashes while it copies, without the interpreter's lock.
            event.digests += copy_rows_and_digest(rows[1], target_pages, rows[0], source_pages)
        else:
            for start, end in zip(source_pages, target_pages, strict=True):
                for source, target in zip(sources, targets, strict=True):
                    target[end] = source[start]
                event.digests.append(payload_digest(event.pages[end].data))
    except Exception as failure:  # noqa: BLE001 - the event carries it to its readers
        # The traceback's frames would keep views of the pool and the slab alive.
        error = failure.with_traceback(None)
    event.pages = None
    event.mark_done(error, time.monotonic() - began)


def _whole_rows(sources: Parts, targets: Parts) -> tuple[Rows, Rows] | None:
    """Return source and target as rows for the native library; None if it cannot copy the pages."""
    if len(sources) > 1 or sources[0].ndim != 2 or not has_digests():
        return None
    source, target = sources[0], targets[0]
    size = source.shape[1]
    if size < LEAST_BYTES or source.strides[1] != 1 or not target.flags.writeable:
        return None
    return (
        Rows(source.ctypes.data, source.strides[0], size),
        Rows(target.ctypes.data, target.strides[0], size),
    )


class _StreamThread:
    """A thread that runs jobs one after the other, and sleeps while its queue is empty."""

    def __init__(self, name: str, dependency_seconds: float) -> None:
        self._dependency_seconds = dependency_seconds
        # Wakes a thread in half the time of a bounded Queue; `submit` checks the bound.
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self.notify: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        if self._jobs.qsize() >= QUEUE_JOBS:
            raise DeviceError(f"{QUEUE_JOBS} copies wait already in one stream")
        self._jobs.put(job)

    def close(self, timeout_seconds: float) -> bool:
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(max(0.0, timeout_seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            *_, after, event = job
            try:
                self._wait_for(after)
            except Exception as error:  # noqa: BLE001 - the event carries it to its readers
                event.mark_done(error.with_traceback(None))
            else:
                _run(job)
            del job  # an idle stream holds no views of the pool or the slab
            self.notify()

    def _wait_for(self, events: Sequence[Event]) -> None:
        deadline = time.monotonic() + self._dependency_seconds
        for event in events:
            if not event.wait(max(0.0, deadline - time.monotonic())):
                raise DeviceError(f"a copy waited {self._dependency_seconds} s for another stream")


class CpuCopyDevice(CopyDevice):
    """A copy device on the CPU. `dependency_seconds` bounds the wait for `after` events."""

    def __init__(self, dependency_seconds: float = DEPENDENCY_SECONDS) -> None:
        self._streams = {
            stream: _StreamThread(f"stratakv-copy-{stream.value}", dependency_seconds)
            for stream in Stream
        }
        self._pool: Parts | None = None
        self._slab: Bytes | None = None
        self._slab_parts: Parts = ()  # the parts of the slab's pages
        self._rows: tuple[Rows, Rows] | None = None  # of pool and slab, for the native library
        self._page_bytes = 0
        self._closed = False
        self._makes_digests = False
        self._computed = CpuEvent()
        self._computed.mark_done()

    def set_notify(self, notify: Callable[[], None]) -> None:
        for stream in self._streams.values():
            stream.notify = notify

    def make_digests(self) -> None:
        self._makes_digests = True

    def digests(self, store: Event) -> list[bytes] | None:
        return store.digests if isinstance(store, CpuEvent) else None

    def register_slab(self, slab: SlabMemory) -> None:
        self._page_bytes = slab.layout.page_bytes
        self._slab = slab_pages(slab)

    def register_pool(self, pool: torch.Tensor) -> None:
        if self._slab is None:
            raise DeviceError("the slab must be registered before the pool")
        self.register_parts([pool_pages(pool, self._page_bytes)])

    def register_parts(self, parts: Parts) -> None:
        """Register a pool whose pages are spread over several arrays, instead of `register_pool`.
        Each array holds bytes `[num_blocks, ...]`, with any strides. A page is the bytes of its
        block in all arrays, in order. Raises InvalidBlock if the arrays do not fit."""
        if self._slab is None:
            raise DeviceError("the slab must be registered before the pool")
        sizes = [part[0].size for part in parts]
        if sum(sizes) != self._page_bytes or len({len(part) for part in parts}) != 1:
            raise InvalidBlock(
                f"the parts of a pool's pages have {sizes} bytes and {[len(p) for p in parts]} "
                f"blocks; a page of the slab's layout has {self._page_bytes}"
            )
        columns, place = [], 0
        for part, size in zip(parts, sizes, strict=True):
            column = self._slab[:, place : place + size]
            columns.append(column if part.ndim == 2 else _shaped(column, part.shape[1:]))
            place += size
        self._pool, self._slab_parts = list(parts), columns
        self._rows = _whole_rows(self._pool, columns)

    def writer_event(self) -> Event:
        return self._computed

    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        # The copying thread merges runs, so that the step loop does not wait for it.
        job = self._job(stream, block_ids, slots, after)
        self._streams[stream].submit(job)
        return job[-1]

    def copy_held(
        self, block_ids: Sequence[int], slots: Sequence[int], after: Sequence[Event] = ()
    ) -> Event:
        """Copy on the calling thread, unless the store is large or `after` has not ended."""
        is_much = len(slots) * self._page_bytes > HELD_BYTES
        if is_much or not all(event.done() for event in after):
            return self.copy(Stream.STORE, block_ids, slots, after)
        job = self._job(Stream.STORE, block_ids, slots, ())
        _run(job)
        self._streams[Stream.STORE].notify()
        return job[-1]

    def _job(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event],
    ) -> _Job:
        """Check the arguments of a copy and make its job. Raises the errors of `copy`."""
        pool, slab = self._pool, self._slab
        if self._closed or pool is None or slab is None:
            raise DeviceError("the device is closed or has no pool and slab yet")
        if len(block_ids) != len(slots):
            raise InvalidBlock(f"{len(block_ids)} blocks cannot go to {len(slots)} slots")
        _check_range("block", block_ids, len(pool[0]))
        _check_range("slot", slots, len(slab))
        if stream is Stream.STORE:
            event = CpuEvent()
            if self._makes_digests:
                event.digests, event.pages = [], slab
            return pool, block_ids, self._slab_parts, slots, self._rows, after, event
        return self._slab_parts, slots, pool, block_ids, None, after, CpuEvent()

    def close(self, timeout_seconds: float) -> bool:
        self._closed = True
        deadline = time.monotonic() + timeout_seconds
        ended = [
            stream.close(max(0.0, deadline - time.monotonic())) for stream in self._streams.values()
        ]
        if not all(ended):
            return False
        self._pool = self._slab = self._rows = None
        self._slab_parts = ()
        return True


def pool_pages(pool: torch.Tensor, page_bytes: int) -> Bytes:
    """Return a view of the pool as bytes `[num_blocks, page_bytes]`."""
    if not pool.is_contiguous() or pool.device.type != "cpu":
        raise InvalidBlock(
            f"the CPU device needs a contiguous pool in CPU memory, not one on {pool.device}"
        )
    actual = pool.nbytes // max(1, len(pool))
    if actual != page_bytes:
        raise InvalidBlock(f"a pool block has {actual} bytes, the slab's layout has {page_bytes}")
    pages: Bytes = pool.detach().view(torch.uint8).reshape(len(pool), page_bytes).numpy()
    return pages


def slab_pages(slab: SlabMemory) -> Bytes:
    """Return a view of the slab's pages as bytes `[num_slots, page_bytes]`; slots may be longer."""
    memory: Bytes = np.frombuffer(slab.memory(), dtype=np.uint8)
    return memory.reshape(slab.num_slots, slab.layout.slot_bytes)[:, : slab.layout.page_bytes]


def _shaped(rows: Bytes, shape: tuple[int, ...]) -> Bytes:
    """Return a view in which each row of `rows` has `shape`; the bytes of a row are contiguous."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return np.lib.stride_tricks.as_strided(
        rows, (len(rows), *shape), (rows.strides[0], *reversed(strides))
    )


def _copy_runs(source: Bytes, target: Bytes, runs: Sequence[tuple[int, int, int]]) -> None:
    """Copy each run, given as `(source, target, count)` in pages, without the GIL."""
    for start, end, count in runs:
        target[end : end + count] = source[start : start + count]


def _check_range(what: str, ids: Sequence[int], count: int) -> None:
    # A negative index would silently count from the end.
    if ids and (min(ids) < 0 or max(ids) >= count):
        raise InvalidBlock(f"{what} ids go from 0 to {count - 1}, not {min(ids)} to {max(ids)}")
