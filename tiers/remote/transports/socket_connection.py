# SPDX-License-Identifier: Apache-2.0
"""SocketConnection: the base class of `DataConnection` and `MemoryConnection`, which sends requests
and receives replies. A message that the protocol does not allow raises ConnectionLost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...block import BlockLayout
from ...wire.connection_tags import Tags
from ...wire.frames import (
    REPLY,
    WELCOME,
    ReplyFrame,
    RequestFrame,
    State,
    Status,
    Verb,
    Welcome,
    WireError,
    decode_reply,
    decode_welcome,
    encode_greeting,
)
from ...wire.sockets import Connection, ConnectionLost
from .block_connection import BlockConnection, Refused

_Words = TypeVar("_Words")
_STATES = {int(state): state for state in State}


class SocketConnection(BlockConnection):
    """A client's connection after the server's welcome message. `close` closes `connection`."""

    def __init__(
        self,
        connection: Connection,
        layout: BlockLayout,
        welcome: Welcome,
        tag_key: bytes | None = None,
        namespace: bytes = b"",
    ) -> None:
        self.boot_id = welcome.boot_id
        self._connection = connection
        self._page_bytes = layout.page_bytes
        self._tags = Tags(layout, tag_key, namespace)
        self.corrupt_keys: list[bytes] = []
        self._number = 0

    def abort_call(self) -> None:
        self._connection.abort()

    def close(self) -> None:
        self._connection.close()

    def _next_request(self, verb: Verb, blocks: int, argument: int = 0) -> RequestFrame:
        self._number += 1
        return RequestFrame(verb, blocks, self._number, argument)

    def _take_reply(self, request: RequestFrame, deadline: float) -> ReplyFrame:
        """Receive the head of a reply. Raises Refused, or ConnectionLost for a wrong reply."""
        reply = decode(decode_reply, self._connection.receive(REPLY.size, deadline))
        if reply.verb is not request.verb or reply.number != request.number:
            raise ConnectionLost("the server answered something that was not asked")
        if reply.status is not Status.OK:
            raise Refused(reply.status)
        return reply

    def _take_states(self, count: int, deadline: float) -> list[State]:
        return decode(to_states, self._connection.receive(count, deadline))


def greet(connection: Connection, ticket: bytes, layout: BlockLayout, deadline: float) -> Welcome:
    """Send the ticket and receive the welcome. Raises ConnectionLost."""
    connection.send([encode_greeting(ticket)], deadline)
    return welcomed(connection.receive(WELCOME.size, deadline), layout)


def welcomed(raw: bytes, layout: BlockLayout) -> Welcome:
    """Decode a welcome. Raises Refused, or ConnectionLost for a wrong block size."""
    welcome = decode(decode_welcome, raw)
    if welcome.status is not Status.OK:
        raise Refused(welcome.status)
    if welcome.page_bytes != layout.page_bytes:
        raise ConnectionLost(
            f"the server's blocks have {welcome.page_bytes} bytes, ours {layout.page_bytes}"
        )
    return welcome


def to_states(raw: bytes) -> list[State]:
    """Decode one state per byte. Raises WireError for a byte that is no state."""
    try:
        return [_STATES[byte] for byte in raw]
    except KeyError as error:
        raise WireError(f"unknown state {error}") from error


def decode(decoder: Callable[[bytes], _Words], raw: bytes) -> _Words:
    """Return `decoder(raw)`. Raises ConnectionLost instead of WireError."""
    try:
        return decoder(raw)
    except WireError as error:
        raise ConnectionLost(str(error)) from error
