# SPDX-License-Identifier: Apache-2.0
"""PartsSocket: a websocket at /v1/completions/parts, whose messages are the parts of one prompt.

    {"model": "m", "max_tokens": 64, "prompt": "What is said in"}     as of /v1/completions
    {"prompt": " the following text?\\n", "is_last": true}            the prompt is whole

The answer is one message with the JSON of /v1/completions, or with `stream` one for each chunk, and
a close with code 1000. An error is one message with the error object, and a close with its code. A
connection takes one prompt: closing it is how a client gives its answer up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.requests import HTTPConnection
from starlette.types import Message, Receive, Scope, Send

from ..api_errors import ApiError, ClientGone, encode_error, error_response, to_api_error
from ..front import Front
from ..http.origins import check_origin
from .completion_parts import part_overdue, part_too_large, read_parts
from .response.streaming import LAST_WORDS_SECONDS, SHUTTING_DOWN, before

logger = logging.getLogger(__name__)

DONE = 1000  # the code of a close behind a whole answer
_POLICY, _INTERNAL, _RESTART, _TRY_LATER = 1008, 1011, 1012, 1013
_BY_CODE = {
    "binary_message": 1003,
    "invalid_json": 1007,
    "body_too_large": 1009,
    SHUTTING_DOWN: _RESTART,
}
_MAX_REASON_BYTES = 123


class PartsSocket:
    """The route, an ASGI application."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read one prompt and answer it."""
        try:
            check_origin(scope, self._front.settings.cross_origin)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        with self._front.in_flight:
            try:
                await receive()  # that it connects
                await send_message(send, {"type": "websocket.accept"})
                await self._answer(scope, receive, send)
            except ClientGone:
                logger.debug("a client left before its answer was whole")
            except Exception as error:  # noqa: BLE001 - the border: every fault becomes an answer
                await close_with_error(send, to_api_error(error))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front

        async def write(data: bytes) -> None:
            await send_message(send, {"type": "websocket.send", "text": data.decode()})

        messages = _read_messages(front, receive)
        answer = await read_parts(front, HTTPConnection(scope), messages)
        await answer.send_messages(only_disconnect(receive), write)
        await send_message(send, {"type": "websocket.close", "code": DONE})


async def send_message(send: Send, message: Message) -> None:
    """Send one of ASGI's messages. Raises ClientGone where the connection is lost."""
    try:
        await send(message)
    except OSError:  # as ASGI says it
        raise ClientGone from None


async def close_with_error(send: Send, error: ApiError) -> None:
    """Send the error object, and close. A client that reads neither is left to the server."""
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
    """The code that a websocket is closed with behind this error."""
    if error.code in _BY_CODE:
        return _BY_CODE[error.code]
    if error.status in (429, 503):
        return _TRY_LATER
    return _INTERNAL if error.status >= 500 else _POLICY


def only_disconnect(receive: Receive) -> Receive:
    """`receive` for the time behind the last part: it says http.disconnect, and raises ApiError for
    anything else that comes."""

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
    """What a message says. Raises ClientGone where it is the end, and ApiError for a binary one."""
    if message["type"] == "websocket.disconnect":
        raise ClientGone
    text = message.get("text")
    if text is None:
        raise ApiError("a binary message came; send JSON as text", code="binary_message")
    data: bytes = text.encode()
    return data


async def _read_messages(front: Front, receive: Receive) -> AsyncIterator[bytes]:
    """The messages. Raises ApiError for one that is no text, is too long or does not come in time,
    or once the server ends, and ClientGone."""
    clock, ended = asyncio.get_running_loop().time, front.in_flight.ended
    while True:
        deadline = clock() + front.settings.body_timeout_seconds
        try:
            message = await before(receive(), deadline, ended)
        except TimeoutError:
            raise part_overdue(front) from None
        data = text_of_message(message)
        if len(data) > front.settings.max_body_bytes:
            raise part_too_large(front, "a message")
        yield data
