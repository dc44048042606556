# SPDX-License-Identifier: Apache-2.0
"""`PartsBody`: a prompt in parts, passed on from a client to one node as lines of JSON.

    POST        the lines of the body, passed on as they arrive
    websocket   each message becomes a line; a message with `is_last` ends the body

The first line is received whole, because the choice of a node needs the first part. Later lines are
passed on as fast as the node reads, and are not kept. Time limits:

    a part          `part_seconds`, from the part's first bytes until the part is whole
    between parts   the node's own time limit: the node's answer ends the prompt"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message, Receive

from ..api.api_errors import ApiError, ClientGone
from ..api.http.incoming_bytes import IncomingBytes
from ..api.openai.response.socket_messages import only_disconnect, text_of_message
from ..api.openai.response.streaming import before
from . import legs

# The router's own limit between two parts, as long as a node's largest time-out.
PAUSE_SECONDS = 86400.0


class PartsSource(Protocol):
    """The parts that a client sends, as lines of JSON."""

    num_held: int  # bytes in memory of the part that is being received or was returned last

    @property
    def began_at(self) -> float | None:
        """The event loop's time at which the incomplete part began; None between two parts."""

    async def read_lines(self) -> bytes:
        """Return the next bytes of lines, b"" after the end. Raises ApiError and ClientGone."""

    async def receive_end(self) -> Message:
        """Return the next ASGI message after the last part, such as http.disconnect."""


class PartsBody:
    """The body of one prompt in parts. The router reads the first line with `read_first`, and later
    lines with `read_more`. A part must arrive within `part_seconds`. `hold`, a function, gets the
    body's number of bytes in memory, and raises ApiError if the router holds too many bytes."""

    def __init__(
        self, source: PartsSource, part_seconds: float, hold: Callable[[int], None]
    ) -> None:
        self._source = source
        self._part_seconds = part_seconds
        self._hold = hold
        self._num_first = 0
        self._is_over = False
        self._stopped = asyncio.Event()
        self._stopped_at = 0.0
        self._when_stopped: Callable[[float], None] = lambda seconds: None
        self.was_read = False

    async def read_first(self, ended: asyncio.Future[None]) -> bytes:
        """Return the first line that is not empty, and received bytes after it. Raises ApiError if
        the line does not arrive in time, ClientGone, and the errors of the source."""
        deadline = asyncio.get_running_loop().time() + self._part_seconds
        held = bytearray()
        while True:
            try:
                chunk = await before(self._source.read_lines(), deadline, ended)
            except TimeoutError:
                raise self._overdue() from None
            if not chunk:
                self._set_over()
                break
            start = len(held)
            held += chunk if held else chunk.lstrip()
            self._num_first = len(held)
            self._hold(self._num_first + self._source.num_held)
            if held.find(b"\n", start) >= 0:
                break
        return bytes(held)

    async def read_more(self) -> bytes:
        """Return the next bytes, b"" after the end. Raises ClientGone, and ApiError if overdue."""
        if self._is_over:
            return b""
        chunk = await self._next_lines()
        self._hold(self._num_first + self._source.num_held)
        if chunk:
            self.was_read = True
        else:
            self._set_over()
        return chunk

    def stop_reading(self) -> None:
        """Stop reading the body, which is whole or which the node answers before its end."""
        if not self._stopped.is_set():
            self._stopped.set()
            self._stopped_at = asyncio.get_running_loop().time()
            self._when_stopped(self._stopped_at)

    def when_stopped(self, call: Callable[[float], None]) -> None:
        """Call `call` with the event loop's time when reading stops or has stopped (BodyRest)."""
        self._when_stopped = call
        if self._stopped.is_set():
            call(self._stopped_at)

    async def receive_end(self) -> Message:
        """Wait until reading has stopped, then return the next ASGI message: http.disconnect if the
        client disconnects. Until reading has stopped, `read_more` detects a disconnected client."""
        await self._stopped.wait()
        return await self._source.receive_end()

    async def _next_lines(self) -> bytes:
        """Return the source's next bytes. Raises ApiError for a part that is overdue."""
        clock = asyncio.get_running_loop().time
        reading, paused_at = asyncio.ensure_future(self._source.read_lines()), clock()
        try:
            while True:
                began = self._source.began_at
                due = paused_at + PAUSE_SECONDS if began is None else began + self._part_seconds
                left = due - clock()
                if left <= 0:
                    raise self._overdue(has_paused=began is None)
                await asyncio.wait((reading,), timeout=min(left, self._part_seconds))
                if reading.done():
                    return reading.result()
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _set_over(self) -> None:
        self._is_over = True
        self.stop_reading()

    def _overdue(self, *, has_paused: bool = False) -> ApiError:
        message = (
            f"a part of the prompt was not there within {self._part_seconds:g} s (--body-seconds "
            "of the router); send it faster, or the whole prompt to /v1/completions"
        )
        if has_paused:
            message = (
                f"no part of the prompt came for {PAUSE_SECONDS:g} s; send the whole prompt to "
                "/v1/completions"
            )
        return ApiError(message, status=408, code="body_timeout")


