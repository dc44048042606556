# SPDX-License-Identifier: Apache-2.0
"""`PartsSocket`: a websocket at /v1/completions/parts, whose messages are the parts of one prompt.

    {"model": "m", "max_tokens": 64, "prompt": "What is said in"}     fields of /v1/completions
    {"prompt": " the following text?\\n", "is_last": true}            the prompt is whole

The answer is one message with the JSON of /v1/completions, or one message per chunk with `stream`;
the close code after an answer is 1000. An error is one message with the error object, followed by a
close with an error code. A connection serves one prompt; a client that closes early aborts it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from starlette.requests import HTTPConnection
from starlette.types import Receive, Scope, Send

from ..api_errors import ApiError, ClientGone, error_response, to_api_error
from ..front import Front
from ..http.origins import check_origin
from .completion_parts import part_overdue, part_too_large, read_parts
from .response.socket_messages import (
    DONE,
    close_with_error,
    only_disconnect,
    send_message,
    text_of_message,
)
from .response.streaming import before

logger = logging.getLogger(__name__)


class PartsSocket:
    """The ASGI application that serves websockets at /v1/completions/parts."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            check_origin(scope, self._front.settings.cross_origin)
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        with self._front.in_flight:
            try:
                await receive()  # the event websocket.connect
                await send_message(send, {"type": "websocket.accept"})
                await self._answer(scope, receive, send)
            except ClientGone:
                logger.debug("a client left before its answer was whole")
            except Exception as error:  # noqa: BLE001 - every error becomes an HTTP answer
                await close_with_error(send, to_api_error(error))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        front = self._front

        async def write(data: bytes) -> None:
            await send_message(send, {"type": "websocket.send", "text": data.decode()})

        messages = _read_messages(front, receive)
        answer = await read_parts(front, HTTPConnection(scope), messages)
        await answer.send_messages(only_disconnect(receive), write)
        await send_message(send, {"type": "websocket.close", "code": DONE})


async def _read_messages(front: Front, receive: Receive) -> AsyncIterator[bytes]:
    """Yield the client's messages. Raises ApiError if a message is not text, too long or late, or
    if the server ends, and ClientGone if the client disconnects."""
    clock, ended = asyncio.get_running_loop().time, front.in_flight.ended
    seconds = front.settings.body_timeout_seconds  # the time limit of the first part
    while True:
        try:
            message = await before(receive(), clock() + seconds, ended)
        except TimeoutError:
            raise part_overdue(seconds) from None
        seconds = front.settings.part_timeout_seconds
        data = text_of_message(message)
        if len(data) > front.settings.max_body_bytes:
            raise part_too_large(front, "a message")
        yield data
