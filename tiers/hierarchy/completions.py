# SPDX-License-Identifier: Apache-2.0
"""Completions: what has ended on threads of stores, taken in by the one thread that owns the slab.

Knows nothing of what a completion does.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

# Takes a completion to the thread that owns the slab; may be called from any thread.
Deliver = Callable[[Callable[[], None]], None]


class Completions:
    """`deliver` may be called from any thread, the rest by the owner. `wakeup` tells the owner."""

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._queue: deque[Callable[[], None]] = deque()
        self._delivered = threading.Event()

    def deliver(self, completion: Callable[[], None]) -> None:
        """Have the owner run this in its next `take`."""
        self._queue.append(completion)
        self._delivered.set()
        self._wakeup()

    def take(self) -> None:
        """Run what was delivered."""
        self._delivered.clear()
        while self._queue:
            self._queue.popleft()()

    def wait(self, timeout_seconds: float) -> None:
        """Until something was delivered, at most so long."""
        self._delivered.wait(timeout_seconds)
