# SPDX-License-Identifier: Apache-2.0
"""CopySignal: wakes the core when copies of the worker end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


def _nothing() -> None:
    pass


class CopySignal:
    """What the scheduler side knows of the jobs that it has given to the worker side.

    With it the engine can sleep while copies run, and the scheduler side knows that there is
    something to collect before the worker side is asked. It belongs to the scheduler side; the
    worker side is given `note_ended`, or a callable that has it called in another process. Every
    method may be called from any thread; the wake-up itself must return at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given = 0
        self.ended = 0  # jobs, since the start; not to be changed
        self._wakeup: Callable[[], None] = _nothing

    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        """Set the function to call from now on; None: nothing."""
        self._wakeup = wakeup or _nothing

    def wake(self) -> None:
        """Something outside the step loop has happened."""
        try:
            self._wakeup()
        except Exception:
            # It runs on threads of streams and disks, which must survive a caller's mistake.
            log.exception("the wake-up of the engine failed")

    def jobs_given(self, count: int) -> None:
        """The scheduler side has handed out jobs."""
        with self._changed:
            self._given += count

    def note_ended(self, num_jobs: int) -> None:
        """The worker side has ended so many jobs since its start, well or not: they will be in the
        next poll. Of several such calls the last or the highest is enough."""
        if num_jobs > self.ended:
            self.catch_up(num_jobs)
        self.wake()

    def catch_up(self, num_jobs: int) -> None:
        """Take the number in without a wake-up."""
        with self._changed:
            self.ended = max(self.ended, num_jobs)
            self._changed.notify_all()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until every job given has ended; False if the time was too short."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self.ended >= self._given, timeout=max(0.0, timeout_seconds)
            )
