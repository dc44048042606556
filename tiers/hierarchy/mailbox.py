# SPDX-License-Identifier: Apache-2.0
"""The mailbox: how store threads and deadlines reach the one thread that owns the hierarchy."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from ..alarm import Alarm


class Mailbox:
    """Completions, one alarm, and what has changed. `deliver` may be called from any thread, the
    rest by the owner. `wakeup` tells the owner, from any thread, that there is something to do."""

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._queue: deque[Callable[[], None]] = deque()
        self._delivered = threading.Event()
        self._alarm = Alarm(self._ring)
        self.is_due = True  # something has happened since the owner last set this to False
        self.version = 0  # the owner's parts add 1 for whatever a ticket or a look-up could show

    def deliver(self, completion: Callable[[], None]) -> None:
        """Have the owner run this in its next `take`."""
        self._queue.append(completion)
        self._delivered.set()
        self._ring()

    def wake_at(self, moment: float) -> None:
        """Wake the owner at `moment` (seconds, monotonic clock)."""
        self._alarm.at(moment)

    def take(self) -> None:
        """Run what was delivered."""
        self._delivered.clear()
        while self._queue:
            self._queue.popleft()()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until something is delivered, at most so long."""
        self._delivered.wait(timeout_seconds)

    def close(self) -> None:
        """Ring no alarm any more. Completions are still taken."""
        self._alarm.close()

    def _ring(self) -> None:
        self.is_due = True
        self._wakeup()
