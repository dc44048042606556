# SPDX-License-Identifier: Apache-2.0
"""`IncomingBytes`: counts the bytes of a websocket's messages that wait in the server.

    a message that is not whole     its fragments, and the bytes of the next one
    messages that are whole         until the application takes them

The application's ASGI scope has the count, for a limit. ASGI reports only whole messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

INCOMING = "stratakv.incoming"  # among the extensions of a websocket's scope


@dataclass(slots=True, eq=False)
class IncomingBytes:
    """The count of one websocket's bytes. `may_hold` is called with the new count, and returns
    whether the server may hold that many bytes."""

    clock: Callable[[], float]
    may_hold: Callable[[int], bool] = lambda num_bytes: True
    began_at: float | None = None  # when the unfinished message began; None: there is none
    _in_frames: int = 0
    _waiting: int = 0

    def add_frame(self, num_bytes: int) -> None:
        """Count a whole frame of the message that is still unfinished."""
        self._in_frames += num_bytes

    def end_message(self, *, is_kept: bool) -> None:
        """Count the message as whole. A message that `is_kept` waits for the application."""
        if is_kept:
            self._waiting += self._in_frames
        self._in_frames, self.began_at = 0, None

    def take_messages(self) -> None:
        """Stop counting whole messages, because the application has taken all of them."""
        self._waiting = 0
        self.may_hold(self._in_frames)  # fewer than before, so the result does not matter

    def measure(self, num_unread: int) -> bool:
        """Whether the server may hold all waiting bytes and `num_unread` of an unfinished frame."""
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