class HttpParts:
    """The body of a POST, each line of which is a part. A line with `is_last` ends the prompt."""

    def __init__(self, receive: Receive, max_line_bytes: int) -> None:
        self._receive = receive
        self._max_line_bytes = max_line_bytes
        self._line: list[bytes] = []  # the received bytes of the incomplete line
        self.num_held = 0  # the number of bytes in `_line`
        self.began_at: float | None = None  # the start of the incomplete part, as in PartsSource
        self._is_whole = False

    async def read_lines(self) -> bytes:
        while not self._is_whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            self._is_whole = not message.get("more_body", False)
            data: bytes = message.get("body", b"")
            if data:
                self._look_for_last(data)
                return data
        return b""

    def _look_for_last(self, data: bytes) -> None:
        """Add received bytes to the current line; a line with `is_last` ends the prompt."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._add_piece(end)
            self._is_whole |= _says_last(b"".join(self._line))
            self._line, self.num_held, self.began_at = [], 0, None
        self._add_piece(rest)
        if self.began_at is None and rest.strip():
            self.began_at = asyncio.get_running_loop().time()

    def _add_piece(self, piece: bytes) -> None:
        self._line.append(piece)
        self.num_held += len(piece)
        if self.num_held > self._max_line_bytes:
            message = f"a line is over the limit of {self._max_line_bytes} bytes; send less"
            raise ApiError(message, status=413, code="body_too_large")

    async def receive_end(self) -> Message:
        """Return the next ASGI message. The body's bytes after the node's answer are dropped."""
        return await self._receive()


class SocketParts:
    """The messages of a websocket, each of which is a part of the prompt."""

    def __init__(self, receive: Receive, max_message_bytes: int, incoming: IncomingBytes) -> None:
        self._receive = receive
        self._max_message_bytes = max_message_bytes
        self._incoming = incoming
        self.num_held = 0
        self._is_whole = False

    async def read_lines(self) -> bytes:
        self.num_held = 0  # the previous message has been passed on to the node
        if self._is_whole:
            return b""
        data = text_of_message(await self._receive())
        if len(data) > self._max_message_bytes:
            message = f"a message is over the limit of {self._max_message_bytes} bytes; send less"
            raise ApiError(message, status=413, code="body_too_large")
        if not data.strip():
            raise ApiError("a message is empty; send a JSON object", code="invalid_json")
        self._is_whole, self.num_held = _says_last(data), len(data)
        # Line ends in a JSON text are only whitespace: JSON strings contain no raw line ends.
        return data.replace(b"\n", b" ") + b"\n"

    @property
    def began_at(self) -> float | None:
        return self._incoming.began_at

    async def receive_end(self) -> Message:
        """Return the next ASGI message. Raises ApiError for a message after the last part. If the
        node answers with an error before the last part, later messages are dropped."""
        if self._is_whole:
            return await only_disconnect(self._receive)()
        message = await self._receive()
        is_end = message["type"] == "websocket.disconnect"
        return {"type": "http.disconnect"} if is_end else message


def _says_last(line: bytes) -> bool:
    """Return whether a part has `is_last`; False for invalid JSON, which the node reports."""
    if b"is_last" not in line:
        return False
    return bytes(legs.read_fields(line).get("is_last", b"")).strip() == b"true"
