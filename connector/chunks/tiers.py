# SPDX-License-Identifier: Apache-2.0
"""Stores, looks up and loads chunks of one size, under 40-byte keys, for another engine (the host).

`store`, `lookup` and `load` return at once a future, which ends within `Limits`. The host's memory
is read or written only until the future ends. One thread does all the work in the hierarchy."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from ...tiers.base import Answer, TierStats
from ...tiers.hierarchy.promotions import LoadTicket
from ...tiers.tag import Proof
from .failed import FailedChunks
from .mover import LOOK_SECONDS, Assembly, ChunkMover, Parts

# The longest sleep while jobs wait, because the hierarchy sets no alarm for their time limits.
BUSY_SECONDS = 0.02
# The most waiting jobs of a kind; further jobs are refused at once.
MAX_JOBS = 4096
# A store copies at most 1/8 of the slab at a time; all loads together use at most 1/2 of the slab.
STORE_SHARE, LOAD_SHARE = 8, 2


class Limits(NamedTuple):
    """Time limits of calls, in seconds."""

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
    begun: int = 0  # number of leading keys whose work has begun
    ended: int = 0

    def resolve_partial(self) -> None:
        if not self.future.done():
            self.future.set_result(list(self.answers))


class _Piece(NamedTuple):
    """Neighbouring keys of a load, which are read and copied together."""

    job: _Job
    first: int
    ticket: LoadTicket


class ChunkTiers(ChunkMover):
    """The tiers for chunks as large as the hierarchy's blocks. Thread-safe."""

    THREAD, THEN = "stratakv-chunks", "a miss"

    def __init__(self, assembly: Assembly, limits: Limits) -> None:
        super().__init__(assembly, FailedChunks())
        self.limits = limits
        self.chunk_bytes = self._hierarchy.block_bytes
        self.refused = 0  # chunks that no tier stored
        self._stores: deque[_Job] = deque()
        self._lookups: deque[_Job] = deque()
        self._loads: deque[_Job] = deque()  # jobs with keys that have not begun
        self._orders: deque[Callable[[], object]] = deque()
        self._pieces: list[_Piece] = []
        self._ended: list[_Job] = []  # jobs whose futures are to be resolved
        self._copying: _Job | None = None
        self._num_loading = 0  # chunks in the pieces being loaded
        self._thread.start()

    def store(self, keys: Sequence[bytes], chunks: Sequence[Parts]) -> Future[list[bool]]:
        """Store chunks. The future has True for each stored chunk, which may be evicted later."""
        self._check_chunk_sizes(keys, chunks)
        return self._queue(self._stores, keys, chunks, self.limits.store_seconds)

    def lookup(self, keys: Sequence[bytes]) -> Future[list[bool]]:
        return self._queue(self._lookups, keys, (), self.limits.lookup_seconds)

    def load(self, keys: Sequence[bytes], chunks: Sequence[Parts]) -> Future[list[bool]]:
        """Load chunks. The future has True for each loaded chunk; other bytes are undefined."""
        self._check_chunk_sizes(keys, chunks)
        return self._queue(self._loads, keys, chunks, self.limits.read_seconds)

    def drop_chunks(self, keys: Sequence[bytes]) -> None:
        held = list(keys)
        self._order(lambda: self._hierarchy.forget_blocks(held))

    def clear(self) -> None:
        self._order(self._hierarchy.clear)

    def stats(self) -> dict[str, TierStats]:
        with self.lock:
            return self._hierarchy.stats()

    def _check_chunk_sizes(self, keys: Sequence[bytes], chunks: Sequence[Parts]) -> None:
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
            if self._is_over or not keys or len(jobs) >= MAX_JOBS:
                job.resolve_partial()
                return job.future
            jobs.append(job)
        self._wakeup.set()
        return job.future

    def _order(self, order: Callable[[], object]) -> None:
        with self.lock:
            if self._is_over:
                return
            self._orders.append(order)
        self._wakeup.set()

    def _wait_seconds(self) -> float:
        waiting = self._stores or self._lookups or self._loads or self._pieces
        return BUSY_SECONDS if waiting else LOOK_SECONDS

    def _turn(self) -> bool:
        with self.lock:
            while self._orders:
                self._orders.popleft()()
            self._hierarchy.poll()
            for job in [job for job in self._lookups if self._poll_lookup(job)]:
                self._lookups.remove(job)
                self._ended.append(job)
            self._begin_loads()
            piece = self._take_piece()
            proofs = [] if piece is None else self._slab.proofs(piece.ticket.keys)
        has_ended = bool(self._ended)
        for job in self._ended:
            job.resolve_partial()
        self._ended.clear()
        if piece is not None:
            self._copy_piece(piece, proofs)
        elif self._stores:
            self._copying = self._stores[0]
            has_ended |= self._store_some(self._stores[0])
        self._copying = None
        return has_ended or piece is not None

    def _poll_lookup(self, job: _Job) -> bool:
        """Update the answers of a look-up. Return whether the answers are final."""
        keys = job.keys
        if not job.begun:
            job.begun = len(keys)
            self._hierarchy.prefetch_lookup(keys)
        answers = self._hierarchy.lookup(keys)
        job.answers = [
            answer is Answer.HIT and key not in self._failed
            for key, answer in zip(keys, answers, strict=True)
        ]
        unknown = [k for k, answer in zip(keys, answers, strict=True) if answer is not Answer.HIT]
        if not unknown or time.monotonic() >= job.deadline:
            return True
        prefix = self._hierarchy.find_prefix(unknown)
        return not (prefix.asked or prefix.pending)

    def _begin_loads(self) -> None:
        """Begin as many loads as the slab has room for."""
        num_slots = self._slab.num_slots
        most = min(max(1, num_slots // LOAD_SHARE), num_slots - self._hierarchy.num_unwritten)
        now = time.monotonic()
        while self._loads:
            job = self._loads[0]
            room = most - self._num_loading
            if now >= job.deadline:
                job.ended += len(job.keys) - job.begun
                job.begun = len(job.keys)
                if job.ended == len(job.keys):
                    self._ended.append(job)
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
            if not piece.ticket.waiting or now >= piece.job.deadline:
                self._pieces.remove(piece)
                self._copying = piece.job
                return piece
        return None

    def _copy_piece(self, piece: _Piece, proofs: Sequence[Proof | None]) -> None:
        job, ticket = piece.job, piece.ticket
        count = len(ticket.keys)
        copied = self._copy_out(ticket, proofs, job.chunks[piece.first : piece.first + count])
        lost = {*copied.missing, *copied.damaged}
        with self.lock:
            self._end_load(ticket, copied)
            for i, key in enumerate(ticket.keys, piece.first):
                job.answers[i] = key not in lost
            self._num_loading -= count
            job.ended += count
        if job.ended == len(job.keys):
            job.resolve_partial()

    def _store_some(self, job: _Job) -> bool:
        """Copy a part of the job's chunks to the slab. Return False if the slab has no room yet."""
        size = max(1, self._slab.num_slots // STORE_SHARE)
        keys = job.keys[job.begun : job.begun + size]
        with self.lock:
            # The other half of the slab is for loads, which cannot evict unwritten chunks.
            room = self._slab.num_slots // 2 - self._hierarchy.num_unwritten
            is_late = time.monotonic() >= job.deadline
            if room < len(keys) and not is_late:
                return False
            ticket = None if room < len(keys) else self._hierarchy.begin_store(self._new(keys))
        if ticket is not None:
            place = {key: i for i, key in enumerate(keys, job.begun)}
            digests = self._copy_in(ticket, [job.chunks[place[key]] for key in ticket.keys])
        with self.lock:
            if ticket is not None:
                self._end_store(ticket, digests)
                self._failed.discard_stored(keys)
                kept = [answer is not Answer.MISS for answer in self._hierarchy.lookup(keys)]
                job.answers[job.begun : job.begun + len(keys)] = kept
            job.begun += len(keys)
            is_over = is_late or job.begun == len(job.keys)
            if is_over:
                self._stores.popleft()
                self.refused += job.answers.count(False)
        if is_over:
            job.resolve_partial()
        return True

    def _new(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return the keys that no tier is known to have, or whose load has failed."""
        answers = self._hierarchy.lookup(keys)
        return [
            key
            for key, answer in zip(keys, answers, strict=True)
            if answer is not Answer.HIT or key in self._failed
        ]

    def _give_back(self) -> None:
        for piece in self._pieces:
            self._hierarchy.end_load(piece.ticket)

    def _end_jobs(self) -> None:
        jobs = [*self._ended, *self._stores, *self._lookups, *self._loads]
        jobs += [piece.job for piece in self._pieces]
        if self._copying is not None:
            jobs.append(self._copying)
        for waiting in (self._ended, self._stores, self._lookups, self._loads, self._pieces):
            waiting.clear()
        for job in jobs:
            job.resolve_partial()
