# SPDX-License-Identifier: Apache-2.0
"""The mailbox: passes I/O completions and timer events to the thread that owns the hierarchy."""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable


class Mailbox:
    """A queue of completion callbacks, a timer, and a version number that counts changes. Any
    thread may call `deliver`; only the owner's thread may call the other methods. `wakeup` is
    called, on any thread, when the owner has work."""

    def __init__(self, wakeup: Callable[[], None]) -> None:
        self._wakeup = wakeup
        self._queue: deque[Callable[[], None]] = deque()
        self._delivered = threading.Event()
        self._alarm = Alarm(self._ring)
        self.is_due = True  # whether there may be work since the owner last set it to False
        self.version = 0  # grows with each change that tickets or look-ups show

    def deliver(self, completion: Callable[[], None]) -> None:
        """Queue a callback, which the owner's thread runs in the next `run_delivered`."""
        self._queue.append(completion)
        self._delivered.set()
        self._ring()

    def wake_at(self, moment: float) -> None:
        """Set a timer: `wakeup` is called at `moment` (seconds, monotonic clock)."""
        self._alarm.at(moment)

    def run_delivered(self) -> None:
        self._delivered.clear()
        while self._queue:
            self._queue.popleft()()

    def wait(self, timeout_seconds: float) -> None:
        """Wait until a completion is delivered or `timeout_seconds` are over."""
        self._delivered.wait(timeout_seconds)

    def close(self) -> None:
        """Stop the timer for good. Completions can still be delivered and run."""
        self._alarm.close()

    def _ring(self) -> None:
        self.is_due = True
        self._wakeup()


class Alarm:
    """A timer, whose thread calls `ring` soon after each moment given to `at`."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._changed = threading.Condition()
        self._moments: list[float] = []
        self._closed = False
        self._thread: threading.Thread | None = None

    def at(self, moment: float) -> None:
        """Call `ring` at `moment` (seconds, monotonic clock). The call cannot be cancelled."""
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
        """Stop calling `ring`, and wait up to a second for the thread to end. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout=1.0)

    def _run(self) -> None:
        while self._sleep():
            self._ring()

    def _sleep(self) -> bool:
        """Sleep; return True when a given moment has passed, False when closed."""
        with self._changed:
            while not self._closed:
                now = time.monotonic()
                if self._moments and self._moments[0] <= now:
                    while self._moments and self._moments[0] <= now:
                        heapq.heappop(self._moments)
                    return True
                self._changed.wait(self._moments[0] - now if self._moments else None)
            return False
