# SPDX-License-Identifier: Apache-2.0
"""Chunks of one size under 40-byte keys: stored, looked up and loaded on behalf of another engine.

    store   host's bytes ──copy, digest──► slot of the slab ──► SSD, cache servers
    load    SSD, cache servers ──► slot of the slab ──copy, digest──► host's bytes

Every call returns at once with a future, which ends within `Limits`; the host's bytes are touched
between the call and that end, and not after. One thread does it all and alone uses the hierarchy:
`lock` is held for work in memory, never during a copy. Should that thread fail, everything is a
miss from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...tiers.base import Answer, TierStats
from ...tiers.cpu import CpuSlab
from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.tag import Proof, Tagger, payload_digest

log = logging.getLogger(__name__)

# Whatever is due by the clock has its alarm in the hierarchy; jobs have none.
IDLE_SECONDS, BUSY_SECONDS = 0.25, 0.02
CLOSE_SECONDS = 2.0
# Jobs that wait; more are refused at once.
MAX_JOBS = 4096
# A part of the slab for one store at a time, and for all loads together.
STORE_SHARE, LOAD_SHARE = 8, 2
# How long a chunk whose load failed is not found, unless it is stored anew.
FORGET_SECONDS = 10.0
MAX_FORGOTTEN = 65536

# The bytes of one chunk where the host has them, in order.
Parts = Sequence[memoryview]


class Limits(NamedTuple):
    """How long calls may take, in seconds."""

    lookup_seconds: float = 1.0
    read_seconds: float = 5.0
    store_seconds: float = 5.0


@dataclass(slots=True, eq=False)
class _Job:
    keys: list[bytes]
    chunks: Sequence[Parts]
    deadline: float
    answers: list[bool]
    future: Future[list[bool]] = field(default_factory=Future)
    begun: int = 0  # leading keys that were taken on
    ended: int = 0

    def end(self) -> None:
        """Whatever has not come until now does not come."""
        if not self.future.done():
            self.future.set_result(list(self.answers))


class _Piece(NamedTuple):
    """A run of a load's keys."""

    job: _Job
    first: int
    ticket: LoadTicket


