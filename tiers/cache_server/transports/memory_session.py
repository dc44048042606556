# SPDX-License-Identifier: Apache-2.0
"""MemorySession: serves PIN, UNPIN, RESERVE and COMMIT for memory that the client has mapped.

A lease ends at its deadline or with its connection, so a killed client keeps no slots. A client
that is stopped during a copy continues to write when it runs again. The slots that such a client
reserved therefore stay unused until it sends COMMIT or its connection ends, and the server does not
close the connection as idle before. If a client writes to a slot later, other clients find that the
block's tag does not match."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping

from ...tag import PROOF_BYTES, unpack_proof
from ...wire.frames import MAX_LEASE_SECONDS, NO_PROOF, RequestFrame, State, Status, Verb, WireError
from ...wire.limits import Limits
from ...wire.sockets import Connection
from ..leases import Lease, Leases, ReadLease, WriteLease
from ..served_store import ServedStore
from .session import Draining, Session

MAX_HELD = 64  # the most leases of one connection at a time


class MemorySession(Session):
    """The session of a client on the same host."""

    def __init__(
        self,
        connection: Connection,
        tenant_store: ServedStore,
        limits: Limits,
        draining: Draining,
    ) -> None:
        super().__init__(connection, tenant_store, limits, draining)
        self._leases = Leases[ReadLease | WriteLease](self._expired)
        self._withheld: dict[int, list[int]] = {}  # unused slots, by number of the lease

    def close(self) -> None:
        for lease in self._leases:
            self._leases.end_lease(lease)
            self._give_back(lease.held)
        for slots in self._withheld.values():
            self._tenant_store.restore_slots(slots)
        self._withheld.clear()

    def _answers(self) -> Mapping[Verb, Callable[[RequestFrame, float], None]]:
        return {
            Verb.PIN: self._pin,
            Verb.UNPIN: self._unpin,
            Verb.RESERVE: self._reserve,
            Verb.COMMIT: self._commit,
        }

    def _wait_for_request(self) -> bool:
        silent_until = time.monotonic() + self._limits.idle_seconds
        while True:
            if self._withheld:
                silent_until = time.monotonic() + self._limits.idle_seconds
            next_deadline = self._leases.next_deadline()
            wake = silent_until if next_deadline is None else min(silent_until, next_deadline)
            if self._connection.wait_readable(wake, self._draining.fd):
                return True
            self._leases.expire()
            if time.monotonic() >= silent_until or self._draining.has_begun:
                return False

    def _pin(self, request: RequestFrame, deadline: float) -> None:
        seconds = _seconds(request)
        keys = self._receive_keys(request, deadline)
        if self._is_full(request, deadline):
            return
        tenant_store = self._tenant_store
        read_lease = tenant_store.begin_load(keys)
        lease = self._leases.grant_lease(read_lease, seconds)
        tenant_store.wait_loaded(read_lease, deadline)
        hits = [slot for slot in read_lease.slots if slot is not None]
        states = bytes(State.MISS if slot is None else State.HIT for slot in read_lease.slots)
        slots = struct.pack(f"<{len(hits)}I", *hits)
        pairs = zip(read_lease.slots, tenant_store.tags(read_lease), strict=True)
        tags = b"".join(tag for slot, tag in pairs if slot is not None)
        self._send_reply(
            request,
            Status.OK,
            deadline,
            blocks=len(keys),
            argument=lease.number,
            rest=states + slots + tags,
        )

    def _unpin(self, request: RequestFrame, _deadline: float) -> None:
        lease = self._leases.find_lease(request.argument)
        if lease is not None and isinstance(lease.held, ReadLease):
            self._leases.end_lease(lease)
            self._give_back(lease.held)

    def _reserve(self, request: RequestFrame, deadline: float) -> None:
        seconds = _seconds(request)
        keys = self._receive_keys(request, deadline)
        if self._is_full(request, deadline):
            return
        write_lease = self._tenant_store.begin_store(keys)
        number = self._leases.grant_lease(write_lease, seconds).number
        wanted = [slot for slot in write_lease.slots if slot is not None]
        rest = bytes(write_lease.states) + struct.pack(f"<{len(wanted)}I", *wanted)
        self._send_reply(request, Status.OK, deadline, blocks=len(keys), argument=number, rest=rest)

    def _commit(self, request: RequestFrame, deadline: float) -> None:
        raw = self._connection.receive(request.blocks * PROOF_BYTES, deadline)
        lease = self._leases.find_lease(request.argument)
        if lease is None or not isinstance(lease.held, WriteLease):
            self._tenant_store.restore_slots(self._withheld.pop(request.argument, ()))
            self._send_reply(request, Status.NO_LEASE, deadline)
            return
        held = lease.held
        if held.states.count(State.WANTED) != request.blocks:
            raise WireError(
                f"COMMIT brings {request.blocks} proofs for {held.states.count(State.WANTED)} slots"
            )
        given = (raw[i : i + PROOF_BYTES] for i in range(0, len(raw), PROOF_BYTES))
        packed = [NO_PROOF if slot is None else next(given) for slot in held.slots]
        proofs = [None if each == NO_PROOF else unpack_proof(each) for each in packed]
        checked = self._tenant_store.check_digests(held, proofs)
        self._leases.end_lease(lease)
        states = self._tenant_store.end_store(held, checked)
        self._send_reply(request, Status.OK, deadline, blocks=len(states), rest=bytes(states))

    def _is_full(self, request: RequestFrame, deadline: float) -> bool:
        self._leases.expire()
        if len(self._leases) + len(self._withheld) < MAX_HELD:
            return False
        self._send_reply(request, Status.BUSY, deadline)
        return True

    def _expired(self, lease: Lease[ReadLease | WriteLease]) -> None:
        if isinstance(lease.held, ReadLease):
            self._tenant_store.count_expired_lease()
            self._give_back(lease.held)
        elif slots := self._tenant_store.abandon_store(lease.held):
            self._withheld[lease.number] = slots

    def _give_back(self, held: ReadLease | WriteLease) -> None:
        if isinstance(held, ReadLease):
            self._tenant_store.end_load(held)
        else:
            count = len(held.keys)
            self._tenant_store.end_store(held, [None] * count, range(count))


def _seconds(request: RequestFrame) -> float:
    """Return the seconds of the requested lease. Raises WireError for a value out of range."""
    seconds = request.argument / 1000
    if not 0 < seconds <= MAX_LEASE_SECONDS:
        raise WireError(f"a lease runs for up to {MAX_LEASE_SECONDS:g} s, not {seconds:g}")
    return seconds
