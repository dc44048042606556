# SPDX-License-Identifier: Apache-2.0
"""LingeringTransport: a connection that is closed before its request was read whole.

A socket that is closed with bytes unread is reset, and a reset can overtake the answer: its sender,
who is still writing, would hear of a broken pipe and never of the refusal. So the end of the answer
is sent first, and what still comes is dropped until the sender closes or LINGER_SECONDS are over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_SECONDS = 2.0


class LingeringTransport:
    """A transport of asyncio, but for `close`. `is_unread` says whether more of a request may
    come; once it `lingers`, its protocol drops what comes."""

    def __init__(self, transport: asyncio.Transport, is_unread: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_unread = is_unread
        self.lingers = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self.lingers or self._transport.is_closing()

    def close(self) -> None:
        """End the answer, and close at once or when the rest of the request was dropped. A second
        call closes at once."""
        transport = self._transport
        if self.lingers or transport.is_closing() or not self._is_unread():
            transport.close()
            return
        self.lingers = True
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, transport.close)
