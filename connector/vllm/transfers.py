# SPDX-License-Identifier: Apache-2.0
"""The copies between vLLM's region and the slab, and the thread that makes them and drives the
hierarchy.

    store   row of the region ──copy, digest──► slot of the slab ──► SSD, cache servers
    load    SSD, cache servers ──► slot of the slab ──copy, digest──► row of the region

vLLM's scheduler calls from its step loop, so nothing here waits but `drain` and `close`: a call
reserves or pins and leaves the rest to the thread. The thread also takes in what stores have done,
so blocks reach a cache server while the engine is idle. `lock` guards the hierarchy; it is held for
work in memory only, never during a copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...tiers.cpu import CpuSlab
from ...tiers.hierarchy.hierarchy import Hierarchy, StoreTicket
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.tag import Proof, payload_digest
from ..economics import Economics
from ..rates import ReadTimes

log = logging.getLogger(__name__)

# Whatever is due by the clock has its alarm in the hierarchy; should one be missed, it costs this.
LOOK_SECONDS = 0.25
CLOSE_SECONDS = 2.0


class Ended(NamedTuple):
    """The end of a job of vLLM's."""

    job_id: int
    missing: frozenset[bytes]  # keys of a load that did not come
    seconds: float
    num_bytes: int


@dataclass(slots=True, eq=False)
class _Store:
    job_id: int
    ticket: StoreTicket
    rows: list[int]  # of the ticket's keys
    began: float


@dataclass(slots=True, eq=False)
class _Load:
    job_id: int
    ticket: LoadTicket
    rows: list[int]
    began: float


