# SPDX-License-Identifier: Apache-2.0
"""PartsBody: a prompt in parts on its way from a client to one node, which is sent lines of JSON.

    POST        the lines of the body, passed on as they come
    websocket   each message is a line; the one that says `is_last` ends the body

Its first line is read whole, because a node is chosen by it. The rest is passed on as fast as the
node takes it, and nothing of that is kept.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.types import Message, Receive

from ..api.api_errors import ApiError, ClientGone
from ..api.openai.response.socket_messages import only_disconnect, text_of_message
from ..api.openai.response.streaming import before
from . import legs


class PartsSource(Protocol):
    """The parts that a client sends, as lines of JSON."""

    async def read_lines(self) -> bytes:
        """The next bytes, and b"" behind the last of them. Raises ApiError and ClientGone."""

    async def receive_end(self) -> Message:
        """The next message once nothing more is read; http.disconnect when the client leaves."""


class PartsBody:
    """The body of one prompt. The proxy reads `rest` of it with `read_more`."""

    def __init__(self, source: PartsSource, wait_seconds: float) -> None:
        self._source = source
        self._wait_seconds = wait_seconds
        self._is_over = False
        self._stopped = asyncio.Event()
        self.was_read = False

    async def read_first(self, ended: asyncio.Future[None]) -> bytes:
        """The first line that is not empty, and what came together with it. Raises ApiError
        where it does not come in time, ClientGone, and what the source raises."""
        deadline = asyncio.get_running_loop().time() + self._wait_seconds
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
            if held.find(b"\n", start) >= 0:
                break
        return bytes(held)

    async def read_more(self) -> bytes:
        """The next bytes, and b"" behind the last of them. Raises ApiError where none come in time,
        and ClientGone."""
        if self._is_over:
            return b""
        try:
            async with asyncio.timeout(self._wait_seconds):
                chunk = await self._source.read_lines()
        except TimeoutError:
            raise self._overdue() from None
        if chunk:
            self.was_read = True
        else:
            self._set_over()
        return chunk

    def stop_reading(self) -> None:
        """The node answers, so `receive_end` may read the rest and drop it."""
        self._stopped.set()

    async def receive_end(self) -> Message:
        """Says http.disconnect when the client leaves behind its last part. Before that
        `read_more` notices."""
        await self._stopped.wait()
        return await self._source.receive_end()

    def _set_over(self) -> None:
        self._is_over = True
        self._stopped.set()

    def _overdue(self) -> ApiError:
        message = (
            f"no part of the prompt came for {self._wait_seconds:g} s; send the whole prompt to "
            "/v1/completions"
        )
        return ApiError(message, status=408, code="body_timeout")


class HttpParts:
    """The body of a POST, whose lines are the parts. It ends with the line that says `is_last`."""

    def __init__(self, receive: Receive, max_line_bytes: int) -> None:
        self._receive = receive
        self._max_line_bytes = max_line_bytes
        self._line: list[bytes] = []  # pieces of a line whose end has not come
        self._num_bytes = 0  # of it
        self._is_whole = False

    async def read_lines(self) -> bytes:
        """The next bytes of the body, and b"" behind the last of them. Raises ApiError for a line
        that is too long, and ClientGone."""
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
        """Note the end of the prompt, where a line says so."""
        *ends, rest = data.split(b"\n")
        for end in ends:
            self._add_piece(end)
            self._is_whole |= _says_last(b"".join(self._line))
            self._line, self._num_bytes = [], 0
        self._add_piece(rest)

    def _add_piece(self, piece: bytes) -> None:
        self._line.append(piece)
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_line_bytes:
            message = f"a line is over the limit of {self._max_line_bytes} bytes; send less"
            raise ApiError(message, status=413, code="body_too_large")

    async def receive_end(self) -> Message:
        """The next message; more of the body, if the node answers before its end, is dropped."""
        return await self._receive()


class SocketParts:
    """The messages of a websocket, each of which is a part."""

    def __init__(self, receive: Receive, max_message_bytes: int) -> None:
        self._receive = receive
        self._max_message_bytes = max_message_bytes
        self._is_whole = False

    async def read_lines(self) -> bytes:
        """The next message as a line, and b"" behind the last one. Raises ApiError for one that
        cannot be, and ClientGone."""
        if self._is_whole:
            return b""
        data = text_of_message(await self._receive())
        if len(data) > self._max_message_bytes:
            message = f"a message is over the limit of {self._max_message_bytes} bytes; send less"
            raise ApiError(message, status=413, code="body_too_large")
        if not data.strip():
            raise ApiError("a message is empty; send a JSON object", code="invalid_json")
        self._is_whole = _says_last(data)
        # Strings hold no raw line ends in JSON, so those that there are mean nothing.
        return data.replace(b"\n", b" ") + b"\n"

    async def receive_end(self) -> Message:
        """The next message. Raises ApiError for one behind the last part. If the node answers
        before that part, with an error, messages on their way are dropped."""
        if self._is_whole:
            return await only_disconnect(self._receive)()
        message = await self._receive()
        is_end = message["type"] == "websocket.disconnect"
        return {"type": "http.disconnect"} if is_end else message


def _says_last(line: bytes) -> bool:
    """Whether a part says that it is the last; one that is no JSON does not, and its node says what
    is wrong with it."""
    if b"is_last" not in line:
        return False
    return bytes(legs.read_fields(line).get("is_last", b"")).strip() == b"true"
