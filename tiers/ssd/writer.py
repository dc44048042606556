# SPDX-License-Identifier: Apache-2.0
"""The one thread that changes the disk: evicts, writes records and commits rows, batch by batch.

The order of a batch is what makes the store safe at any moment of a crash or power cut:

    1  rows of blocks that left are removed, durably; only now are their slots free
    2  records are written into free slots and reach the disk (fdatasync)
    3  rows of the new blocks are committed, durably; only now are they offered.
       A full store removes in the same commit what the next batch will displace: a commit is
       dear, and so a steady stream of batches takes one each instead of two

A slot that no row names is free, so nothing has to be repaired at the start. How recently blocks
were used rides along with step 3. Knows nothing of how blocks are read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import lmdb

from ..record import HEADER_BYTES, encode_header
from .index_file import IndexFile
from .slot_file import runs
from .slot_index import Entry
from .state import Job, StoreState

log = logging.getLogger(__name__)

BATCH_BYTES = 64 * 1024**2  # a sync for each costs nothing measurable beside writing it
ROWS_PER_COMMIT = 4096
IDLE_SECONDS = 10.0  # after which the last uses are written although nothing else is

_AHEAD_SHARE = 16  # at most this part of the slots is freed before it is needed
_EPOCH_SHIFT = 32


@dataclass(slots=True, eq=False)
class Write:
    """One block on its way to the disk, and all who asked for it."""

    key: bytes
    payload: memoryview  # `page_bytes` long
    waiters: list[tuple[Job[bool], int]] = field(default_factory=list)
    dropped: bool = False  # forgotten meanwhile: not to be kept


Placed = tuple[Write, Entry]


class Writer:
    """Owns the queue of writes; the thread starts with it. Changed under the state's lock."""

    def __init__(self, state: StoreState, index_file: IndexFile, epoch: int) -> None:
        self._state = state
        self._index_file = index_file
        # Generations are unique over all openings: the epoch above, a count of writes below.
        self._generation = epoch << _EPOCH_SHIFT
        self._scratch = state.slot_file.scratch()
        self._batch_blocks = max(1, BATCH_BYTES // state.slot_file.record_bytes)
        self._ahead = state.index.num_slots // _AHEAD_SHARE
        self._queue: deque[Write] = deque()
        self.pending: dict[bytes, Write] = {}  # queued or being written
        self.queued_blocks = 0  # the owner bounds it
        self._work = threading.Condition(state.lock)
        self._woken = state.index.has_leaving
        self._stop_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="stratakv-ssd-write", daemon=True)
        self._thread.start()

    def add(self, key: bytes, payload: memoryview, job: Job[bool], position: int) -> None:
        """Under the lock: queue a block, or wait for the write of it that is already queued."""
        write = self.pending.get(key)
        if write is None or write.dropped:
            write = self.pending[key] = Write(key, payload)
            self._queue.append(write)
            self.queued_blocks += 1
        write.waiters.append((job, position))
        self.wake()

    def wake(self) -> None:
        """Under the lock: there is something to write or to remove."""
        self._woken = True
        self._work.notify()

    def cancel(self, key: bytes) -> bool:
        """Under the lock: forget a block on its way; False if it is not."""
        write = self.pending.get(key)
        if write is None or write.dropped:
            return False
        write.dropped = True
        return True

    def close(self, deadline: float) -> bool:
        """Write what is queued until `deadline` (monotonic) and abandon the rest. False if the
        thread is still in the kernel; then the files must stay open."""
        with self._state.lock:
            self._stop_at = deadline
            self.wake()
        self._thread.join(max(0.0, deadline - time.monotonic()) + 1.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while self._step():
            pass
        self._abandon_queue()
        self._write_last_uses()

    def _step(self) -> bool:
        """One batch; False after the last one. Keeps no view of a buffer when it returns."""
        batch, is_last = self._next_batch()
        placed: list[Placed] = []
        committed: list[Placed] = []
        try:
            placed = self._place(batch)
            committed = self._write(placed)
        except Exception as error:  # noqa: BLE001 - the thread and the futures must go on
            self._state.count_fault(error)
        self._settle(batch, placed, committed)
        return not is_last

    def _next_batch(self) -> tuple[list[Write], bool]:
        """Wait for work; what to write, and whether this is the last time."""
        with self._state.lock:
            if not self._queue:
                self._work.wait_for(lambda: self._woken, IDLE_SECONDS)
            self._woken = False
            is_late = self._stop_at is not None and time.monotonic() >= self._stop_at
            count = 0 if is_late else min(len(self._queue), self._batch_blocks)
            batch = [self._queue.popleft() for _ in range(count)]
            return batch, is_late or (self._stop_at is not None and not self._queue)

    def _place(self, batch: Sequence[Write]) -> list[Placed]:
        """Give each block of a batch a free slot, as far as there are any; evicts for it."""
        index = self._state.index
        with self._state.lock:
            wanted = [write for write in batch if not write.dropped]
            self._state.stats.evicted_blocks += index.make_room(len(wanted))
            leaving = index.take_leaving()
        self._remove_rows(leaving)
        with self._state.lock:
            slots = index.allocate(len(wanted))
        return [
            (write, Entry(write.key, slot, self._next_generation()))
            for write, slot in zip(wanted, slots, strict=False)
        ]

    def _write(self, placed: Sequence[Placed]) -> list[Placed]:
        """Bring records and rows to the disk; those that are there now."""
        began = time.monotonic()
        written = self._write_records(placed)
        committed = written if self._commit([entry for _, entry in written]) else []
        with self._state.lock:
            self._state.stats.store_seconds += time.monotonic() - began
        return committed

    def _remove_rows(self, leaving: Sequence[Entry]) -> None:
        index = self._state.index
        for start in range(0, len(leaving), ROWS_PER_COMMIT):
            chunk = leaving[start : start + ROWS_PER_COMMIT]
            try:
                self._index_file.delete([entry.slot for entry in chunk])
            except lmdb.Error as error:
                self._state.count_fault(error)
                with self._state.lock:
                    index.keep_leaving(leaving[start:])
                return
            with self._state.lock:
                index.release(chunk)

    def _write_records(self, placed: Sequence[Placed]) -> list[Placed]:
        """Those whose records are on the disk; none of them where the last word, the sync, is
        an error: what then is on the disk nobody knows."""
        if not placed:
            return []
        slot_file = self._state.slot_file
        written: list[Placed] = []
        slots = [entry.slot for _, entry in placed]
        try:
            for run in runs(slots, slot_file.run_slots):
                part = placed[run.start : run.stop]
                if self._write_run(part):
                    written += part
            slot_file.sync()
        except OSError as error:
            self._state.count_fault(error)
            return []
        return written

    def _write_run(self, placed: Sequence[Placed]) -> bool:
        state = self._state
        for (write, entry), header in zip(placed, self._scratch.headers, strict=False):
            header[:HEADER_BYTES] = encode_header(state.header_of(entry), write.payload)
        try:
            payloads = [write.payload for write, _ in placed]
            state.slot_file.write(placed[0][1].slot, payloads, self._scratch)
        except OSError as error:
            state.count_fault(error)
            return False
        return True

    def _commit(self, entries: Sequence[Entry]) -> bool:
        """Commit the rows of new entries, with them last uses and removals for the next batch;
        False if that failed."""
        index = self._state.index
        with self._state.lock:
            rows = index.touched_rows(ROWS_PER_COMMIT)
            rows += index.new_rows(entries)
            self._state.stats.evicted_blocks += index.make_room(min(len(entries), self._ahead))
            leaving = index.take_leaving(ROWS_PER_COMMIT) if rows else []
        if not rows:
            return True
        try:
            self._index_file.put(rows, [entry.slot for entry in leaving])
        except lmdb.Error as error:
            self._state.count_fault(error)
            with self._state.lock:
                index.keep_leaving(leaving)
            return False
        with self._state.lock:
            index.release(leaving)
        return True

    def _settle(
        self, batch: Sequence[Write], placed: Sequence[Placed], committed: Sequence[Placed]
    ) -> None:
        """Offer what is committed and end the calls that waited for the batch."""
        done: list[Job[bool]] = []
        with self._state.lock:
            self._publish(placed, committed)
            kept = {id(write) for write, _ in committed}
            for write in batch:
                self._leave_queue(write)
                is_kept = id(write) in kept and not write.dropped
                self._state.stats.dropped_stores += not is_kept
                for job, position in write.waiters:
                    job.settle(position, is_kept)
                    if not job.waiting_for:
                        done.append(job)
        for job in done:
            job.complete()

    def _publish(self, placed: Sequence[Placed], committed: Sequence[Placed]) -> None:
        index, stats = self._state.index, self._state.stats
        index.publish([entry for _, entry in committed])
        for write, entry in committed:
            if write.dropped:  # forgotten while it was being written
                index.forget(entry)
                self._woken = True
        used = {entry.slot for _, entry in committed}
        index.give_back(entry.slot for _, entry in placed if entry.slot not in used)
        stats.stored_blocks += len(committed)
        stats.stored_bytes += len(committed) * self._state.layout.page_bytes

    def _abandon_queue(self) -> None:
        """Time is over: end the calls whose blocks were not written."""
        done: list[Job[bool]] = []
        with self._state.lock:
            while self._queue:
                write = self._queue.popleft()
                self._leave_queue(write)
                self._state.stats.dropped_stores += 1
                for job, _position in write.waiters:
                    job.abandon()
                    if not job.waiting_for:
                        done.append(job)
        for job in done:
            job.complete()

    def _leave_queue(self, write: Write) -> None:
        self.queued_blocks -= 1
        # A block that was dropped and stored again has a second write, which is the pending one.
        if self.pending.get(write.key) is write:
            del self.pending[write.key]

    def _write_last_uses(self) -> None:
        """Bring the order of use to the disk, as far as the time to close allows."""
        stop_at = self._stop_at or 0.0
        while True:
            with self._state.lock:
                rows = self._state.index.touched_rows(ROWS_PER_COMMIT)
            if not rows or time.monotonic() > stop_at:
                return
            try:
                self._index_file.put(rows)
            except lmdb.Error as error:
                self._state.count_fault(error)
                return

    def _next_generation(self) -> int:
        self._generation += 1
        return self._generation
