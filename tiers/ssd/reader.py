# SPDX-License-Identifier: Apache-2.0
"""Reader: reads records into the callers' buffers, many at a time, and verifies each record.

A record that differs from the expected record is a miss: its defect is counted and the block is
removed from the index. A record that cannot be read is also a miss; its block stays in the index
only if the cause was a temporary shortage, such as of memory."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..codecs.base import Codec
from ..errors import TierClosed
from ..record import Defect, verify_record
from ..tag import Proof
from .disk.disk_queue import DiskQueue, Result
from .disk.io_pool import GRACE_SECONDS, Done, IoPool
from .disk.slot_file import Scratch
from .encoded_io import DecodingReader
from .index.slot_index import Entry
from .state import Job, StoreState

# The most bytes read at a time. A thread verifies some records while the disk reads others.
FLIGHT_BYTES = 32 * 1024**2

# The outcome of reading one record.
Outcome = Proof | Defect | Exception

# Errors of a temporary shortage on the machine, which do not depend on the record.
_SHORTAGES = frozenset({errno.EAGAIN, errno.ENOMEM, errno.ENOBUFS, errno.EINTR, errno.EMFILE})


class Part(NamedTuple):
    """A pinned block to read, and the place of its answer: a job and a position in the job."""

    entry: Entry
    payload: memoryview  # of `page_bytes`
    job: Job[Proof | None]
    position: int


class Reader:
    """Threads that read and verify records; some are verified while others are read."""

    def __init__(self, state: StoreState, io_threads: int, codec: Codec | None = None) -> None:
        self.state = state
        self.decoder = DecodingReader(state, codec)
        self.abandoned = False  # True: no further read begins
        self.queued_blocks = 0  # guarded by the lock; the owner sets the limit
        self._busy_since = 0.0
        self._idle = threading.Condition(state.lock)
        flight_bytes = max(FLIGHT_BYTES, 2 * io_threads * state.slot_file.run_bytes)
        self._pool = IoPool(state.slot_file, io_threads, "stratakv-ssd-read", flight_bytes)

    def submit(self, parts: Sequence[Part]) -> None:
        """Start to read parts, which `settle_parts` ends. Called under the lock."""
        if not self.queued_blocks:
            self._busy_since = time.monotonic()
        self.queued_blocks += len(parts)
        ordered = sorted(parts, key=lambda part: part.entry.slot)
        self._pool.start(
            [part.entry.slot for part in ordered],
            _Reading(self, ordered),
            singly=(encoded := any(part.entry.encoded_bytes for part in ordered)),
            spread=encoded or self.state.seal is not None,
        )

    def end_reads(self, deadline: float) -> None:
        """Wait until all reads have ended, at most until `deadline` (monotonic seconds), and
        abandon reads that have not begun at `deadline`. `submit` must not be called afterwards."""
        with self.state.lock:
            self._idle.wait_for(self._is_idle, max(0.0, deadline - time.monotonic()))
            self.abandoned = True
        self._pool.stop_workers()

    def close(self, deadline: float) -> bool:
        """End the reads, wait for the threads. Return False if one is blocked in the kernel."""
        self.end_reads(deadline)
        return self._pool.close(max(deadline, time.monotonic()) + GRACE_SECONDS)

    def settle_parts(
        self, answered: Sequence[tuple[Part, Outcome]], abandoned: Sequence[Part]
    ) -> None:
        """Set the outcomes of some parts, and complete the calls that have all answers."""
        for _, outcome in answered:
            if isinstance(outcome, Exception):
                self.state.count_fault(outcome)
        done: list[Job[Proof | None]] = []
        with self.state.lock:
            for part, outcome in answered:
                self._answer_part(part, outcome)
                if not part.job.waiting_for:
                    done.append(part.job)
            for part in abandoned:
                self.state.index.unpin(part.entry)
                part.job.abandon()
                if not part.job.waiting_for:
                    done.append(part.job)
            self.queued_blocks -= len(answered) + len(abandoned)
            now = time.monotonic()
            self.state.stats.load_seconds += now - self._busy_since
            self._busy_since = now
            if not self.queued_blocks:
                self._idle.notify_all()
        for job in done:
            job.complete()

    def _is_idle(self) -> bool:
        return not self.queued_blocks

    def _answer_part(self, part: Part, outcome: Outcome) -> None:
        """Unpin the part's slot, set its answer and update the counters. Called under the lock."""
        state, stats = self.state, self.state.stats
        state.index.unpin(part.entry)
        part.job.answers[part.position] = outcome if isinstance(outcome, Proof) else None
        part.job.waiting_for -= 1
        if isinstance(outcome, Proof):
            stats.hits += 1
            stats.loaded_blocks += 1
            stats.loaded_bytes += state.page_bytes
            if part.entry.encoded_bytes:
                stats.loaded_bytes_saved += state.slot_file.saved_bytes(part.entry.encoded_bytes)
        else:
            stats.misses += 1
            if _is_shortage(outcome):
                return
            # After any other fault look-ups must not find the block again.
            state.index.remove_entry(part.entry)
            stats.corrupt_records_dropped += 1
            if isinstance(outcome, Defect):
                stats.rejected[outcome.value] = stats.rejected.get(outcome.value, 0) + 1


