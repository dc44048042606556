# SPDX-License-Identifier: Apache-2.0
"""`StalledReader`: the timer that closes the connection of a client that stops reading."""

from __future__ import annotations

import asyncio
import logging

logger = logging.getLogger(__name__)


class StalledReader:
    """Watches one transport while its write buffer has bytes. The application adds no bytes during
    the watch, so a shrinking buffer means that the client reads."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport) -> None:
        self._loop = loop
        self._transport = transport
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_waiting(self) -> int:
        """The number of bytes in the transport's write buffer."""
        try:
            return self._transport.get_write_buffer_size()
        except AttributeError:  # asyncio raises this for a TLS connection that was closed twice
            return 0

    def start_watching(self, seconds: float) -> None:
        """Abort the transport if the client reads nothing for `seconds`. Idempotent."""
        if self._timer is None:
            self._timer = self._loop.call_later(seconds, self._check, self.num_waiting, seconds)

    def stop_watching(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, waited: int, seconds: float) -> None:
        self._timer = None
        if 0 < waited <= self.num_waiting:
            logger.info("a client read nothing for %g seconds and is cut off", seconds)
            self._transport.abort()
        elif waited > 0:
            self.start_watching(seconds)
