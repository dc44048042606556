# SPDX-License-Identifier: Apache-2.0
"""Keeps the blocks of agents' jobs between two turns (requests) of a job. The tiers hold the blocks
of an ended turn for the job's next turn, and read the blocks into the slab when that turn is due.

    turn ──► held ──(due: seconds from the end of the turn)──► being read ──► held, in the slab
      └──────────── ended by the next turn, by the job's end, or by time-out ────────────┘

A job has at most one kept turn. Blocks may still be dropped, or not be read in time; the next
turn's request then loads or computes them."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from ..tiers.hierarchy.promotions import LoadTicket
from ..tiers.holds import Hold
from .base import JobRetention
from .connector_context import ConnectorContext

MOST_TURNS = 4096
# The largest share of the slab that blocks read ahead for due turns may hold at once.
SHARE = 0.25
# Stores keep blocks for LEASE_SECONDS, and this engine renews the lease after half of the time. The
# lease is short, so that a server soon drops the blocks of a killed engine or of an ended job.
LEASE_SECONDS = 30.0
# The first renewal after a turn comes this soon, because its last blocks are still being written.
SETTLE_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class KeptTurn:
    """An ended turn whose blocks are kept for the next turn of its job."""

    keys: list[bytes]
    hold: Hold
    until: float  # monotonic
    ask_at: float  # when the lease is renewed in the stores
    due: float | None = None  # None: unknown, or the blocks were read already
    ticket: LoadTicket | None = None
    num_read: int = 0  # blocks that the read `ticket` brings


class KeptTurns(JobRetention):
    """The kept turns of one connector, by job. An alarm wakes the engine when a turn is due. For a
    model with sliding windows or layer states, blocks are not read ahead."""

    def __init__(self, context: ConnectorContext) -> None:
        self._hierarchy = context.hierarchy
        self._alarm = context.alarm
        self._parts = context.parts
        self._reads_ahead = self._hierarchy.has_stores and not self._parts.is_windowed
        self.turns: OrderedDict[bytes, KeptTurn] = OrderedDict()  # the oldest turn first
        self._room = int(SHARE * self._hierarchy.num_slots)  # slots
        self.num_kept = 0  # since the start
        self.blocks_read_ahead = 0  # since the start

    def turn_ended(
        self,
        job: bytes,
        block_hashes: Sequence[bytes],
        seconds: float,
        due_seconds: float | None,
    ) -> None:
        self.job_ended(job)
        keys = self._parts.keys_of(block_hashes)
        if not keys or seconds <= 0:
            return
        while len(self.turns) >= MOST_TURNS:
            self.job_ended(next(iter(self.turns)))
        now = time.monotonic()
        hold = self._hierarchy.hold(keys, seconds)
        turn = KeptTurn(keys, hold, now + seconds, ask_at=now)
        self.turns[job] = turn
        self.num_kept += 1
        self._alarm.at(turn.until)
        self._ask_stores(turn, now, SETTLE_SECONDS)
        self._expect(turn, due_seconds, now)

    def turn_expected(self, job: bytes, due_seconds: float) -> None:
        if (turn := self.turns.get(job)) is not None:
            self._expect(turn, due_seconds, time.monotonic())

    def job_ended(self, job: bytes) -> None:
        if (turn := self.turns.pop(job, None)) is not None:
            self._hierarchy.release_hold(turn.hold)
            self._end_read(turn)

    def poll_turns(self) -> None:
        """Begin the reads of due turns, release ended reads, and drop turns whose time is over."""
        now = time.monotonic()
        for job, turn in list(self.turns.items()):
            if now >= turn.until:
                self.job_ended(job)
                continue
            if now >= turn.ask_at:
                self._ask_stores(turn, now, LEASE_SECONDS / 2)
            if turn.ticket is not None and not turn.ticket.waiting:
                self._end_read(turn)
            if turn.due is not None and now >= turn.due:
                turn.due = None
                self._prefetch_missing(turn)

    def clear(self) -> None:
        for job in list(self.turns):
            self.job_ended(job)

    def _ask_stores(self, turn: KeptTurn, now: float, again_seconds: float) -> None:
        """Make the stores keep a turn's blocks for LEASE_SECONDS, and set when to renew it."""
        self._hierarchy.ask_stores(turn.keys, min(LEASE_SECONDS, turn.until - now))
        turn.ask_at = now + again_seconds
        if turn.ask_at < turn.until:
            self._alarm.at(turn.ask_at)

    def _expect(self, turn: KeptTurn, due_seconds: float | None, now: float) -> None:
        if due_seconds is None or not self._reads_ahead or now + due_seconds >= turn.until:
            return
        turn.due = now + max(0.0, due_seconds)
        self._alarm.at(turn.due)

    def _prefetch_missing(self, turn: KeptTurn) -> None:
        """Begin to read the turn's blocks that the slab lacks, as many as there is room for."""
        tiers = self._hierarchy.find_prefix(turn.keys).tiers
        slab = self._hierarchy.tiers[0]
        missing = [index for index, tier in enumerate(tiers) if tier != slab][: self._room]
        if not missing or turn.ticket is not None:
            return
        ticket = self._hierarchy.begin_load(turn.keys[: missing[-1] + 1])
        self._room -= len(missing)
        turn.ticket, turn.num_read = ticket, len(missing)
        self.blocks_read_ahead += len(missing)

    def _end_read(self, turn: KeptTurn) -> None:
        if turn.ticket is not None:
            self._hierarchy.end_load(turn.ticket)
            self._room += turn.num_read
            turn.ticket, turn.num_read = None, 0
