# SPDX-License-Identifier: Apache-2.0
"""`IncomingBytes`: counts the bytes of a websocket's messages that wait in the server.

    an incomplete message     the whole fragments, and the received bytes of the next fragment
    whole messages            all bytes, until the application takes the messages

The ASGI scope has the count, because ASGI itself reports only whole messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

INCOMING = "stratakv.incoming"  # the key of `IncomingBytes` in the extensions of an ASGI scope


@dataclass(slots=True, eq=False)
class IncomingBytes:
    """The count of one websocket's waiting bytes. `may_hold` is called with each new count, and
    returns whether the server may hold that many bytes."""

    clock: Callable[[], float]
    may_hold: Callable[[int], bool] = lambda num_bytes: True
    began_at: float | None = None  # the start of the incomplete message; None: all are whole
    _in_frames: int = 0
    _waiting: int = 0

    def add_frame(self, num_bytes: int) -> None:
        """Count the bytes of a whole frame of the incomplete message."""
        self._in_frames += num_bytes

    def end_message(self, *, is_kept: bool) -> None:
        """Count the message as whole. `is_kept`: the message waits for the application."""
        if is_kept:
            self._waiting += self._in_frames
        self._in_frames, self.began_at = 0, None

    def take_messages(self) -> None:
        """Stop counting whole messages, because the application has taken all messages."""
        self._waiting = 0
        self.may_hold(self._in_frames)  # report the count; a smaller count is always allowed

    def measure(self, num_unread: int) -> bool:
        """Return whether the server may hold the counted bytes and `num_unread` bytes more."""
        num_begun = self._in_frames + num_unread
        if not num_begun:
            self.began_at = None
        elif self.began_at is None:
            self.began_at = self.clock()
        return self.may_hold(num_begun + self._waiting)

    def drop_all(self) -> None:
        """Set the count to zero at the end of the connection."""
        self._in_frames = self._waiting = 0
        self.may_hold(0)
