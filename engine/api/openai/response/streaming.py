# SPDX-License-Identifier: Apache-2.0
"""Cancels work when its client disconnects, and sends answers as a stream of server-sent events.

Each event is written when it is made, without a queue between the engine's output and the socket,
so that a slow client slows only its own request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from ...api_errors import ENGINE, ApiError, ClientGone, encode_error, error_response, to_api_error

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
SHUTTING_DOWN = "shutting_down"
# The time limit for sending the last event of a failed stream to a slow client.
LAST_WORDS_SECONDS = 2.0

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx and similar proxies would buffer, and delay tokens
]


async def until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, T], ended: asyncio.Future[None]
) -> T:
    """Return the result of `work`. If the client disconnects, cancel `work` and raise ClientGone;
    once `ended` is done, cancel `work` and raise ApiError.

    The caller must have read the request's body, so that the next ASGI event is the disconnect."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_wait_for_disconnect(receive))
    try:
        await asyncio.wait((task, watcher, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watcher.done():
            watcher.result()  # raises an error that `receive` has raised
            raise ClientGone
        raise shutting_down()
    finally:
        for each in (task, watcher):
            each.cancel()
        # Wait until the cancelled work has aborted its requests in the engine core.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def before(wanted: Awaitable[T], deadline: float | None, ended: asyncio.Future[None]) -> T:
    """Return the result of `wanted`. Raises TimeoutError at `deadline`, a time of the event loop or
    None, and an ApiError once `ended` is done; both cancel `wanted`."""
    task = asyncio.ensure_future(wanted)
    try:
        async with asyncio.timeout_at(deadline):
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise shutting_down()
    finally:
        task.cancel()


def shutting_down() -> ApiError:
    return ApiError(
        "the server is shutting down and ended this answer; ask again when it is back",
        status=503,
        kind=ENGINE,
        code=SHUTTING_DOWN,
    )


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(slots=True)
class EventStream:
    """An ASGI answer of server-sent events. `produce` gets a function that writes an event.

    The HTTP status is sent with the first event, so an earlier error has its own HTTP status. A
    later error, or the server's shutdown (`ended` is done), becomes an event with an `error`."""

    produce: Callable[[Write], Awaitable[None]]
    timeout_seconds: float
    ended: asyncio.Future[None]
    _started: bool = field(init=False, default=False)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_events(send), self.ended)
        except ClientGone:
            logger.debug("a client left in the middle of its stream")
        except Exception as error:  # noqa: BLE001 - every error becomes an HTTP answer
            await self._send_error(to_api_error(error), scope, receive, send)

    async def _send_events(self, send: Send) -> None:
        async def write(data: bytes) -> None:
            event = b"data: " + data + b"\n\n"
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await send({"type": "http.response.body", "body": event, "more_body": True})

        async with asyncio.timeout(self.timeout_seconds):
            await self.produce(write)
            await write(DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._started:
            await error_response(error)(scope, receive, send)
            return
        event = b"data: " + encode_error(error) + b"\n\n"
        try:
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await send({"type": "http.response.body", "body": event, "more_body": False})
        except TimeoutError:
            logger.info("a client did not read the end of its stream; its connection is dropped")
