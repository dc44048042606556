# SPDX-License-Identifier: Apache-2.0
"""`SocketReply`: sends a node's HTTP answer as messages of a client's websocket.

    application/json   one message
    events             one message for each event; the close replaces the event [DONE]
    an error           one message, and a close with the close code of the error

A node's answer that is not JSON is replaced by an error object, because the client expects JSON."""

from __future__ import annotations

import msgspec
from starlette.types import Send

from ..api.api_errors import INVALID, ApiError, encode_error
from ..api.openai.response.socket_messages import DONE, close_code, close_with_error, send_message
from .proxy import NODE
from .relay import Reply
from .upstream import Headers, NodeLost

# Limit of a single JSON answer, which is held until its end because it becomes one message.
MAX_HELD_BYTES = 64 * 1024 * 1024
_DATA = b"data: "
_LAST_EVENT = b"[DONE]"
_MAX_REASON_BYTES = 123


class _SaidDetail(msgspec.Struct):
    """The fields of a node's error object that this module reads."""

    message: str
    type: str | None = None
    code: str | int | None = None


class _SaidError(msgspec.Struct):
    error: _SaidDetail


_error_decoder = msgspec.json.Decoder(_SaidError)


class SocketReply(Reply):
    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._held = bytearray()
        self._error: ApiError | None = None

    async def start(self, status: int, headers: Headers) -> None:
        """Record the status, which determines the websocket's close code, and send nothing."""
        self.is_started = True
        self.status = status

    async def write(self, data: bytes) -> None:
        """Send events, or collect a single JSON answer. Raises NodeLost for a too long answer."""
        if self.is_events:
            await self._send_events(data)
            return
        self._held += data
        if len(self._held) > MAX_HELD_BYTES:
            raise NodeLost(f"its answer has more than {MAX_HELD_BYTES} bytes")

    async def finish_body(self, data: bytes = b"") -> None:
        await self.write(data)
        self.is_ended = True
        if not self.is_events:
            await self._send_text(self._checked(bytes(self._held)))
        await self._close()

    async def fail(self, error: ApiError) -> None:
        """Send an error and close the websocket, even if no part of an answer was sent."""
        if not self.is_ended:
            self.is_ended = True
            await close_with_error(self._send, error)

    async def _send_events(self, events: bytes) -> None:
        for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            data = event.removeprefix(_DATA)
            if event.startswith(_DATA) and data != _LAST_EVENT:
                await self._send_text(self._checked(data))

    def _checked(self, data: bytes) -> bytes:
        """Return the client's message for a node's JSON. An error also sets the close code."""
        if self.status == 200 and not data.startswith(b'{"error"'):
            is_good = _is_json(data)
        else:
            self._error = _read_error(data, self.status)
            is_good = self._error is not None
        if is_good:
            return data
        self._error = _bad_answer(self.status)
        return encode_error(self._error)

    async def _send_text(self, data: bytes) -> None:
        await send_message(self._send, {"type": "websocket.send", "text": data.decode()})

    async def _close(self) -> None:
        code, reason = DONE, ""
        if self._error is not None:
            code, reason = close_code(self._error), self._error.code or self._error.kind
            reason = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        await send_message(self._send, {"type": "websocket.close", "code": code, "reason": reason})


def _is_json(data: bytes) -> bool:
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
        data.decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _bad_answer(status: int) -> ApiError:
    message = (
        f"the node answered with the status {status} and without an answer or error in JSON; send "
        "the request again, or look at what stands between router and node"
    )
    status = status if status in (429, 503) else 502
    return ApiError(message, status=status, kind=NODE, code="bad_answer")


def _read_error(data: bytes, status: int) -> ApiError | None:
    """Return the error object in a node's answer; None if the answer is not an error object."""
    status = status if status >= 400 else 500  # an error event in a stream has the status 200
    try:
        said = _error_decoder.decode(data).error
        data.decode()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    code = None if said.code is None else str(said.code)
    return ApiError(said.message, status=status, kind=said.type or INVALID, code=code)
