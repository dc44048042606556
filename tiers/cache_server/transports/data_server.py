# SPDX-License-Identifier: Apache-2.0
"""The data connection's port: TCP, with TLS where the service has it.

Socket buffers are left to the kernel, which tunes them better than any fixed size.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import TierConfigError
from ...tag import PROOF_BYTES, Proof, unpack_proof
from ...wire.blocks import receive_blocks, send_blocks
from ...wire.frames import Reply, Request, State, Status, Verb, encode_reply, part_blocks
from ...wire.sockets import Connection
from ..leases import ReadLease
from ..served_store import ServedStore
from .session import Session
from .session_server import SessionServer, SessionSettings

# LOAD and STORE: blocks move through the connection, straight out of and into the slab.
# Of a LOAD the next part is being read from the disk while one part is sent. Whatever ends the
# connection, the tenant store gets everything back.

MOST_PART_BYTES = 32 * 1024**2
PARTS_AHEAD = 2  # parts of a LOAD that are being read or sent
_HIT, _MISS = int(State.HIT), int(State.MISS)


class DataSession(Session):
    """The session of a client that shares no memory."""

    _is_in_memory = False  # the last part of a LOAD was, when it was asked for

    def _answers(self) -> Mapping[Verb, Callable[[Request, float], None]]:
        return {Verb.LOAD: self._load, Verb.STORE: self._store}

    def _load(self, request: Request, deadline: float) -> None:
        keys = self._receive_keys(request, deadline)
        tenant_store = self._tenant_store
        sizes = tenant_store.page_bytes, tenant_store.num_slots
        most = part_blocks(*sizes, MOST_PART_BYTES)
        # Where a disk is read the first part is small, for nothing is sent before it has come.
        # Every part costs a millisecond of a busy processor.
        size = most if self._is_in_memory else part_blocks(*sizes)
        start = parts = 0
        read_leases: deque[ReadLease] = deque()
        try:
            while start < len(keys) or read_leases:
                while start < len(keys) and len(read_leases) < PARTS_AHEAD:
                    read_lease = tenant_store.begin_load(keys[start : start + size])
                    read_leases.append(read_lease)
                    self._is_in_memory = read_lease.ticket.done()
                    start, parts = start + size, parts + 1
                    size = most if self._is_in_memory else min(2 * size, most)
                tenant_store.wait_loaded(read_leases[0], deadline)
                self._send_part(request, read_leases[0], deadline)
                tenant_store.end_load(read_leases.popleft())
            if parts > 1:
                # Used head first, part by part, which makes the head the first to be evicted.
                tenant_store.touch(keys)
        finally:
            for read_lease in read_leases:
                tenant_store.end_load(read_lease)

    def _send_part(self, request: Request, read_lease: ReadLease, deadline: float) -> None:
        tenant_store = self._tenant_store
        tags = tenant_store.tags(read_lease)
        slots = [slot for slot in read_lease.slots if slot is not None]
        if len(slots) < len(tags):
            pairs = zip(read_lease.slots, tags, strict=True)
            tags = [tag for slot, tag in pairs if slot is not None]
        states = bytes([_MISS if slot is None else _HIT for slot in read_lease.slots])
        head = encode_reply(Reply(Verb.LOAD, Status.OK, len(states), request.number, 0)) + states
        send_blocks(self._connection, head, tenant_store.buffers(slots), tags, deadline)

    def _store(self, request: Request, deadline: float) -> None:
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
            # Blocks that came whole are kept, also of a client that went away after them.
            for index, (trailer, hasher) in zip(wanted, arrived, strict=False):
                proof = unpack_proof(trailer)
                proofs[index] = proof if proof.digest == hasher.digest() else None
            aborted = wanted[len(arrived) :]
            states = bytes(tenant_store.end_store(write_lease, proofs, aborted))
        self._send_reply(request, Status.OK, deadline, blocks=len(keys), rest=states)


class DataServer(SessionServer):
    """Listens on `host` and `port`; 0 is any free one."""

    def __init__(
        self, settings: SessionSettings, host: str, port: int, tls: ssl.SSLContext | None = None
    ) -> None:
        super().__init__(settings)
        self._host = host
        self._port = port
        self._tls = tls

    def set_tls(self, tls: ssl.SSLContext | None) -> None:
        """Certificates for connections that come from now on."""
        self._tls = tls

    def start(self) -> int:
        """Listen; the port. Raises TierConfigError where that cannot be."""
        try:
            infos = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
            family, _, _, _, address = infos[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(address)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            cure = "choose another --data-port" if error.errno == errno.EADDRINUSE else "see --host"
            raise TierConfigError(
                f"the data connection cannot listen on {self._host} port {self._port}: "
                f"{error.strerror or error}; {cure}"
            ) from error
        self._accept_from(listener)
        port: int = listener.getsockname()[1]
        return port

    def _wrap(self, sock: socket.socket) -> Connection:
        if self._tls is None:
            return Connection(sock)
        # The handshake has the time limit that the socket was given.
        return Connection(self._tls.wrap_socket(sock, server_side=True))

    def _session(self, connection: Connection, tenant_store: ServedStore) -> Session:
        return DataSession(connection, tenant_store, self._limits, self._draining)
