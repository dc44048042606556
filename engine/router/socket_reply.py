# SPDX-License-Identifier: Apache-2.0
"""SocketReply: a node's HTTP answer as the messages of a client's websocket.

application/json     one message
events               one message each; the connection's close takes the place of [DONE]
an error             one message, and a close with the code of the error
"""

from __future__ import annotations

import msgspec
from starlette.types import Send

from ..api.api_errors import ApiError, ErrorBody
from ..api.openai.response.socket_messages import DONE, close_code, close_with_error, send_message
from .relay import Reply
from .upstream import Headers, NodeLost

# A whole answer is one message, so it is held until its end.
MAX_HELD_BYTES = 64 * 1024 * 1024
_DATA = b"data: "
_LAST_EVENT = b"[DONE]"
_MAX_REASON_BYTES = 123

_error_decoder = msgspec.json.Decoder(ErrorBody)


class SocketReply(Reply):
    """The answer to one client over a websocket, which is open."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._held = bytearray()
        self._error: ApiError | None = None

    async def start(self, status: int, headers: Headers) -> None:
        """The head says how it ends, and nothing of it is sent."""
        self.is_started = True
        self.status = status

    async def write(self, data: bytes) -> None:
        """Send events, or hold more of a whole answer. Raises NodeLost for one that is too long."""
        if self.is_events:
            await self._send_events(data)
            return
        self._held += data
        if len(self._held) > MAX_HELD_BYTES:
            raise NodeLost(f"its answer has more than {MAX_HELD_BYTES} bytes")

    async def finish_body(self, data: bytes = b"") -> None:
        """Send the rest, and close."""
        await self.write(data)
        self.is_ended = True
        if not self.is_events:
            await self._send_text(bytes(self._held))
        await self._close()

    async def fail(self, error: ApiError) -> None:
        """Send an error and close, whether or not the answer has begun."""
        if not self.is_ended:
            self.is_ended = True
            await close_with_error(self._send, error)

    async def _send_events(self, events: bytes) -> None:
        for event in events.replace(b"\r\n", b"\n").split(b"\n\n"):
            data = event.removeprefix(_DATA)
            if event.startswith(_DATA) and data != _LAST_EVENT:
                await self._send_text(data)

    async def _send_text(self, data: bytes) -> None:
        if self.status != 200 or data.startswith(b'{"error"'):
            self._error = _read_error(data, self.status)
        text = data.decode(errors="replace")
        await send_message(self._send, {"type": "websocket.send", "text": text})

    async def _close(self) -> None:
        code, reason = DONE, ""
        if self._error is not None:
            code, reason = close_code(self._error), self._error.code or self._error.kind
            reason = reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
        await send_message(self._send, {"type": "websocket.close", "code": code, "reason": reason})


def _read_error(data: bytes, status: int) -> ApiError:
    """The error that a node has answered with, as far as it is one."""
    status = status if status >= 400 else 500  # in a stream
    try:
        said = _error_decoder.decode(data).error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ApiError("the node answered with an error", status=status)
    return ApiError(said.message, status=status, kind=said.type, code=said.code)
