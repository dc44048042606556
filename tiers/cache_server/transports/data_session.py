# SPDX-License-Identifier: Apache-2.0
"""DataSession: serves LOAD and STORE, which move blocks between slots and the connection.

While one part of a LOAD is sent, the disk reads the next part. All slots are released, in whatever
way the connection ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...tag import PROOF_BYTES, Proof, unpack_proof
from ...wire.blocks import receive_blocks, send_blocks
from ...wire.frames import ReplyFrame, RequestFrame, State, Status, Verb, encode_reply, part_blocks
from ..leases import ReadLease
from .session import Session

MOST_PART_BYTES = 32 * 1024**2

PARTS_AHEAD = 2  # parts of a LOAD that are being read or sent


class DataSession(Session):
    """The session of a client that shares no memory."""

    _is_in_memory = False  # whether a LOAD's last part needed no read from disk

    def _answers(self) -> Mapping[Verb, Callable[[RequestFrame, float], None]]:
        return {Verb.LOAD: self._serve_load, Verb.STORE: self._store}

    def _serve_load(self, request: RequestFrame, deadline: float) -> None:
        keys = self._receive_keys(request, deadline)
        tenant_store = self._tenant_store
        sizes = tenant_store.page_bytes, tenant_store.num_slots
        most = part_blocks(*sizes, MOST_PART_BYTES)
        # The first part from a disk is small, because sending starts when the part has been read.
        # Later parts are larger, because each part costs a millisecond of a busy CPU.
        size = most if self._is_in_memory else part_blocks(*sizes)
        start = parts = 0
        read_leases: deque[ReadLease] = deque()
        try:
            while start < len(keys) or read_leases:
                while start < len(keys) and len(read_leases) < PARTS_AHEAD:
                    read_lease = tenant_store.begin_load(keys[start : start + size])
                    read_leases.append(read_lease)
                    self._is_in_memory = not read_lease.ticket.waiting
                    start, parts = start + size, parts + 1
                    size = most if self._is_in_memory else min(2 * size, most)
                tenant_store.wait_loaded(read_leases[0], deadline)
                self._send_part(request, read_leases[0], deadline)
                tenant_store.end_load(read_leases.popleft())
            if parts > 1:
                # Parts were read in prompt order. Without a touch the prompt's first blocks would
                # be evicted first.
                tenant_store.touch(keys)
        finally:
            for read_lease in read_leases:
                tenant_store.end_load(read_lease)

    def _send_part(self, request: RequestFrame, read_lease: ReadLease, deadline: float) -> None:
        tenant_store = self._tenant_store
        tags = tenant_store.tags(read_lease)
        slots = [slot for slot in read_lease.slots if slot is not None]
        if len(slots) < len(tags):
            pairs = zip(read_lease.slots, tags, strict=True)
            tags = [tag for slot, tag in pairs if slot is not None]
        states = bytes([_MISS if slot is None else _HIT for slot in read_lease.slots])
        head = (
            encode_reply(ReplyFrame(Verb.LOAD, Status.OK, len(states), request.number, 0)) + states
        )
        send_blocks(self._connection, head, tenant_store.buffers(slots), tags, deadline)

    def _store(self, request: RequestFrame, deadline: float) -> None:
        keys = self._receive_keys(request, deadline)
        tenant_store = self._tenant_store
        write_lease = tenant_store.begin_store(keys)
        proofs: list[Proof | None] = [None] * len(keys)
        wanted = [index for index, slot in enumerate(write_lease.slots) if slot is not None]
        arrived: list[tuple[bytes, Any]] = []
        try:
            states = bytes(write_lease.states)
            self._send_reply(request, Status.OK, deadline, blocks=len(keys), rest=states)
            slots = [slot for slot in write_lease.slots if slot is not None]
            payloads = tenant_store.buffers(slots)
            receive_blocks(self._connection, payloads, None, PROOF_BYTES, deadline, arrived)
        finally:
            # Complete blocks are kept, even if the connection ended after them.
            for index, (trailer, hasher) in zip(wanted, arrived, strict=False):
                proof = unpack_proof(trailer)
                proofs[index] = proof if proof.digest == hasher.digest() else None
            aborted = wanted[len(arrived) :]
            states = bytes(tenant_store.end_store(write_lease, proofs, aborted))
        self._send_reply(request, Status.OK, deadline, blocks=len(keys), rest=states)


_HIT, _MISS = int(State.HIT), int(State.MISS)
