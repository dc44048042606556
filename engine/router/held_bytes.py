# SPDX-License-Identifier: Apache-2.0
"""`HeldBytes` counts the bytes of request bodies that the router has in memory, for all clients.

A `Share` counts only received bytes, so a client that announces a large body but sends little does
not lower the limit for other clients. Counted bytes:

    a body                  all received bytes, until its answer has ended
    a prompt in parts       its first part until its answer has ended, and the current part's bytes
    a websocket's message   received bytes, also those of an incomplete message"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Message, Receive

from ..api.api_errors import ApiError
from .proxy import RETRY_SECONDS


@dataclass(slots=True, eq=False)
class HeldBytes:
    """The count of bytes of request bodies in memory. Its limit is `most`; a request may exceed
    `most` if no other request holds bytes. Use a `HeldBytes` in one event loop only."""

    most: int
    num_bytes: int = 0


@dataclass(slots=True, eq=False)
class Share:
    _all: HeldBytes
    num_bytes: int = 0

    def takes(self, num_bytes: int) -> bool:
        """Set the share to `num_bytes`. Above `HeldBytes.most`, change nothing and return False."""
        others = self._all.num_bytes - self.num_bytes
        if num_bytes > self.num_bytes and others and others + num_bytes > self._all.most:
            return False
        self._all.num_bytes, self.num_bytes = others + num_bytes, num_bytes
        return True

    def hold(self, num_bytes: int) -> None:
        """Set the share to `num_bytes`, as `takes` does. Raises ApiError 429 above the limit."""
        if not self.takes(num_bytes):
            raise too_many(
                "the bodies of the requests that are open here are as long together as the router "
                "takes"
            )

    def counted(self, receive: Receive, most: int) -> Receive:
        """Return an ASGI `receive` that counts a body's bytes in this share. A body of more than
        `most` bytes counts as 0, because the router drops it. The `receive` raises like `hold`."""
        num_bytes = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self.hold(num_bytes if num_bytes <= most else 0)
            return message

        return receive_counted


def too_many(message: str) -> ApiError:
    return ApiError(
        f"{message}; send this one again in a moment",
        status=429,
        kind="rate_limit_error",
        code="too_many_requests",
        retry_seconds=RETRY_SECONDS,
    )
