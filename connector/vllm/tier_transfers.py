# SPDX-License-Identifier: Apache-2.0
"""Runs vLLM's jobs for a tier: copies between rows of vLLM's region and the slab.

vLLM's scheduler makes the calls in its step loop, so only `wait_for_jobs` and `close` may wait. The
other calls only reserve or pin slots, and a thread makes the copies. The thread also completes
stores, so chunks reach a cache server even while the engine is idle."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...tiers.hierarchy.hierarchy import StoreTicket
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.tag import Proof
from ..chunks.failed import FailedChunks
from ..chunks.mover import CLOSE_SECONDS, Assembly, ChunkMover, Parts
from ..costs.economics import Economics
from ..costs.rates import ReadTimes


class Ended(NamedTuple):
    """The result of one of vLLM's jobs."""

    job_id: int
    missing: frozenset[bytes]  # keys of chunks of a load that did not come
    seconds: float
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Store:
    job_id: int
    ticket: StoreTicket
    rows: list[int]  # the rows of the ticket's keys
    began: float


@dataclass(slots=True, eq=False)
class _Load:
    job_id: int
    ticket: LoadTicket
    rows: list[int]
    began: float


class Transfers(ChunkMover):
    """Moves chunks between vLLM's region and the tiers. A row of `rows` is a chunk of the region.
    Chunks whose load failed are added to `failed`; the durations of loads update `economics`."""

    THREAD, THEN = "stratakv-vllm", "computed"

    def __init__(
        self,
        assembly: Assembly,
        rows: np.ndarray[Any, Any],
        economics: Economics,
        failed: FailedChunks,
    ) -> None:
        super().__init__(assembly, failed)
        self._rows = rows
        self._slab_link = economics.links[self._slab.name]
        self._read_times = ReadTimes(self._hierarchy, economics.links)
        economics.queued = self._read_times.queued
        self._stores: deque[_Store] = deque()
        self._loads: list[_Load] = []
        self._ended: deque[Ended] = deque()
        self._copying: _Store | _Load | None = None
        self._num_open = 0  # how many jobs have not ended
        self._idle = threading.Condition(self.lock)
        self._thread.start()

    def store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Store rows that no tier has, while there is room. Rows must not change before the job's
        end."""
        row_of = dict(zip(keys, rows, strict=True))
        with self.lock:
            self._num_open += 1
            if self._is_over:
                self._record_ended(Ended(job_id, frozenset(), 0.0, 0))
                return
            ticket = self._hierarchy.begin_store(keys)
            job = _Store(job_id, ticket, [row_of[key] for key in ticket.keys], time.monotonic())
            self._stores.append(job)
        self._wakeup.set()

    def load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Load chunks into rows. Only this job may use the rows until it has ended."""
        with self.lock:
            self._num_open += 1
            if self._is_over:
                self._record_ended(Ended(job_id, frozenset(keys), 0.0, 0))
                return
            ticket = self._read_times.begin_load(keys)
            self._loads.append(_Load(job_id, ticket, list(rows), time.monotonic()))
        self._wakeup.set()

    def take_ended(self) -> list[Ended]:
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def wait_for_jobs(self, seconds: float) -> None:
        """Wait until every job has ended. Loads not yet copying after `seconds` fail."""
        with self.lock:
            if not self._idle.wait_for(lambda: not self._num_open, seconds):
                self._let_go_loads()
                self._fail_loads()
                # The running copy is between two places in memory, and ends soon.
                self._idle.wait_for(lambda: not self._num_open, CLOSE_SECONDS)

    def close(self, seconds: float) -> None:
        super().close(seconds)
        if not self._thread.is_alive():
            self._rows = np.empty((0, 0), np.uint8)

    def _turn(self) -> bool:
        with self.lock:
            self._hierarchy.poll()
            self._read_times.record_ended_loads()
            load = next((load for load in self._loads if not load.ticket.waiting), None)
            if load is not None:
                self._loads.remove(load)
            store = self._stores.popleft() if load is None and self._stores else None
            self._copying = load or store
            proofs = [] if load is None else self._slab.proofs(load.ticket.keys)
        if load is not None:
            self._bring(load, proofs)
        elif store is not None:
            self._store_rows(store)
        self._copying = None
        return load is not None or store is not None

    def _store_rows(self, job: _Store) -> None:
        digests = self._copy_in(job.ticket, self._parts(job.rows))
        with self.lock:
            self._end_store(job.ticket, digests)
            num_bytes = len(digests) * self._hierarchy.block_bytes
            seconds = time.monotonic() - job.began
            self._record_ended(Ended(job.job_id, frozenset(), seconds, num_bytes))
        self._wakeup.set()  # write-backs may be due

    def _bring(self, job: _Load, proofs: Sequence[Proof | None]) -> None:
        """Copy the load's chunks from the slab to their rows, and end the job."""
        ticket, began = job.ticket, time.monotonic()
        copied = self._copy_out(ticket, proofs, self._parts(job.rows))
        now = time.monotonic()
        num_bytes = (len(ticket.keys) - len(copied.missing)) * self._hierarchy.block_bytes
        with self.lock:
            self._end_load(ticket, copied)
            if num_bytes:
                self._slab_link.record_transfer(num_bytes, now - began, now - began)
            lost = frozenset([*copied.missing, *copied.damaged])
            self._record_ended(Ended(job.job_id, lost, now - job.began, num_bytes))

    def _parts(self, rows: Sequence[int]) -> list[Parts]:
        return [[self._rows[row].data] for row in rows]

    def _give_back(self) -> None:
        self._let_go_loads()
        for job in self._stores:
            self._hierarchy.end_store(job.ticket, False)

    def _end_jobs(self) -> None:
        copying, self._copying = self._copying, None
        if isinstance(copying, _Load):
            self._loads.append(copying)
        elif copying is not None:
            self._stores.append(copying)
        self._fail_loads()
        while self._stores:
            self._record_ended(Ended(self._stores.popleft().job_id, frozenset(), 0.0, 0))

    def _let_go_loads(self) -> None:
        for load in self._loads:
            self._read_times.let_go(load.ticket)

    def _fail_loads(self) -> None:
        """Report as failed all loads whose copy has not begun."""
        for load in self._loads:
            self._failed.add(load.ticket.keys)
            self._record_ended(Ended(load.job_id, frozenset(load.ticket.keys), 0.0, 0))
        self._loads.clear()

    def _record_ended(self, ended: Ended) -> None:
        self._num_open -= 1
        self._ended.append(ended)
        if not self._num_open:
            self._idle.notify_all()
