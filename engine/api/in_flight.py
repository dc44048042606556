# SPDX-License-Identifier: Apache-2.0
"""`InFlight`: counts the requests that the server has received and not yet answered."""

from __future__ import annotations

import asyncio
from types import TracebackType


class InFlight:
    """The count of generating requests in flight, for load balancers, and the signal that ends all
    of these requests. Use `with in_flight:` around a request, in one event loop only."""

    __slots__ = ("_ended", "count")

    def __init__(self) -> None:
        self.count = 0
        self._ended: asyncio.Future[None] | None = None

    @property
    def ended(self) -> asyncio.Future[None]:
        """A future that is done once `abort_all` has been called, so that all open answers end."""
        if self._ended is None:
            self._ended = asyncio.get_running_loop().create_future()
        return self._ended

    def abort_all(self) -> None:
        """End all open answers at once, each with an error that says why. Idempotent."""
        if not self.ended.done():
            self.ended.set_result(None)

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.count -= 1
