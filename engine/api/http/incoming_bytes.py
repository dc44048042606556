# SPDX-License-Identifier: Apache-2.0
"""IncomingBytes: the bytes of a websocket's messages that wait in the server, as they come.

    a message that is not whole     its fragments, and the bytes of the next one
    messages that are whole         until the application takes them

An application finds it in its scope, and may bound it: ASGI itself tells of whole messages alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

INCOMING = "stratakv.incoming"  # among the extensions of a websocket's scope


@dataclass(slots=True, eq=False)
class IncomingBytes:
    """Counts the bytes of one websocket. `may_hold` is told of every change, and says whether that
    many may be held from now on."""

    clock: Callable[[], float]
    may_hold: Callable[[int], bool] = lambda num_bytes: True
    began_at: float | None = None  # when a message that is not whole did; None: there is none
    _in_frames: int = 0
    _waiting: int = 0

    def add_frame(self, num_bytes: int) -> None:
        """Count a frame that has come whole, and belongs to the message that is on its way."""
        self._in_frames += num_bytes

    def end_message(self, *, is_kept: bool) -> None:
        """The message is whole, and waits for the application if it `is_kept`."""
        if is_kept:
            self._waiting += self._in_frames
        self._in_frames, self.began_at = 0, None

    def take_messages(self) -> None:
        """Count no more what was whole: the application has taken all messages that are."""
        self._waiting = 0
        self.may_hold(self._in_frames)  # which are fewer, so they fit

    def measure(self, num_unread: int) -> bool:
        """Whether all that waits may be held, of which so many bytes are of a frame that is not
        whole."""
        num_begun = self._in_frames + num_unread
        if not num_begun:
            self.began_at = None
        elif self.began_at is None:
            self.began_at = self.clock()
        return self.may_hold(num_begun + self._waiting)

    def drop_all(self) -> None:
        """The connection is at its end, and nothing is held for it."""
        self._in_frames = self._waiting = 0
        self.may_hold(0)
