# SPDX-License-Identifier: Apache-2.0
"""What the two sides of the connector share about copies: how pairs merge, and when jobs end.

Knows nothing of keys, tiers or devices.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

log = logging.getLogger(__name__)


class Run(NamedTuple):
    """`length` neighbouring blocks that go to as many neighbouring slots: one copy."""

    block_id: int
    slot: int
    length: int


def merge_runs(block_ids: Sequence[int], slots: Sequence[int]) -> list[Run]:
    """The pairs as few copies: neighbours on both sides become one run."""
    if not block_ids:
        return []
    pairs = np.array((block_ids, slots), dtype=np.int64)
    breaks = np.flatnonzero((np.diff(pairs) != 1).any(axis=0)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*starts[1:], len(block_ids)]
    return [
        Run(block_ids[start], slots[start], end - start)
        for start, end in zip(starts, ends, strict=True)
    ]


def _nothing() -> None:
    pass


class CopySignal:
    """Counts the jobs the worker side has ended and wakes the scheduler side.

    With it the engine can sleep while copies run, and the scheduler side knows that there is
    something to collect before the worker side is asked. Every method may be called from any
    thread; the wake-up itself must return at once.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._given = 0
        self._ended = 0
        self._wakeup: Callable[[], None] = _nothing

    def set_wakeup(self, wakeup: Callable[[], None] | None) -> None:
        """What to call from now on; None: nothing."""
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

    def job_ended(self) -> None:
        """The worker side has ended a job, well or not: it will be in the next poll."""
        with self._changed:
            self._ended += 1
            self._changed.notify_all()
        self.wake()

    @property
    def ended(self) -> int:
        """Jobs ended since start."""
        return self._ended

    def wait_idle(self, timeout_seconds: float) -> bool:
        """Wait until every job given has ended; False if the time was too short."""
        with self._changed:
            return self._changed.wait_for(
                lambda: self._ended >= self._given, timeout=max(0.0, timeout_seconds)
            )
