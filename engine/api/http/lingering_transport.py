# SPDX-License-Identifier: Apache-2.0
"""`LingeringTransport`: closes a connection whose request was not read to its end.

The kernel resets a socket that is closed with unread bytes, and the reset can arrive before the
answer: a client that is still writing would get a broken pipe instead of the error. `close` first
sends the end of the answer, then drops incoming bytes until the client closes the connection or
LINGER_SECONDS have passed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0


class LingeringTransport:
    """An asyncio transport with a changed `close`. `is_unread` returns whether bytes of a request
    may still arrive. While the transport `lingers`, its protocol drops incoming bytes."""

    def __init__(self, transport: asyncio.Transport, is_unread: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_unread = is_unread
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Return whether the transport lingers or closes, and so sends no more bytes."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """End the answer. Close the connection at once if the request was read, else after the rest
        of the request was dropped. A second call closes at once."""
        transport = self._transport
        if self.lingers or transport.is_closing() or not self._is_unread():
            transport.close()
            return
        self.lingers = True
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.close)