class _Reading:
    """Reads parts, sorted by slot, as a `Work` of the `IoPool`. Parts in neighbouring slots are
    read with one system call. Parts that were not read completely are read again one by one, so
    that a bad sector or a truncated file does not lose neighbouring parts."""

    def __init__(self, reader: Reader, ordered: Sequence[Part]) -> None:
        self._reader = reader
        self._ordered = ordered

    def prepare_run(self, run: range, scratch: Scratch) -> None:
        """Do nothing: a read needs no preparation."""

    def start(self, run: range, scratch: Scratch, disk: DiskQueue, number: int) -> None:
        if self._reader.abandoned:
            raise TierClosed("the SSD tier was closed before this read began")
        parts = self._ordered[run.start : run.stop]
        entry = parts[0].entry
        if entry.encoded_bytes:
            self._reader.decoder.start(entry, scratch, disk, number)
            return
        payloads = [part.payload for part in parts]
        self._reader.state.slot_file.start_read(disk, number, entry.slot, payloads, scratch)

    def complete_runs(self, done: Sequence[Done]) -> list[range]:
        answered: list[tuple[Part, Outcome]] = []
        abandoned: list[Part] = []
        again: list[range] = []
        for run, scratch, result in done:
            parts = self._ordered[run.start : run.stop]
            if isinstance(result, TierClosed):
                abandoned += parts
                continue
            outcomes = self._outcomes(parts, scratch, result)
            answered += zip(parts, outcomes, strict=False)
            again += (range(i, i + 1) for i in run[len(outcomes) :])
        self._reader.settle_parts(answered, abandoned)
        return again

    def _outcomes(self, parts: Sequence[Part], scratch: Scratch, result: Result) -> list[Outcome]:
        """Return the outcomes of the leading parts that were read. A single part has one."""
        try:
            if isinstance(result, Exception):
                raise result
            if parts[0].entry.encoded_bytes:
                return [self._reader.decoder.decode_block(*parts[0][:2], result, scratch)]
            outcomes = self._verified(parts, result, scratch)
            return outcomes if outcomes or len(parts) > 1 else [Defect.SHORT]
        except Exception as error:  # noqa: BLE001 - the thread and the future must go on
            return [error] if len(parts) == 1 else []

    def _verified(self, parts: Sequence[Part], num_bytes: int, scratch: Scratch) -> list[Outcome]:
        state = self._reader.state
        payloads = [part.payload for part in parts]
        whole = state.slot_file.take_read(num_bytes, payloads, scratch)
        return [
            verify_record(header, part.payload, state.header_of(part.entry))
            for part, header in zip(parts[:whole], scratch.headers, strict=False)
        ]


def _is_shortage(outcome: Outcome) -> bool:
    if isinstance(outcome, OSError):
        return outcome.errno in _SHORTAGES
    return isinstance(outcome, MemoryError)
