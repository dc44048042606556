# SPDX-License-Identifier: Apache-2.0
"""The alarm: one thread that calls back when a deadline passes that nothing else would announce.

The thread is started by the first deadline and sleeps until the next one.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable


class Alarm:
    """Calls `ring` from its own thread soon after each moment given to `at`."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._moments: list[float] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def at(self, moment: float) -> None:
        """Ring at `moment` (seconds, monotonic clock). Moments cannot be taken back."""
        with self._changed:
            if self._closed:
                return
            heapq.heappush(self._moments, moment)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="stratakv-alarm", daemon=True
                )
                self._thread.start()
            elif self._moments[0] == moment:
                self._changed.notify()

    def close(self) -> None:
        """Stop ringing and wait for the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while self._sleep():
            self._ring()

    def _sleep(self) -> bool:
        """Return True when a moment has passed, False when closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._moments and self._moments[0] <= now:
                    while self._moments and self._moments[0] <= now:
                        heapq.heappop(self._moments)
                    return True
                self._changed.wait(self._moments[0] - now if self._moments else None)
            return False
