# SPDX-License-Identifier: Apache-2.0
"""Relays a node's answer to the client, and ends the answer with an error if the node is lost.

Only whole server-sent events are passed on, so the client never reads half an event, and an event
with the error can follow if the node is lost."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.types import Send

from ..api.api_errors import ApiError, encode_error
from .upstream import Headers, NodeAnswer, NodeError, NodeLost

logger = logging.getLogger(__name__)

# Limit of an answer that is held until it is whole: if the node is lost before, another node can
# answer. A longer answer is passed on as the answer arrives.
HELD_BYTES = 1024 * 1024
# The time limit for sending the last event of a failed stream to a slow client.
LAST_WORDS_SECONDS = 2.0

_EVENTS = "text/event-stream"
_DONE = b"data: [DONE]"
# Headers that belong to the connection to the node, and are not passed on to the client.
_HOP_BY_HOP = frozenset(
    (b"connection", b"date", b"keep-alive", b"proxy-authenticate", b"server", b"te", b"trailer",
     b"transfer-encoding", b"upgrade")
)  # fmt: skip


class Reply:
    """The answer to one client. A started answer (`is_started`) cannot come from another node."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.is_started = False
        self.is_ended = False
        self.is_events = False
        self.status = 0

    async def start(self, status: int, headers: Headers) -> None:
        self.is_started = True
        self.status = status
        await self._send(
            {"type": "http.response.start", "status": status, "headers": list(headers)}
        )

    async def write(self, data: bytes) -> None:
        """Send the next bytes of the body; return once the connection can take more data."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish_body(self, data: bytes = b"") -> None:
        self.is_ended = True
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: ApiError) -> None:
        """End a started answer. A stream of events gets the error as its last event. An answer
        without events stays incomplete, and the HTTP server closes the connection."""
        if not self.is_events or self.is_ended:
            return
        event = b"data: " + encode_error(error) + b"\n\n"
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self.finish_body(event)
        except TimeoutError:
            logger.info("a client did not read the end of its stream; its connection is dropped")


async def pass_on(answer: NodeAnswer, reply: Reply) -> None:
    """Send a node's answer to `reply`. Raises NodeLost or NodeSlow, also after `reply` started."""
    dropped = _HOP_BY_HOP
    if answer.is_chunked:  # the content-length of a chunked answer is ignored, and may be wrong
        dropped = dropped | {b"content-length"}
    headers = [(name, value) for name, value in answer.headers if name not in dropped]
    reply.is_events = answer.status == 200 and answer.content_type == _EVENTS
    if reply.is_events:
        await _pass_events(answer, reply, headers)
    else:
        await _pass_bytes(answer, reply, headers)


async def _pass_bytes(answer: NodeAnswer, reply: Reply, headers: Headers) -> None:
    held = bytearray()
    while chunk := await answer.read_chunk():
        if reply.is_started:
            await reply.write(chunk)
            continue
        held += chunk
        if len(held) > HELD_BYTES:
            await reply.start(answer.status, headers)
            await reply.write(bytes(held))
            held.clear()
    if not reply.is_started:
        if answer.ends_by_closing and answer.content_type == "application/json":
            _check_json(held)
        await reply.start(answer.status, headers)
    await reply.finish_body(bytes(held))


def _check_json(held: bytearray) -> None:
    try:
        msgspec.json.decode(held, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        raise NodeLost("closed the connection before the end of its answer") from error


async def _pass_events(answer: NodeAnswer, reply: Reply, headers: Headers) -> None:
    headers = [(name, value) for name, value in headers if name != b"content-length"]
    events = WholeEvents()
    while chunk := await _next_chunk(answer, events):
        whole = events.add(chunk)
        if not whole:
            continue
        if not reply.is_started:
            await reply.start(answer.status, headers)
        await reply.write(whole)
    if not reply.is_started:
        if answer.ends_by_closing:
            raise NodeLost("closed the connection before the first event")
        await reply.start(answer.status, headers)
    if answer.ends_by_closing and not events.is_done:
        raise NodeLost("closed the connection before the last event")
    await reply.finish_body(events.rest)


async def _next_chunk(answer: NodeAnswer, events: WholeEvents) -> bytes:
    """Return a stream's next bytes; b"" at its end, or if the node is lost after the last event."""
    try:
        return await answer.read_chunk()
    except NodeError:
        if events.is_done and not events.rest:
            return b""
        raise


class WholeEvents:
    """Splits a stream of bytes into whole server-sent events."""

    def __init__(self) -> None:
        self._tail = bytearray()
        self.is_done = False  # the stream's last event has been added

    @property
    def rest(self) -> bytes:
        """The bytes after the last whole event."""
        return bytes(self._tail)

    def add(self, chunk: bytes) -> bytes:
        """Add a chunk; return all complete events. Raises NodeLost for an event over HELD_BYTES."""
        seen = max(0, len(self._tail) - 3)  # the end of an event may span two chunks
        self._tail += chunk
        end = 0
        for mark in (b"\n\n", b"\r\n\r\n"):
            at = self._tail.rfind(mark, seen)
            if at >= 0:
                end = max(end, at + len(mark))
        if not end:
            if len(self._tail) > HELD_BYTES:
                raise NodeLost(f"sent an event of more than {HELD_BYTES} bytes")
            return b""
        whole = bytes(self._tail[:end])
        del self._tail[:end]
        self.is_done = whole.splitlines()[-2:][0] == _DONE
        return whole
