# SPDX-License-Identifier: Apache-2.0
"""PIN, UNPIN, RESERVE and COMMIT: the client has mapped the room's memory, only slots are named.

What a client holds ends at its time, and with its connection, so that a client that was killed
holds nothing. A client that was stopped in the middle of a copy writes on when it runs again, so
slots that it reserved stay out of use until it says that it is done with them (COMMIT) or its
connection ends; its connection does not end by being silent until then. Should it write later
still, the tags of the blocks tell.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from itertools import count

from ...tag import PROOF_BYTES, unpack_proof
from ...wire.frames import MAX_LEASE_SECONDS, NO_PROOF, Request, State, Status, Verb, WireError
from ...wire.limits import Limits
from ...wire.sockets import Connection
from ..tenant_store import Room
from ..transfer_leases import Intake, Loan
from .session import Draining, Session

MAX_HELD = 64  # leases of one connection at a time


class MemorySession(Session):
    """Of a client on the same host."""

    def __init__(
        self,
        connection: Connection,
        room: Room,
        limits: Limits,
        draining: Draining,
    ) -> None:
        super().__init__(connection, room, limits, draining)
        self._leases = count(1)
        self._held: dict[int, tuple[float, Loan | Intake]] = {}
        self._withheld: dict[int, list[int]] = {}  # slots, by the lease that has ended

    def close(self) -> None:
        for _, held in self._held.values():
            self._give_back(held)
        self._held.clear()
        for slots in self._withheld.values():
            self._room.restore(slots)
        self._withheld.clear()

    def _answers(self) -> Mapping[Verb, Callable[[Request, float], None]]:
        return {
            Verb.PIN: self._pin,
            Verb.UNPIN: self._unpin,
            Verb.RESERVE: self._reserve,
            Verb.COMMIT: self._commit,
        }

    def _wait(self) -> bool:
        silent_until = time.monotonic() + self._limits.idle_seconds
        while True:
            if self._withheld:
                silent_until = time.monotonic() + self._limits.idle_seconds
            ends = [end for end, _ in self._held.values()]
            wake = min([silent_until, *ends])
            if self._connection.wait_readable(wake, self._draining.fd):
                return True
            now = time.monotonic()
            self._expire(now)
            if now >= silent_until or self._draining.has_begun:
                return False

    def _pin(self, request: Request, deadline: float) -> None:
        seconds = _seconds(request)
        keys = self._keys(request, deadline)
        if self._is_full(request, deadline):
            return
        room = self._room
        loan = room.begin_load(keys)
        lease = self._hold(seconds, loan)
        room.wait(loan, deadline)
        hits = [slot for slot in loan.slots if slot is not None]
        states = bytes(State.MISS if slot is None else State.HIT for slot in loan.slots)
        slots = struct.pack(f"<{len(hits)}I", *hits)
        pairs = zip(loan.slots, room.tags(loan), strict=True)
        tags = b"".join(tag for slot, tag in pairs if slot is not None)
        self._reply(
            request,
            Status.OK,
            deadline,
            blocks=len(keys),
            argument=lease,
            rest=states + slots + tags,
        )

    def _unpin(self, request: Request, _deadline: float) -> None:
        _, held = self._held.get(request.argument, (0.0, None))
        if isinstance(held, Loan):
            del self._held[request.argument]
            self._give_back(held)

    def _reserve(self, request: Request, deadline: float) -> None:
        seconds = _seconds(request)
        keys = self._keys(request, deadline)
        if self._is_full(request, deadline):
            return
        intake = self._room.begin_store(keys)
        lease = self._hold(seconds, intake)
        wanted = [slot for slot in intake.slots if slot is not None]
        rest = bytes(intake.states) + struct.pack(f"<{len(wanted)}I", *wanted)
        self._reply(request, Status.OK, deadline, blocks=len(keys), argument=lease, rest=rest)

    def _commit(self, request: Request, deadline: float) -> None:
        raw = self._connection.receive(request.blocks * PROOF_BYTES, deadline)
        self._expire(time.monotonic())
        _, held = self._held.get(request.argument, (0.0, None))
        if not isinstance(held, Intake):
            self._room.restore(self._withheld.pop(request.argument, ()))
            self._reply(request, Status.NO_LEASE, deadline)
            return
        if held.states.count(State.WANTED) != request.blocks:
            raise WireError(
                f"COMMIT brings {request.blocks} proofs for {held.states.count(State.WANTED)} slots"
            )
        given = (raw[i : i + PROOF_BYTES] for i in range(0, len(raw), PROOF_BYTES))
        packed = [NO_PROOF if slot is None else next(given) for slot in held.slots]
        proofs = [None if each == NO_PROOF else unpack_proof(each) for each in packed]
        checked = self._room.check(held, proofs)
        del self._held[request.argument]
        states = self._room.end_store(held, checked)
        self._reply(request, Status.OK, deadline, blocks=len(states), rest=bytes(states))

    def _hold(self, seconds: float, held: Loan | Intake) -> int:
        lease = next(self._leases)
        self._held[lease] = time.monotonic() + seconds, held
        return lease

    def _is_full(self, request: Request, deadline: float) -> bool:
        self._expire(time.monotonic())
        if len(self._held) + len(self._withheld) < MAX_HELD:
            return False
        self._reply(request, Status.BUSY, deadline)
        return True

    def _expire(self, now: float) -> None:
        for lease in [lease for lease, (end, _) in self._held.items() if end <= now]:
            _, held = self._held.pop(lease)
            if isinstance(held, Loan):
                self._give_back(held)
            elif slots := self._room.abandon(held):
                self._withheld[lease] = slots

    def _give_back(self, held: Loan | Intake) -> None:
        if isinstance(held, Loan):
            self._room.end_load(held)
        else:
            self._room.end_store(held, [None] * len(held.keys))


def _seconds(request: Request) -> float:
    """How long a request wants to hold blocks. Raises WireError for what is out of range."""
    seconds = request.argument / 1000
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise WireError(f"a lease runs for up to {MAX_LEASE_SECONDS:g} s, not {seconds:g}")
    return seconds
