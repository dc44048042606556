# SPDX-License-Identifier: Apache-2.0
"""DataConnection: the client's end of the data connection. Makes no extra copies of blocks."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

from ...block import BlockLayout
from ...native.native_library import LEAST_BYTES
from ...tag import TAG_BYTES, Proof, Proofs
from ...wire.blocks import receive_blocks
from ...wire.frames import NO_PROOF, State, Verb, encode_request, pack_keys
from ...wire.sockets import Connection, ConnectionLost, connect
from .socket_connection import SocketConnection, greet


class DataConnection(SocketConnection):
    """A data connection over TCP, with TLS if the gRPC service uses TLS."""

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
        tag_key: bytes | None = None,
        namespace: bytes = b"",
    ) -> DataConnection:
        """Connect and send the ticket. The server's certificate must name `server_name`, by default
        `host`. Raises ConnectionLost."""
        try:
            sock = connect(host, port, deadline)
            if tls is not None:
                # The timeout of the socket limits the time of the handshake.
                sock = tls.wrap_socket(sock, server_hostname=server_name or host)
        except OSError as error:
            raise ConnectionLost(f"{host} port {port}: {error}") from error
        connection = Connection(sock)
        try:
            welcome = greet(connection, ticket, layout, deadline)
            return cls(connection, layout, welcome, tag_key, namespace)
        except BaseException:
            connection.close()
            raise

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[Proof | None]:
        request = self._next_request(Verb.LOAD, len(keys))
        self._connection.send([encode_request(request) + pack_keys(keys)], deadline)
        self.corrupt_keys = []
        proofs: list[Proof | None] = []
        while len(proofs) < len(keys):
            reply = self._take_reply(request, deadline)
            first = len(proofs)
            if not 0 < reply.blocks <= len(keys) - first:
                raise ConnectionLost("the server answered for blocks that were not asked for")
            states = self._take_states(reply.blocks, deadline)
            for state in set(states) - {State.HIT, State.MISS}:
                raise ConnectionLost(f"the server answered {state.name} to a load")
            proofs += [None] * len(states)
            hits = [index for index, state in enumerate(states, first) if state is State.HIT]
            self._receive_hits(hits, keys, buffers, proofs, deadline)
        return proofs

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        deadline: float,
    ) -> list[State | None]:
        request = self._next_request(Verb.STORE, len(keys))
        self._connection.send([encode_request(request) + pack_keys(keys)], deadline)
        if self._take_reply(request, deadline).blocks != len(keys):
            raise ConnectionLost("the server answered for blocks that were not sent")
        states = self._take_states(len(keys), deadline)
        wanted = [index for index, state in enumerate(states) if state is State.WANTED]
        damaged = self._send_wanted(wanted, keys, buffers, proofs, deadline)
        if self._take_reply(request, deadline).blocks != len(keys):
            raise ConnectionLost("the server answered for blocks that were not sent")
        answers: list[State | None] = [*self._take_states(len(keys), deadline)]
        for index in damaged:
            answers[index] = None
        return answers

    def _send_wanted(
        self,
        wanted: Sequence[int],
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        deadline: float,
    ) -> list[int]:
        """Send each wanted payload with its proof. A payload that differs from its proof in
        `proofs` is damaged and is sent with NO_PROOF. Return the indices of damaged payloads."""
        payloads = [buffers[index][: self._page_bytes] for index in wanted]
        if self._is_plain and not any(payload.readonly for payload in payloads):
            names = self._tags.names([keys[index] for index in wanted])
            given = [proofs[index] for index in wanted]
            digests = [None if proof is None else proof.digest for proof in given]
            found = self._connection.send_proven(payloads, names, digests, deadline)
            return [wanted[place] for place in found]
        damaged = []
        # Each payload is hashed just before it is sent, so that it is in the CPU cache then.
        for index, payload in zip(wanted, payloads, strict=True):
            proof = self._tags.prove(keys[index], payload, proofs[index])
            if proof is None:
                damaged.append(index)
            packed = NO_PROOF if proof is None else proof.pack()
            self._connection.send([payload, packed], deadline)
        return damaged

    def _receive_hits(
        self,
        hits: Sequence[int],
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: list[Proof | None],
        deadline: float,
    ) -> None:
        """Receive blocks and fill in their proofs. Count blocks whose tag does not match."""
        if not hits:
            return
        tags = self._tags
        payloads = [buffers[index][: self._page_bytes] for index in hits]
        if self._is_plain:
            named = [keys[index] for index in hits]
            digests, made, came = self._connection.receive_named(
                payloads, tags.names(named), TAG_BYTES, deadline
            )
            found: list[Proof | None] = [*tags.received_all(named, digests, made)]
            if made != came:
                pairs = zip(found, made, came, strict=True)
                found = [proof if ours == theirs else None for proof, ours, theirs in pairs]
        else:
            arrived = list[tuple[bytes, Any]]()
            keyed = [tags.begin_block(keys[index]) for index in hits] if tags.are_keyed else None
            receive_blocks(self._connection, payloads, keyed, TAG_BYTES, deadline, arrived)
            found = [
                tags.received(keys[index], hasher, tag)
                for index, (tag, hasher) in zip(hits, arrived, strict=True)
            ]
        for index, proof in zip(hits, found, strict=True):
            proofs[index] = proof
            if proof is None:
                self.corrupt_blocks += 1
                self.corrupt_keys.append(keys[index])

    @property
    def _is_plain(self) -> bool:
        can = self._connection.can_digest and self._page_bytes >= LEAST_BYTES
        return can and not self._tags.are_keyed
