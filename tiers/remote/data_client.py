# SPDX-License-Identifier: Apache-2.0
"""The client's end of the data connection: blocks straight into and out of the caller's buffers.

Knows nothing of tickets' origin, of reconnecting or of who asks.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence

from ..block import BlockLayout
from .blocks_on_wire import receive_block, send_blocks
from .socket_connection import SocketConnection, greet
from .sockets import Connection, ConnectionLost, connect
from .wire import State, Verb, encode_request, pack_keys


class DataConnection(SocketConnection):
    """Over TCP, with TLS where the service has it."""

    kind = "socket"

    @classmethod
    def open(
        cls,
        host: str,
        port: int,
        ticket: bytes,
        layout: BlockLayout,
        deadline: float,
        *,
        tls: ssl.SSLContext | None = None,
        server_name: str | None = None,
    ) -> DataConnection:
        """Connect and show the ticket. `server_name` is what the certificate must say, `host`
        unless given. Raises ConnectionLost."""
        try:
            sock = connect(host, port, deadline)
            if tls is not None:
                # The handshake has the time limit that the socket was given.
                sock = tls.wrap_socket(sock, server_hostname=server_name or host)
        except OSError as error:
            raise ConnectionLost(f"{host} port {port}: {error}") from error
        connection = Connection(sock)
        try:
            return cls(connection, layout, greet(connection, ticket, layout, deadline))
        except BaseException:
            connection.close()
            raise

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[State]:
        request = self._next(Verb.LOAD, len(keys))
        self._connection.send([encode_request(request) + pack_keys(keys)], deadline)
        states: list[State] = []
        while len(states) < len(keys):
            reply = self._reply(request, deadline)
            first = len(states)
            if not 0 < reply.blocks <= len(keys) - first:
                raise ConnectionLost("the server answered for blocks that were not asked for")
            part = self._states(reply.blocks, deadline)
            for index, state in enumerate(part, first):
                if state is State.HIT:
                    part[index - first] = self._receive(keys[index], buffers[index], deadline)
                elif state is not State.MISS:
                    raise ConnectionLost(f"the server answered {state.name} to a load")
            states += part
        return states

    def store(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[State]:
        request = self._next(Verb.STORE, len(keys))
        self._connection.send([encode_request(request) + pack_keys(keys)], deadline)
        if self._reply(request, deadline).blocks != len(keys):
            raise ConnectionLost("the server answered for blocks that were not sent")
        states = self._states(len(keys), deadline)
        send_blocks(self._connection, b"", self._wanted(keys, buffers, states), deadline)
        if self._reply(request, deadline).blocks != len(keys):
            raise ConnectionLost("the server answered for blocks that were not sent")
        return self._states(len(keys), deadline)

    def _wanted(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], states: Sequence[State]
    ) -> Iterator[tuple[memoryview, bytes]]:
        for key, buffer, state in zip(keys, buffers, states, strict=True):
            if state is State.WANTED:
                payload = buffer[: self._page_bytes]
                yield payload, self._tagger.tag(key, payload)

    def _receive(self, key: bytes, buffer: memoryview, deadline: float) -> State:
        payload = buffer[: self._page_bytes]
        if receive_block(self._connection, key, self._tagger, payload, deadline) is None:
            self.corrupt_blocks += 1
            return State.MISS
        return State.HIT
