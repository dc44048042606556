# SPDX-License-Identifier: Apache-2.0
"""HeldBytes: the bytes of clients' bodies that a router holds, over all clients.

A share grows as the bytes of its request come, and never ahead of them: a client that says much and
sends little takes no room from others.

    a body                  as far as it has come, and until its answer has ended
    a prompt in parts       its first part all that time, and of another one what has come
    a websocket's message   from its first bytes on, before it is whole
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Message, Receive

from ..api.api_errors import ApiError
from .proxy import RETRY_SECONDS


@dataclass(slots=True, eq=False)
class HeldBytes:
    """Belongs to one event loop. `most` may be held; more by a client that is alone."""

    most: int
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Share:
    """The bytes that are held for one request."""

    _all: HeldBytes
    num_bytes: int = 0

    def takes(self, num_bytes: int) -> bool:
        """Hold so many bytes from now on; False, and no change, where more would be held than may
        be."""
        others = self._all.num_bytes - self.num_bytes
        if num_bytes > self.num_bytes and others and others + num_bytes > self._all.most:
            return False
        self._all.num_bytes, self.num_bytes = others + num_bytes, num_bytes
        return True

    def hold(self, num_bytes: int) -> None:
        """Hold so many bytes from now on. Raises ApiError 429 as `takes` says False."""
        if not self.takes(num_bytes):
            raise too_many(
                "the bodies of the requests that are open here are as long together as the router "
                "takes"
            )

    def counted(self, receive: Receive, most: int) -> Receive:
        """`receive` for a body of which up to `most` bytes are kept, and a longer one is dropped.
        It raises as `hold` does."""
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self.hold(num_bytes if num_bytes <= most else 0)
            return message

        return receive_counted


def too_many(message: str) -> ApiError:
    """The error for a request that there is no room for."""
    return ApiError(
        f"{message}; send this one again in a moment",
        status=429,
        kind="rate_limit_error",
        code="too_many_requests",
        retry_seconds=RETRY_SECONDS,
    )