class Transfers:
    """Moves chunks between `rows`, vLLM's region with a chunk in each row, and `hierarchy` over
    `slab`. Takes both over. `note_missing` hears, under the lock, of keys whose load failed."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        slab: CpuSlab,
        rows: np.ndarray[Any, Any],
        economics: Economics,
        wakeup: threading.Event,
        note_missing: Callable[[Sequence[bytes]], None],
    ) -> None:
        self.lock = threading.Lock()
        self.damaged = 0  # chunks whose bytes in the slab were not those that were stored
        self.is_broken = False
        self._hierarchy = hierarchy
        self._slab = slab
        self._rows = rows
        self._slots = np.frombuffer(slab.memory(), np.uint8).reshape(slab.num_slots, -1)
        self._slab_link = economics.links[slab.name]
        self._read_times = ReadTimes(
            {name: link for name, link in economics.links.items() if name != slab.name},
            hierarchy.block_bytes,
            hierarchy.end_load,
            time.monotonic,
        )
        economics.queued = self._read_times.queued
        self._wakeup = wakeup
        self._note_missing = note_missing
        self._stores: deque[_Store] = deque()
        self._loads: list[_Load] = []
        self._ended: deque[Ended] = deque()
        self._copying: _Store | _Load | None = None
        self._num_open = 0  # jobs that have not ended
        self._idle = threading.Condition(self.lock)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stratakv-vllm", daemon=True)
        self._thread.start()

    def store(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Copy these rows to the slab, as far as it has room and lacks them. The rows stay as they
        are until the job has ended."""
        row_of = dict(zip(keys, rows, strict=True))
        with self.lock:
            self._num_open += 1
            if self._is_over:
                self._end(Ended(job_id, frozenset(), 0.0, 0))
                return
            ticket = self._hierarchy.begin_store(keys)
            job = _Store(job_id, ticket, [row_of[key] for key in ticket.keys], time.monotonic())
            self._stores.append(job)
        self._wakeup.set()

    def load(self, job_id: int, keys: Sequence[bytes], rows: Sequence[int]) -> None:
        """Bring these chunks into these rows, which are nobody else's until the job has ended."""
        with self.lock:
            self._num_open += 1
            if self._is_over:
                self._end(Ended(job_id, frozenset(keys), 0.0, 0))
                return
            ticket = self._hierarchy.begin_load(keys)
            self._read_times.watch(ticket)
            self._loads.append(_Load(job_id, ticket, list(rows), time.monotonic()))
        self._wakeup.set()

    def take_ended(self) -> list[Ended]:
        """The jobs that have ended since the last call. Each is given once."""
        ended = []
        while self._ended:
            ended.append(self._ended.popleft())
        return ended

    def drain(self, seconds: float) -> None:
        """Wait until every job has ended; loads that have not begun to be copied fail then."""
        with self.lock:
            if not self._idle.wait_for(lambda: not self._num_open, seconds):
                self._give_up_loads()
                # A copy of bytes in memory ends.
                self._idle.wait_for(lambda: not self._num_open, CLOSE_SECONDS)

    def close(self, seconds: float) -> None:
        """Write down what the stores lack, within the time, and release everything. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wakeup.set()
        deadline = time.monotonic() + seconds
        self._thread.join(timeout=seconds + CLOSE_SECONDS)
        if self._thread.is_alive():
            log.error("a copy has not ended within %.1f s; the tiers stay open", seconds)
            return
        with self.lock:
            self._rows = self._slots = np.empty((0, 0), np.uint8)
            if not self.is_broken:
                self._write_down(deadline - time.monotonic())
            if not self._hierarchy.close(CLOSE_SECONDS):
                log.error("a tier still uses memory that it should have given back")

    def _write_down(self, seconds: float) -> None:
        """End what has not begun, and have the stores take what they lack."""
        self._give_up_loads()
        for job in self._stores:
            self._hierarchy.end_store(job.ticket, False)
        self._end_all()
        if not self._hierarchy.flush(max(0.0, seconds)):
            log.warning("not every block could be written down in time; those are lost")

    @property
    def _is_over(self) -> bool:
        return self._closed or self.is_broken

    def _run(self) -> None:
        try:
            while not self._closed:
                self._wakeup.wait(LOOK_SECONDS)
                self._wakeup.clear()
                while not self._closed and self._turn():
                    pass
        except Exception:
            log.exception("StrataKV's tiers for vLLM stop; everything is computed from now on")
            with self.lock:
                # What has failed may be the hierarchy, so nothing more is asked of it.
                self.is_broken = True
                if isinstance(self._copying, _Load):
                    self._loads.append(self._copying)
                elif self._copying is not None:
                    self._stores.append(self._copying)
                self._end_all()

    def _turn(self) -> bool:
        """Take in what has ended and do one copy job, loads first. False: nothing was to do."""
        with self.lock:
            self._hierarchy.poll()
            self._read_times.collect()
            load = next((load for load in self._loads if load.ticket.done()), None)
            if load is not None:
                self._loads.remove(load)
                proofs = self._slab.proofs(load.ticket.keys)
            store = self._stores.popleft() if load is None and self._stores else None
            self._copying = load or store
        if load is not None:
            self._copy_out(load, proofs)
        elif store is not None:
            self._copy_in(store)
        self._copying = None
        return load is not None or store is not None

    def _copy_in(self, job: _Store) -> None:
        digests = []
        rows, slots = self._rows, self._slots
        for row, slot in zip(job.rows, job.ticket.slots, strict=True):
            digests.append(payload_digest(rows[row].data))
            slots[slot] = rows[row]
        with self.lock:
            proofs = self._hierarchy.prove(job.ticket.keys, digests)
            self._hierarchy.end_store(job.ticket, True, proofs)
            num_bytes = len(digests) * self._hierarchy.block_bytes
            seconds = time.monotonic() - job.began
            self._end(Ended(job.job_id, frozenset(), seconds, num_bytes))
        self._wakeup.set()  # write-backs may be due

    def _copy_out(self, job: _Load, proofs: Sequence[Proof | None]) -> None:
        ticket, rows, slots = job.ticket, self._rows, self._slots
        missing, damaged = [], []
        began = time.monotonic()
        for key, slot, row, proof in zip(ticket.keys, ticket.slots, job.rows, proofs, strict=True):
            if slot is None or proof is None:
                missing.append(key)
                continue
            rows[row] = slots[slot]
            if payload_digest(rows[row].data) != proof.digest:
                damaged.append(key)
        now = time.monotonic()
        num_bytes = (len(ticket.keys) - len(missing)) * self._hierarchy.block_bytes
        with self.lock:
            self._hierarchy.end_load(ticket)
            if damaged:
                log.error("%d blocks were damaged in memory; they are computed", len(damaged))
                self.damaged += len(damaged)
                self._hierarchy.drop(damaged)
            if num_bytes:
                self._slab_link.note(num_bytes, now - began, now - began)
            lost = frozenset([*missing, *damaged])
            self._note_missing(list(lost))
            self._end(Ended(job.job_id, lost, now - job.began, num_bytes))

    def _give_up_loads(self) -> None:
        """Fail the loads that are not being copied."""
        for load in self._loads:
            self._read_times.let_go(load.ticket)
        self._end_all(stores=False)

    def _end_all(self, *, stores: bool = True) -> None:
        """Report the jobs that are not being copied as ended, the loads as failed."""
        for load in self._loads:
            self._note_missing(load.ticket.keys)
            self._end(Ended(load.job_id, frozenset(load.ticket.keys), 0.0, 0))
        self._loads.clear()
        while stores and self._stores:
            self._end(Ended(self._stores.popleft().job_id, frozenset(), 0.0, 0))

    def _end(self, ended: Ended) -> None:
        self._num_open -= 1
        self._ended.append(ended)
        if not self._num_open:
            self._idle.notify_all()
