# SPDX-License-Identifier: Apache-2.0
"""Sends and reads the messages of a websocket for one prompt: JSON as text, errors, the close."""

from __future__ import annotations

import asyncio
import logging

from starlette.types import Message, Receive, Send

from ...api_errors import ApiError, ClientGone, encode_error
from .streaming import LAST_WORDS_SECONDS, SHUTTING_DOWN

logger = logging.getLogger(__name__)

DONE = 1000  # the websocket's close code after a whole answer
_POLICY, _INTERNAL, _RESTART, _TRY_LATER = 1008, 1011, 1012, 1013
_BY_CODE = {
    "binary_message": 1003,
    "invalid_json": 1007,
    "body_too_large": 1009,
    SHUTTING_DOWN: _RESTART,
}
_MAX_REASON_BYTES = 123


async def send_message(send: Send, message: Message) -> None:
    """Send an ASGI message. Raises ClientGone if the connection is lost."""
    try:
        await send(message)
    except OSError:  # ASGI's error for a lost connection
        raise ClientGone from None


async def close_with_error(send: Send, error: ApiError) -> None:
    """Send the error object, then close the websocket, both within LAST_WORDS_SECONDS."""
    code = close_code(error)
    reason = (error.code or error.kind).encode()[:_MAX_REASON_BYTES].decode(errors="ignore")
    try:
        async with asyncio.timeout(LAST_WORDS_SECONDS):
            await send({"type": "websocket.send", "text": encode_error(error).decode()})
            await send({"type": "websocket.close", "code": code, "reason": reason})
    except TimeoutError:
        logger.info("a client did not read the error of its prompt; its connection is dropped")
    except OSError:
        logger.debug("a client left before the error of its prompt")


def close_code(error: ApiError) -> int:
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if error.status in (429, 503):
        return _TRY_LATER
    return _INTERNAL if error.status >= 500 else _POLICY


def only_disconnect(receive: Receive) -> Receive:
    """Return an ASGI `receive` for the time after a prompt's last part. If the client disconnects,
    the returned function returns `http.disconnect`; for any other message it raises ApiError."""

    async def receive_end() -> Message:
        message = await receive()
        if message["type"] == "websocket.disconnect":
            return {"type": "http.disconnect"}
        raise ApiError(
            "the prompt was whole, and a connection takes one; open another for the next prompt",
            code="prompt_ended",
        )

    return receive_end


def text_of_message(message: Message) -> bytes:
    """Return a message's text in UTF-8. Raises ClientGone at a disconnect, ApiError for bytes."""
    if message["type"] == "websocket.disconnect":
        raise ClientGone
    text = message.get("text")
    if text is None:
        raise ApiError("a binary message came; send JSON as text", code="binary_message")
    data: bytes = text.encode()
    return data
