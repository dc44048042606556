# SPDX-License-Identifier: Apache-2.0
"""Reads records into the callers' buffers, several runs at a time, and verifies each one.

A record that is not exactly the expected one is a miss: it is counted by its defect and its entry
forgotten. A record that cannot be read is a miss too. Knows nothing of how blocks get to the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ..base import Answer
from ..codecs.base import Codec
from ..record import Defect, check_record
from .encoded_io import DecodingReader
from .io_pool import GRACE_SECONDS, IoPool
from .slot_file import Scratch
from .slot_index import Entry
from .state import Job, StoreState

# What became of one record: None is good.
Outcome = Defect | Exception | None


class Part(NamedTuple):
    """One pinned block to read, and where its answer goes."""

    entry: Entry
    payload: memoryview  # `page_bytes` long
    job: Job[Answer]
    position: int


class Reader:
    """A few threads that read and verify runs: while one verifies, the others read."""

    def __init__(self, state: StoreState, io_threads: int, codec: Codec | None = None) -> None:
        self._state = state
        self._decoder = DecodingReader(state, codec)
        self._idle = threading.Condition(state.lock)
        self._pool = IoPool(state.slot_file, io_threads, "stratakv-ssd-read")
        self._abandoned = False
        self.queued_blocks = 0  # changed under the lock; the owner bounds it

    def submit(self, parts: Sequence[Part]) -> None:
        """Under the lock. Settles and unpins every part."""
        self.queued_blocks += len(parts)
        ordered = sorted(parts, key=lambda part: part.entry.slot)
        self._pool.start(
            [part.entry.slot for part in ordered],
            lambda runs, scratch: self._read_share(ordered, runs, scratch),
        )

    def close(self, deadline: float) -> bool:
        """Let reads finish until `deadline` (monotonic) and abandon those not begun. False if one
        is still in the kernel. No `submit` may follow."""
        with self._state.lock:
            self._idle.wait_for(self._is_idle, max(0.0, deadline - time.monotonic()))
            self._abandoned = True
        return self._pool.close(max(deadline, time.monotonic()) + GRACE_SECONDS)

    def _is_idle(self) -> bool:
        return not self.queued_blocks

    def _read_share(self, ordered: Sequence[Part], runs: Sequence[range], scratch: Scratch) -> None:
        """On a thread of the pool: read some runs, one after the other."""
        began = time.monotonic()
        answered: list[tuple[Part, Outcome]] = []
        abandoned: list[Part] = []
        for run in runs:
            parts = ordered[run.start : run.stop]
            if self._abandoned:
                abandoned += parts
                continue
            try:
                outcomes = self._read_run(parts, scratch)
            except Exception as error:  # noqa: BLE001 - a future must end whatever happens
                outcomes = [error] * len(parts)
            answered += zip(parts, outcomes, strict=True)
        for _, outcome in answered:
            if isinstance(outcome, Exception):
                self._state.count_fault(outcome)
        self._end(answered, abandoned, time.monotonic() - began)

    def _end(
        self, answered: Sequence[tuple[Part, Outcome]], abandoned: Sequence[Part], seconds: float
    ) -> None:
        """Settle the parts and end the calls that are done."""
        done: dict[int, Job[Answer]] = {}
        with self._state.lock:
            for part, outcome in answered:
                self._settle(part, outcome)
                if not part.job.waiting_for:
                    done[id(part.job)] = part.job
            for part in abandoned:
                self._state.index.unpin(part.entry)
                part.job.abandon()
                if not part.job.waiting_for:
                    done[id(part.job)] = part.job
            self.queued_blocks -= len(answered) + len(abandoned)
            self._state.stats.load_seconds += seconds
            self._idle.notify_all()
        for job in done.values():
            job.complete()

    def _settle(self, part: Part, outcome: Outcome) -> None:
        """Under the lock: unpin, count, answer."""
        state, stats = self._state, self._state.stats
        state.index.unpin(part.entry)
        if outcome is None:
            stats.hits += 1
            stats.loaded_blocks += 1
            stats.loaded_bytes += state.layout.page_bytes
            stats.loaded_bytes_saved += state.slot_file.saved_bytes(part.entry.encoded_bytes)
            part.job.settle(part.position, Answer.HIT)
        else:
            # Whatever it was, the block is not to be offered again.
            state.index.forget(part.entry)
            stats.misses += 1
            stats.corrupt_records_dropped += 1
            if isinstance(outcome, Defect):
                stats.rejected[outcome.value] = stats.rejected.get(outcome.value, 0) + 1
            part.job.settle(part.position, Answer.MISS)

    def _read_run(self, parts: Sequence[Part], scratch: Scratch) -> list[Outcome]:
        """Encoded blocks one by one, the neighbours between them together."""
        if not any(part.entry.encoded_bytes for part in parts):
            return self._read(parts, scratch)
        outcomes: list[Outcome] = []
        for is_encoded, some in groupby(parts, lambda part: part.entry.encoded_bytes > 0):
            if is_encoded:
                outcomes += [self._decode(part, scratch) for part in some]
            else:
                outcomes += self._read(list(some), scratch)
        return outcomes

    def _decode(self, part: Part, scratch: Scratch) -> Outcome:
        try:
            return self._decoder.read(part.entry, part.payload, scratch)
        except Exception as error:  # noqa: BLE001 - the neighbours are read whatever happens
            return error

    def _read(self, parts: Sequence[Part], scratch: Scratch) -> list[Outcome]:
        """Read neighbours at once; one by one what that did not bring, so that a bad sector or
        the end of a truncated file costs the neighbours nothing."""
        try:
            payloads = [part.payload for part in parts]
            whole = self._state.slot_file.read(parts[0].entry.slot, payloads, scratch)
        except OSError as error:
            if len(parts) == 1:
                return [error]
            whole = 0
        outcomes: list[Outcome] = [
            self._verify(part, header)
            for part, header in zip(parts[:whole], scratch.headers, strict=False)
        ]
        rest = parts[whole:]
        if len(parts) == 1 and rest:
            return [Defect.SHORT]
        for part in rest:
            outcomes += self._read([part], scratch)
        return outcomes

    def _verify(self, part: Part, header: memoryview) -> Defect | None:
        return check_record(header, part.payload, self._state.header_of(part.entry))
