# SPDX-License-Identifier: Apache-2.0
"""Reads records into the callers' buffers, several runs at a time, and verifies each one.

A record that is not exactly the expected one is a miss: it is counted by its defect and its entry
forgotten. A record that cannot be read is a miss too. Knows nothing of how blocks get to the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ..base import Answer
from ..record import Defect, check_record
from .slot_file import Scratch, runs
from .slot_index import Entry
from .state import Job, StoreState

# What became of one record: None is good.
Outcome = Defect | Exception | None

_GRACE_SECONDS = 1.0  # for reads that have begun when the time to close is over


class Part(NamedTuple):
    """One pinned block to read, and where its answer goes."""

    entry: Entry
    payload: memoryview  # `page_bytes` long
    job: Job[Answer]
    position: int


class Reader:
    """A few threads that read and verify runs."""

    def __init__(self, state: StoreState, io_threads: int) -> None:
        self._state = state
        self._idle = threading.Condition(state.lock)
        self._local = threading.local()
        self._pool = ThreadPoolExecutor(io_threads, "stratakv-ssd-read")
        self._abandoned = False
        self.queued_blocks = 0  # changed under the lock; the owner bounds it

    def submit(self, parts: Sequence[Part]) -> None:
        """Under the lock. Settles and unpins every part."""
        self.queued_blocks += len(parts)
        ordered = sorted(parts, key=lambda part: part.entry.slot)
        slots = [part.entry.slot for part in ordered]
        for run in runs(slots, self._state.slot_file.run_slots):
            self._pool.submit(self._read_run, ordered[run.start : run.stop])

    def close(self, deadline: float) -> bool:
        """Let reads finish until `deadline` (monotonic) and abandon those not begun. False if one
        is still in the kernel. No `submit` may follow."""
        self._pool.shutdown(wait=False)
        with self._state.lock:
            self._idle.wait_for(self._is_idle, max(0.0, deadline - time.monotonic()))
            self._abandoned = True
            return self._idle.wait_for(self._is_idle, _GRACE_SECONDS)

    def _is_idle(self) -> bool:
        return not self.queued_blocks

    def _read_run(self, parts: Sequence[Part]) -> None:
        began = time.monotonic()
        outcomes: list[Outcome] | None = None
        if not self._abandoned:
            try:
                outcomes = self._read(parts)
            except Exception as error:  # noqa: BLE001 - a future must end whatever happens
                outcomes = [error] * len(parts)
        for outcome in outcomes or ():
            if isinstance(outcome, Exception):
                self._state.count_fault(outcome)
        with self._state.lock:
            for index, part in enumerate(parts):
                self._settle(part, outcomes[index] if outcomes else None, outcomes is None)
            self.queued_blocks -= len(parts)
            self._state.stats.load_seconds += time.monotonic() - began
            done = {id(part.job): part.job for part in parts if not part.job.waiting_for}
            self._idle.notify_all()
        for job in done.values():
            job.complete()

    def _settle(self, part: Part, outcome: Outcome, abandoned: bool) -> None:
        """Under the lock: unpin, count, answer."""
        state, stats = self._state, self._state.stats
        state.index.unpin(part.entry)
        if abandoned:
            part.job.abandon()
        elif outcome is None:
            stats.hits += 1
            stats.loaded_blocks += 1
            stats.loaded_bytes += state.layout.page_bytes
            part.job.settle(part.position, Answer.HIT)
        else:
            # Whatever it was, the block is not to be offered again.
            state.index.forget(part.entry)
            stats.misses += 1
            stats.corrupt_records_dropped += 1
            if isinstance(outcome, Defect):
                stats.rejected[outcome.value] = stats.rejected.get(outcome.value, 0) + 1
            part.job.settle(part.position, Answer.MISS)

    def _read(self, parts: Sequence[Part]) -> list[Outcome]:
        """Read neighbours at once; one by one what that did not bring, so that a bad sector or
        the end of a truncated file costs the neighbours nothing."""
        scratch = self._scratch()
        outcomes: list[Outcome] = []
        try:
            whole = self._read_records(parts, scratch)
        except OSError as error:
            if len(parts) == 1:
                return [error]
            whole = 0
        for index, part in enumerate(parts[:whole]):
            outcomes.append(self._verify(part, scratch.headers[index]))
        rest = parts[whole:]
        if len(parts) == 1 and rest:
            return [Defect.SHORT]
        for part in rest:
            outcomes += self._read([part])
        return outcomes

    def _read_records(self, parts: Sequence[Part], scratch: Scratch) -> int:
        payloads = [part.payload for part in parts]
        return self._state.slot_file.read(parts[0].entry.slot, payloads, scratch)

    def _verify(self, part: Part, header: memoryview) -> Defect | None:
        return check_record(header, part.payload, self._state.header_of(part.entry))

    def _scratch(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = self._state.slot_file.scratch()
        return scratch
