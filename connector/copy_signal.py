# SPDX-License-Identifier: Apache-2.0
"""CopySignal wakes the engine when copies of the worker side end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class CopySignal:
    """Counts the copy jobs that the scheduler side issued and the copy jobs that have ended.

    By the signal, the engine can sleep while copies run, and the scheduler side can check for
    results without a poll of the worker side. The scheduler side owns the signal. The worker side
    calls `note_ended`, from another process through a callable. Every method may be called from any
    thread; the wake-up function must return at once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given = 0
        self.ended = 0  # ended jobs since the start; read only
        self._wakeup: Callable[[], None] = _nothing

    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        self._wakeup = wakeup or _nothing

    def wake(self) -> None:
        """Wake the engine because of an event outside the step loop."""
        try:
            self._wakeup()
        except Exception:
            # Threads of streams and disks call `wake`, and must survive errors of the function.
            log.exception("the wake-up of the engine failed")

    def jobs_given(self, count: int) -> None:
        with self._changed:
            self._given += count

    def note_ended(self, num_jobs: int) -> None:
        """Record that the worker side has ended `num_jobs` jobs since its start, including failed
        jobs. Calls may be lost or reordered, so the highest number counts."""
        if num_jobs > self.ended:
            self.catch_up(num_jobs)
        self.wake()

    def catch_up(self, num_jobs: int) -> None:
        """Record the number of ended jobs without a wake-up."""
        with self._changed:
            self.ended = max(self.ended, num_jobs)
            self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until every job that was given out has ended; False after `timeout_seconds`."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.ended >= self._given, timeout=max(0.0, timeout_seconds)
            )
