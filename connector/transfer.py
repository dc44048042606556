# SPDX-License-Identifier: Apache-2.0
"""Small parts about copies: their numbers, how pairs merge, and when jobs end."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class JobIds:
    """Numbers for copy jobs; none is given twice."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


class Remembered(OrderedDict[str, T], Generic[T]):
    """The newest `most` entries by request id; older ones are forgotten."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def put(self, request_id: str, value: T) -> None:
        """Remember, as the newest."""
        self[request_id] = value
        self.move_to_end(request_id)
        if len(self) > self._most:
            self.popitem(last=False)


log = logging.getLogger(__name__)


class Run(NamedTuple):
    """`length` neighbouring places whose blocks go to as many neighbouring ones: one copy."""

    source: int
    target: int
    length: int


def merge_runs(sources: Sequence[int], targets: Sequence[int]) -> list[Run]:
    """The pairs, blocks to slots or slots to blocks, as few copies: neighbours on both sides
    become one run."""
    if not sources:
        return []
    # Plain Python: for the tens of pairs of a job it takes half the time of arrays.
    runs = []
    source, target, length = sources[0], targets[0], 0
    for next_source, next_target in zip(sources, targets, strict=True):
        if next_source == source + length and next_target == target + length:
            length += 1
        else:
            runs.append(Run(source, target, length))
            source, target, length = next_source, next_target, 1
    runs.append(Run(source, target, length))
    return runs


def whole_positions(tiers: Sequence[str], width: int, order: Sequence[str]) -> list[str]:
    """The tier of each position whose `width` blocks are all there: the one furthest down in
    `order`, which comes last."""
    if width == 1:
        return list(tiers)
    whole = range(0, len(tiers) - width + 1, width)
    return [max(tiers[start : start + width], key=order.index) for start in whole]


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
        self._ended = 0
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
        self.catch_up(num_jobs)
        self.wake()

    def catch_up(self, num_jobs: int) -> None:
        """As `note_ended`, without waking anybody."""
        if num_jobs <= self._ended:
            return  # as mostly, since it was noted before
        with self._changed:
            self._ended = max(self._ended, num_jobs)
            self._changed.notify_all()

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
