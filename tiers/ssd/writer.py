# SPDX-License-Identifier: Apache-2.0
"""Writer: the threads that store blocks: they evict, start record writes, and commit index rows.

The order of steps in a batch keeps the store consistent after a crash or a power cut at any time:

    1  rows of evicted and dropped blocks are removed durably; only then are their slots free
    2  records are written into free slots, several at a time, and flushed (fdatasync)
    3  rows of the new blocks are committed durably; only then do look-ups find the blocks

A slot that no row names is free, so opening a store needs no repair. While one batch is synced and
committed, the records of the next batches are already being written:

    batch 1   write ──── sync, commit
    batch 2         write ───       │
    batch 3             write ───── sync, commit

Batches that were written during the sync and commit of another batch are committed together: a
flush waits in the disk's queue behind running writes, and one flush is enough for all of them.

A second thread syncs and commits, so that the first thread can begin a new batch at once. A caller
submits its next batch when its last batch has ended; a single thread would still be committing
other batches at this time, and the disk would have no writes.

The order of steps is kept although batches overlap, for these reasons:
- Only the first thread allocates slots. A slot becomes free when the commit that removed its row
  has returned, and belongs to its batch until that batch has ended. So no row on the disk and no
  reader refers to a slot that is being written.
- While the second thread syncs and commits, the first thread does not sync, commit or erase. The
  first thread then only begins batches for which enough slots are free.
- The rows of a batch are committed only after a sync that began after all writes of the batch had
  returned. A sync that ran while a batch was still being written does not count for this batch.
- The kernel reports a failed sync only once, and data that was being written at the time may be
  lost too. So all running batches fail together with the batches that were synced.

A store that is not `durable` (`--kv-offload-ssd-durability async`) differs in one point: a `store`
call ends, and look-ups find the blocks, when step 2 has written the blocks. Syncs and commits
follow for many batches at once, in the order of steps 1 to 3. So a power cut or a kill may lose
blocks of the last `SYNC_SECONDS` (`OfferedBlocks`), but leaves no row without a record.

Look-ups miss a removed block at once, but the removal becomes durable later: `wait_forgotten`
returns when the rows and records of dropped blocks are erased and a clear is written to the
disk."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from queue import SimpleQueue

from ..base import Stored
from ..codecs.base import Codec
from ..tag import Proof
from .disk.io_pool import GRACE_SECONDS
from .index.index_file import EPOCH_SHIFT, IndexFile
from .index.row_writer import OfferedBlocks, RowWriter
from .index.slot_index import Entry
from .record_writer import Batch, Placed, RecordWriter, Write, WriteQueue
from .state import Job, StoreState

log = logging.getLogger(__name__)

# Sync and commit of a batch add no measurable time to its writes, except on a fast disk, where
# several batches share a sync and a commit. Larger batches would all end at the same time: a disk
# of 6 GB/s was idle until the next batches began.
BATCH_BYTES = 32 * 1024**2
BATCH_BLOCKS = 512  # limit for small blocks, so that the lock is held briefly
BATCHES_IN_FLIGHT = 6  # batches between first write and commit
IDLE_SECONDS = 10.0  # time after which last uses are written without other rows

_PAUSE_SECONDS = 1.0  # pause after an unexpected exception


class Writer:
    """The queue of writes, and its two threads. The module's docstring explains `durable`."""

    def __init__(
        self,
        state: StoreState,
        index_file: IndexFile,
        epoch: int,
        *,
        io_threads: int,
        durable: bool = True,
        codec: Codec | None = None,
        cleared_up_to: int = 0,
        note_cleared: Callable[[int], None] = lambda _generation: None,
        forget_other_formats: Callable[[], None] = lambda: None,
    ) -> None:
        self.queue = WriteQueue()
        self._state = state
        self._durable = durable
        self._offered = OfferedBlocks()  # always empty in a durable store
        self._rows = RowWriter(state, index_file, self._offered)
        # Unique over all openings: the epoch in the upper half, a count of writes in the lower.
        self._generation = epoch << EPOCH_SHIFT
        self._cleared_up_to = self._noted = cleared_up_to  # value in memory, value on the disk
        self._note_cleared = note_cleared
        self._forget_other_formats = forget_other_formats
        self._promises: list[_Promise] = []
        self._is_over = False
        self._batch_blocks = max(1, min(BATCH_BYTES // state.layout.page_bytes, BATCH_BLOCKS))
        # Begun batches that are not settled, the oldest first; changed under the lock.
        self._flying: deque[Batch] = deque()
        self._is_ending = False  # set by the first thread, reset by the second
        self._to_end: SimpleQueue[bool] = SimpleQueue()  # False ends the second thread
        self._failed_syncs = 0
        self._last_end = time.monotonic()
        self._work = threading.Condition(state.lock)
        self._records = RecordWriter(state, io_threads, codec, self._work.notify)
        self._woken = state.index.has_leaving
        self._stop_at: float | None = None
        self._ender = threading.Thread(
            target=self._run_commit_thread, name="stratakv-ssd-commit", daemon=True
        )
        self._thread = threading.Thread(target=self._run, name="stratakv-ssd-begin", daemon=True)
        try:
            self._ender.start()
            self._thread.start()
        except RuntimeError:  # no more threads can be started
            self._to_end.put(False)
            self._records.close(time.monotonic() + GRACE_SECONDS)
            raise

    def add(
        self, blocks: Iterable[tuple[bytes, memoryview, Proof | None, int]], job: Job[Stored]
    ) -> None:
        """Queue blocks as `WriteQueue.add` does. Called under the lock."""
        self.queue.add(blocks, job)
        self._work.notify()

    def wake(self) -> None:
        """Wake the first thread, which then removes rows. Called under the lock."""
        self._woken = True
        self._work.notify()

    def clear(self) -> None:
        """Remove all blocks durably. Called under the lock, after the index was cleared."""
        self.queue.cancel_all()
        self._cleared_up_to = self._generation
        self.wake()

    @property
    def has_clear_to_note(self) -> bool:
        return self._cleared_up_to > self._noted

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        """See StoreTier."""
        promise = _Promise()
        with self._state.lock:
            if self._is_over:
                return False
            self._promises.append(promise)
            self.wake()
        return promise.ended.wait(timeout_seconds) and promise.is_kept

    def close(self, deadline: float) -> bool:
        """Write queued blocks until `deadline` (monotonic) and abandon all others. Return False if
        a thread is still blocked in the kernel; the files must then stay open. A later call writes
        no more blocks, because the first call ends the threads."""
        with self._state.lock:
            self._stop_at = deadline if self._stop_at is None else min(self._stop_at, deadline)
            self.wake()
        self._thread.join(max(0.0, deadline - time.monotonic()))
        with self._state.lock:
            self._work.notify()  # queued blocks are abandoned
        end = max(deadline, time.monotonic()) + GRACE_SECONDS
        self._thread.join(end - time.monotonic())
        self._ender.join(max(0.0, end - time.monotonic()))
        is_over = self._records.close(end)
        return is_over and not (self._thread.is_alive() or self._ender.is_alive())

    def _run(self) -> None:
        while self._goes_on():
            pass
        self._to_end.put(False)
        stop_at = self._stop_at or 0.0
        # The second thread is idle now, unless an unexpected exception ended the loop.
        self._ender.join(max(0.0, stop_at - time.monotonic()) + GRACE_SECONDS)
        last_ones: list[Callable[[], None]] = [self._abandon_queue]
        if not self._ender.is_alive():  # only one thread may use the index
            last_ones += [self._commit_offered, lambda: self._rows.write_last_uses(stop_at)]
        for last in last_ones:
            try:
                last()
            except Exception as error:  # noqa: BLE001 - the others are still owed
                self._state.count_fault(error)
        with self._state.lock:
            self._is_over = True
            self._end_promises(self._promises, is_kept=False)

    def _goes_on(self) -> bool:
        """Call `_advance_batches`. Count an exception, so that the thread does not end."""
        try:
            return self._advance_batches()
        except Exception as error:  # noqa: BLE001 - what is in hand is ended by the next steps
            self._state.count_fault(error)
        with self._state.lock:
            if self._is_late():
                return False
            self._work.wait(_PAUSE_SECONDS)
        return True

    def _run_commit_thread(self) -> None:
        """Run the second thread: sync and commit batches at each request of the first thread."""
        while self._to_end.get():
            try:
                self._end_written()
            except Exception as error:  # noqa: BLE001 - as in `_goes_on`
                self._state.count_fault(error)
                time.sleep(_PAUSE_SECONDS)
            with self._state.lock:
                self._is_ending = False
                self._work.notify()

    def _advance_batches(self) -> bool:
        """Begin the next batch or commit the oldest batches, whichever is possible first. Return
        False after the last batch. On return, only running batches refer to buffers."""
        writes, is_closing = self._next_writes()
        if self._is_late():
            self._abandon_queue()  # even while the disk blocks the second thread
        if self._is_ending:
            if writes:
                self._submit_batch(writes)
            return True
        self._keep_promises()
        if writes:
            self._submit_batch(writes)
        elif not self._flying:
            self._tidy()
            return not is_closing
        elif not self._flying[0].blocks_left:
            if self._durable:
                self._is_ending = True
                self._to_end.put(True)
            else:
                self._end_written()
        if not self._durable and self._offered.is_due():
            self._commit_offered()
        return True

    def _next_writes(self) -> tuple[list[Write], bool]:
        """Wait for work. Return the blocks to write, and whether the store then closes."""
        with self._state.lock:
            self._work.wait_for(self._has_work, self._max_wait_seconds())
            writes = self.queue.pop_writes(self._batch_blocks) if self._can_begin() else []
            if not writes and not self._flying and not self._is_ending:
                self._woken = False
            return writes, self._stop_at is not None and not self._may_begin()

    def _has_work(self) -> bool:
        if self.queue.waiting and self._is_late():
            return True
        if self._is_ending:
            return self._can_begin()
        if self._flying:
            return not self._flying[0].blocks_left or self._may_begin()
        return self._woken or self._may_begin()

    def _can_begin(self) -> bool:
        """Whether a batch can begin. While the second thread commits, enough slots must already be
        free, because freeing more slots takes a commit."""
        blocks = min(len(self.queue.waiting), self._batch_blocks)
        has_slots = not self._is_ending or self._state.index.free.count >= blocks
        return has_slots and self._may_begin()

    def _may_begin(self) -> bool:
        has_room = len(self._flying) < BATCHES_IN_FLIGHT
        return bool(self.queue.waiting) and has_room and not self._is_late()

    def _is_late(self) -> bool:
        return self._stop_at is not None and time.monotonic() >= self._stop_at

    def _max_wait_seconds(self) -> float:
        """Return the seconds to wait for work before last uses or offered blocks are due."""
        if self._durable or not self._offered:
            return IDLE_SECONDS
        return self._offered.seconds_left()

    def _submit_batch(self, writes: list[Write]) -> None:
        """Assign slots to blocks and write them. Buffers are in use until the batch ends."""
        batch = Batch(writes, time.monotonic())
        try:
            batch.placed = self._assign_slots(writes)
            if not batch.placed and self._is_late():
                self._abandon(writes)  # earlier batches may never end
                return
            batch.failed_syncs = self._failed_syncs
            self._records.start(batch)
        except Exception as error:  # noqa: BLE001 - the thread and the futures must go on
            self._state.count_fault(error)
        with self._state.lock:
            self._flying.append(batch)

    def _assign_slots(self, writes: Sequence[Write]) -> list[Placed]:
        """Assign free slots to the blocks of a batch, evicting other blocks if needed. If slots are
        short, the last get none. After the deadline of `close`, no block gets a slot."""
        with self._state.lock:  # so that a clear is before or after the whole batch
            wanted = [write for write in writes if not write.dropped]
            generations = range(self._generation + 1, self._generation + 1 + len(wanted))
            self._generation += len(wanted)
        slots = self._take_slots(len(wanted))
        while len(slots) < len(wanted) and self._flying:
            # The blocks to evict may be in batches under way, which cannot be evicted yet.
            with self._state.lock:
                self._state.index.give_back(slots)
                self._work.wait_for(lambda: not self._flying[0].blocks_left or self._is_late())
            if self._flying[0].blocks_left:
                return []
            self._end_written()
            slots = self._take_slots(len(wanted))
        return [
            (write, Entry(write.key, slot, generation))
            for write, slot, generation in zip(wanted, slots, generations, strict=False)
        ]

    def _take_slots(self, count: int) -> list[int]:
        """Take up to `count` slots, ascending, evicting blocks if needed. Rows of evicted blocks
        are removed at once only if too few slots are free, else with the next commit."""
        index = self._state.index
        with self._state.lock:
            self._state.stats.evicted_blocks += index.make_room(count)
            slots = index.allocate(count)
        if len(slots) < count:
            self._rows.remove_leaving()
            with self._state.lock:
                slots = sorted(slots + index.allocate(count - len(slots)))
        return slots

    def _end_written(self) -> None:
        """Sync, commit and complete the oldest batches, if all their writes have returned."""
        with self._state.lock:
            batches = list(takewhile(lambda batch: not batch.blocks_left, self._flying))
        kept: list[list[Placed]] = [[] for _ in batches]
        try:
            kept = self._keep(batches)
        except Exception as error:  # noqa: BLE001 - the thread and the futures must go on
            self._state.count_fault(error)
        for batch, blocks in zip(batches, kept, strict=True):
            self._complete_batch(batch, blocks)

    def _keep(self, batches: Sequence[Batch]) -> list[list[Placed]]:
        """Sync and commit batches; if not `durable`, postpone sync and commit. Return each batch's
        blocks to publish: all written blocks, or no blocks if sync or commit fails."""
        nothing: list[list[Placed]] = [[] for _ in batches]
        written = [
            [batch.placed[position] for position in sorted(batch.written)]
            if batch.failed_syncs == self._failed_syncs
            else []
            for batch in batches
        ]
        if not self._durable:
            for blocks in written:
                self._offered.add([entry for _, entry in blocks])
            return written
        # The newest batch first, each head first, which becomes the order of last use in rows.
        entries = [entry for blocks in reversed(written) for _, entry in blocks]
        if not self._sync(entries):
            return nothing
        if not self._rows.commit(entries):
            self._doubt(batches, entries)
            return nothing
        return written

    def _doubt(self, batches: Sequence[Batch], entries: Sequence[Entry]) -> None:
        """Keep the slots of entries whose commit failed. Their rows may be on the disk, so the
        slots are free only after these rows are removed."""
        with self._state.lock:
            self._state.index.keep_leaving(entries)
            self._woken = True
        for batch in batches:
            batch.unsure.update(entry.slot for entry in entries)

    def _sync(self, entries: Sequence[Entry]) -> bool:
        """Flush written records. Return False on failure, after which their state is unknown."""
        try:
            if entries:
                self._state.slot_file.sync()
        except OSError as error:
            self._state.count_fault(error)
            self._failed_syncs += 1
            return False
        return True

    def _commit_offered(self) -> None:
        """Sync and commit the blocks in `_offered`, or drop them on failure."""
        entries = self._offered.drain_entries()
        if not entries or (self._sync(entries) and self._rows.commit(entries)):
            return
        with self._state.lock:
            for entry in entries:
                self._state.index.remove_entry(entry)
            self._woken = True

    def _tidy(self) -> None:
        """Remove rows of evicted and dropped blocks and write last uses, while no write waits."""
        self._rows.remove_leaving()
        if self._durable or not self._offered:
            self._rows.commit([])
        elif self._offered.is_due():
            self._commit_offered()

    def _keep_promises(self) -> None:
        """Write clears to the disk, and erase dropped blocks for callers of `wait_forgotten`. A
        dropped block that is being written is erased after its batch has ended."""
        with self._state.lock:
            cleared_up_to, promises = self._cleared_up_to, list(self._promises)
        if cleared_up_to > self._noted:
            try:
                self._forget_other_formats()
                self._note_cleared(cleared_up_to)
                self._noted = cleared_up_to
            except OSError as error:
                self._state.count_fault(error)
        due = []
        for promise in promises:
            if promise.batches is None:
                promise.batches = list(self._flying)
            if not any(batch in self._flying for batch in promise.batches):
                due.append(promise)
        if due:
            is_kept = self._noted == cleared_up_to and self._forget_rows_and_records()
            with self._state.lock:
                self._end_promises(due, is_kept=is_kept)

    def _forget_rows_and_records(self) -> bool:
        """Remove the rows and records of dropped blocks, so that a rebuilt index lacks these blocks
        too. Return False if the disk fails. Cleared blocks need no removal."""
        index = self._state.index
        with self._state.lock:
            has_rows = index.has_leaving_after(self._noted)
        if has_rows and not self._rows.remove_leaving():
            return False
        with self._state.lock:
            slots = index.take_dropped(self._noted)
        try:
            self._forget_other_formats()
            self._state.slot_file.erase(slots)
            if slots:
                self._state.slot_file.sync()
        except OSError as error:
            self._state.count_fault(error)
            self._failed_syncs += 1
            return False
        return True

    def _end_promises(self, promises: Sequence[_Promise], *, is_kept: bool) -> None:
        """Set the results of `wait_forgotten` calls and end their waits. Called under the lock."""
        for promise in list(promises):
            self._promises.remove(promise)
            promise.is_kept = is_kept
            promise.ended.set()

    def _complete_batch(self, batch: Batch, kept: Sequence[Placed]) -> None:
        """Publish the `kept` blocks in the index and end the calls that waited for the batch."""
        stats = self._state.stats
        with self._state.lock:
            self._flying.popleft()
            try:
                self._publish(batch, kept)
            except Exception:  # waiting calls must end after any error
                log.exception("blocks that were written cannot be offered")
                kept = []
            ids = {id(write) for write, _ in kept}
            done, num_lost = self.queue.settle(batch.writes, ids)
            stats.dropped_stores += num_lost
            now = time.monotonic()
            stats.store_seconds += now - max(batch.began, self._last_end)
            self._last_end = now
        for job in done:
            job.complete()

    def _publish(self, batch: Batch, kept: Sequence[Placed]) -> None:
        index, stats = self._state.index, self._state.stats
        index.publish([entry for _, entry in kept])
        for write, entry in batch.placed:
            # Removed during its write: if the block was not kept, its record may be on disk.
            if write.dropped and not index.remove_entry(entry, by_name=True):
                index.note_dropped(entry)
            self._woken |= write.dropped
        used = batch.unsure.union([entry.slot for _, entry in kept])
        index.give_back([entry.slot for _, entry in batch.placed if entry.slot not in used])
        stats.stored_blocks += len(kept)
        stats.stored_bytes += len(kept) * self._state.page_bytes
        if self._records.encoder is not None:
            saved = self._state.slot_file.saved_bytes
            stats.stored_bytes_saved += sum(saved(entry.encoded_bytes) for _, entry in kept)

    def _abandon_queue(self) -> None:
        """Fail the calls whose blocks were not written by the deadline of `close`."""
        with self._state.lock:
            writes = self.queue.pop_writes(len(self.queue.waiting))
        self._abandon(writes)

    def _abandon(self, writes: Sequence[Write]) -> None:
        with self._state.lock:
            self._state.stats.dropped_stores += len(writes)
            done = self.queue.abandon(writes)
        for job in done:
            job.complete()


@dataclass(slots=True, eq=False)
class _Promise:
    """A running call of `wait_forgotten`."""

    ended: threading.Event = field(default_factory=threading.Event)
    batches: list[Batch] | None = None  # under way at the call, perhaps with dropped blocks
    is_kept: bool = False