class ChunkTiers:
    """Takes over `hierarchy`, over `slab`, which `wakeup` wakes. Thread-safe."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        slab: CpuSlab,
        tagger: Tagger,
        wakeup: threading.Event,
        limits: Limits,
    ) -> None:
        self.lock = threading.Lock()
        self.limits = limits
        self.chunk_bytes = hierarchy.block_bytes
        self.damaged = 0  # chunks whose bytes in the slab were not those that were stored
        self.refused = 0  # chunks that no tier took
        self.is_broken = False
        self._hierarchy = hierarchy
        self._slab = slab
        self._tagger = tagger
        self._wakeup = wakeup
        self._stores: deque[_Job] = deque()
        self._lookups: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()  # of which not all is begun
        self._orders: deque[Callable[[], object]] = deque()
        self._pieces: list[_Piece] = []
        self._copying: _Job | None = None
        self._num_loading = 0  # chunks of pieces
        self._failed: OrderedDict[bytes, float] = OrderedDict()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stratakv-chunks", daemon=True)
        self._thread.start()

    def store(self, keys: Sequence[bytes], chunks: Sequence[Parts]) -> Future[list[bool]]:
        """Keep chunks. Of each whether it is kept; they may be evicted later."""
        self._check(keys, chunks)
        return self._queue(self._stores, keys, chunks, self.limits.store_seconds)

    def lookup(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        """Of each chunk whether some tier has it."""
        return self._queue(self._lookups, keys, (), self.limits.lookup_seconds)

    def load(self, keys: Sequence[bytes], chunks: Sequence[Parts]) -> Future[list[bool]]:
        """Bring chunks. Of each whether it is here now; the bytes of others are anything."""
        self._check(keys, chunks)
        return self._queue(self._loads, keys, chunks, self.limits.read_seconds)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget chunks, in every tier."""
        held = list(keys)
        self._order(lambda: self._hierarchy.drop(held))

    def clear(self) -> None:
        """Forget every chunk, in every tier."""
        self._order(self._hierarchy.clear)

    def stats(self) -> dict[str, TierStats]:
        """Counters by tier."""
        with self.lock:
            return self._hierarchy.stats()

    def close(self, seconds: float) -> None:
        """Fail what waits, write down what the stores lack within the time, release everything.
        Idempotent."""
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
            self._give_up()
            if not self._hierarchy.flush(max(0.0, deadline - time.monotonic())):
                log.warning("not every chunk could be written down in time; those are lost")
            if not self._hierarchy.close(CLOSE_SECONDS):
                log.error("a tier still uses memory that it should have given back")

    def _check(self, keys: Sequence[bytes], chunks: Sequence[Parts]) -> None:
        sizes = {sum(part.nbytes for part in parts) for parts in chunks}
        if len(keys) != len(chunks) or sizes - {self.chunk_bytes}:
            raise ValueError(
                f"{len(keys)} chunks of {self.chunk_bytes} bytes were expected, not "
                f"{len(chunks)} of {', '.join(map(str, sorted(sizes)))}"
            )

    def _queue(
        self, jobs: deque[_Job], keys: Sequence[bytes], chunks: Sequence[Parts], seconds: float
    ) -> Future[list[bool]]:
        job = _Job(list(keys), chunks, time.monotonic() + seconds, [False] * len(keys))
        with self.lock:
            if self._closed or self.is_broken or not keys or len(jobs) >= MAX_JOBS:
                job.end()
                return job.future
            jobs.append(job)
        self._wakeup.set()
        return job.future

    def _order(self, order: Callable[[], object]) -> None:
        with self.lock:
            if self._closed or self.is_broken:
                return
            self._orders.append(order)
        self._wakeup.set()

    def _run(self) -> None:
        try:
            while not self._closed:
                waiting = self._stores or self._lookups or self._loads or self._pieces
                self._wakeup.wait(BUSY_SECONDS if waiting else IDLE_SECONDS)
                self._wakeup.clear()
                while not self._closed and self._turn():
                    pass
        except Exception:
            log.exception("StrataKV's tiers stop; everything is a miss from now on")
            with self.lock:
                self.is_broken = True
                self._give_up()

    def _turn(self) -> bool:
        """Do what is due, and one copy. False: nothing was to do."""
        ended: list[_Job] = []
        with self.lock:
            while self._orders:
                self._orders.popleft()()
            self._hierarchy.poll()
            for job in [job for job in self._lookups if self._answer(job)]:
                self._lookups.remove(job)
                ended.append(job)
            self._begin_loads(ended)
            piece = self._take_piece()
            proofs = [] if piece is None else self._slab.proofs(piece.ticket.keys)
        for job in ended:
            job.end()
        if piece is not None:
            self._copying = piece.job
            self._copy_out(piece, proofs)
            self._copying = None
            return True
        if self._stores:
            self._copying = self._stores[0]
            is_done = self._store_some(self._stores[0])
            self._copying = None
            return is_done or bool(ended)
        return bool(ended)

    def _answer(self, job: _Job) -> bool:
        """Answer a look-up as far as is known. True: for good."""
        keys = job.keys
        if not job.begun:
            job.begun = len(keys)
            self._hierarchy.prefetch_lookup(keys)
        answers = self._hierarchy.lookup(keys)
        now = time.monotonic()
        job.answers = [
            answer is Answer.HIT and not self._is_forgotten(key, now)
            for key, answer in zip(keys, answers, strict=True)
        ]
        unknown = [k for k, answer in zip(keys, answers, strict=True) if answer is not Answer.HIT]
        if not unknown or now >= job.deadline:
            return True
        prefix = self._hierarchy.find(unknown)
        return not (prefix.asked or prefix.pending)

    def _begin_loads(self, ended: list[_Job]) -> None:
        """Promote as much as the slab has room for."""
        most = max(1, self._slab.num_slots // LOAD_SHARE)
        now = time.monotonic()
        while self._loads:
            job = self._loads[0]
            room = most - self._num_loading
            if now >= job.deadline:
                job.ended += len(job.keys) - job.begun
                job.begun = len(job.keys)
                if job.ended == len(job.keys):
                    ended.append(job)
            elif room > 0:
                keys = job.keys[job.begun : job.begun + room]
                ticket = self._hierarchy.begin_load(keys)
                self._pieces.append(_Piece(job, job.begun, ticket))
                self._num_loading += len(keys)
                job.begun += len(keys)
            else:
                return
            if job.begun == len(job.keys):
                self._loads.popleft()

    def _take_piece(self) -> _Piece | None:
        now = time.monotonic()
        for piece in self._pieces:
            if piece.ticket.done() or now >= piece.job.deadline:
                self._pieces.remove(piece)
                return piece
        return None

    def _copy_out(self, piece: _Piece, proofs: Sequence[Proof | None]) -> None:
        """Copy what has come. What is late has no slot."""
        job, ticket = piece.job, piece.ticket
        missing, damaged = [], []
        for i, (key, slot, proof) in enumerate(
            zip(ticket.keys, ticket.slots, proofs, strict=True), piece.first
        ):
            if slot is None or proof is None:
                missing.append(key)
                continue
            source, at = self._slab.buffer(slot), 0
            hasher = self._tagger.begin(key)
            for part in job.chunks[i]:
                _copy(source[at : at + part.nbytes], part)
                hasher.update(part)
                at += part.nbytes
            if hasher.digest() == proof.digest:
                job.answers[i] = True
            else:
                damaged.append(key)
        with self.lock:
            self._hierarchy.end_load(ticket)
            if damaged:
                log.error("%d chunks were damaged in memory; they are misses", len(damaged))
                self.damaged += len(damaged)
                self._hierarchy.drop(damaged)
            self._forget([*missing, *damaged])
            self._num_loading -= len(ticket.keys)
            job.ended += len(ticket.keys)
        if job.ended == len(job.keys):
            job.end()

    def _store_some(self, job: _Job) -> bool:
        """Copy a part of the job to the slab. False: the slab has no room yet."""
        size = max(1, self._slab.num_slots // STORE_SHARE)
        keys = job.keys[job.begun : job.begun + size]
        with self.lock:
            # The other half is for what loads bring, which would evict what is not written yet.
            room = self._slab.num_slots // 2 - self._hierarchy.num_unwritten
            is_late = time.monotonic() >= job.deadline
            if room < len(keys) and not is_late:
                return False
            ticket = None if room < len(keys) else self._hierarchy.begin_store(self._new(keys))
        if ticket is not None:
            place = {key: i for i, key in enumerate(keys, job.begun)}
            digests = []
            for key, slot in zip(ticket.keys, ticket.slots, strict=True):
                target, at = self._slab.buffer(slot), 0
                for part in job.chunks[place[key]]:
                    _copy(part, target[at : at + part.nbytes])
                    at += part.nbytes
                digests.append(payload_digest(target[:at]))
        with self.lock:
            if ticket is not None:
                proofs = self._hierarchy.prove(ticket.keys, digests)
                self._hierarchy.end_store(ticket, True, proofs)
                for key in keys:
                    self._failed.pop(key, None)
                kept = [answer is not Answer.MISS for answer in self._hierarchy.lookup(keys)]
                job.answers[job.begun : job.begun + len(keys)] = kept
            job.begun += len(keys)
            is_over = is_late or job.begun == len(job.keys)
            if is_over:
                self._stores.popleft()
                self.refused += job.answers.count(False)
        if is_over:
            job.end()
        return True

    def _new(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that no tier is known to have."""
        answers, now = self._hierarchy.lookup(keys), time.monotonic()
        return [
            key
            for key, answer in zip(keys, answers, strict=True)
            if answer is not Answer.HIT or self._is_forgotten(key, now)
        ]

    def _forget(self, keys: Sequence[bytes]) -> None:
        until = time.monotonic() + FORGET_SECONDS
        for key in keys:
            self._failed[key] = until
            self._failed.move_to_end(key)
        while len(self._failed) > MAX_FORGOTTEN:
            self._failed.popitem(last=False)

    def _is_forgotten(self, key: bytes, now: float) -> bool:
        until = self._failed.get(key)
        if until is None:
            return False
        if until > now:
            return True
        del self._failed[key]
        return False

    def _give_up(self) -> None:
        """End every job with what it has."""
        for piece in self._pieces:
            self._hierarchy.end_load(piece.ticket)
        jobs: list[Any] = [*self._stores, *self._lookups, *self._loads]
        jobs += [piece.job for piece in self._pieces]
        if self._copying is not None:
            jobs.append(self._copying)
        for waiting in (self._stores, self._lookups, self._loads, self._pieces):
            waiting.clear()
        for job in jobs:
            job.end()


def _copy(source: memoryview, target: memoryview) -> None:
    """Releases the interpreter, as an assignment of slices does not."""
    np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
