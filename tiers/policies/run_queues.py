# SPDX-License-Identifier: Apache-2.0
"""Runs in the order in which they should go: a queue for each class and age, ranked by the model.

Runs of one class and one bin of ages are worth the same, and the oldest goes first. A run moves on
to the next queue when its age leaves the bin, which happens a few dozen times in its life at most,
so that nothing is done for each block or at each moment.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..errors import TierConfigError
from .reuse_model import NUM_BINS, UPPER, Class, ReuseModel, bin_of
from .runs import Run

# Runs are looked at for their age so often at most.
ADVANCE_SECONDS = 0.25
# Steps in which the cost of a miss is told apart: half-octaves.
LEVELS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class MissCost:
    """Seconds that a missing block costs: to compute it, which takes longer the more blocks come
    before it, or to load it from the tier below where that is faster. All blocks cost the same by
    default."""

    compute_seconds: float = 1.0
    compute_seconds_per_depth: float = 0.0
    load_seconds: float = math.inf

    def __post_init__(self) -> None:
        dear = self.compute_seconds > 0 and self.load_seconds > 0
        if not (dear and 0 <= self.compute_seconds_per_depth < math.inf):
            raise TierConfigError(f"a miss costs time, and no less the deeper it is: {self}")

    def level(self, depth: int) -> int:
        """The cost of a block with so many before it, as a step on a logarithmic scale."""
        compute = self.compute_seconds + self.compute_seconds_per_depth * depth
        return round(LEVELS_PER_OCTAVE * math.log2(min(compute, self.load_seconds)))


ALL_THE_SAME = MissCost()


class _Queue:
    """Runs that are worth the same, the oldest first."""

    __slots__ = ("at", "level", "name", "runs", "value")

    def __init__(self, name: Class, level: int, at: int) -> None:
        self.name = name
        self.level = level
        self.at = at  # the bin of ages
        self.value = 0.0
        self.runs: OrderedDict[Run, None] = OrderedDict()


def _rank(queue: _Queue) -> tuple[float, int]:
    """Where values are equal, the older ages go first."""
    return queue.value, -queue.at


class RunQueues:
    """The runs of which the owner holds something."""

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._queues: dict[tuple[Class, int, int], _Queue] = {}
        self._ranked: list[_Queue] = []  # the least valuable first
        self._advanced = -math.inf

    def link(self, run: Run, now: float) -> None:
        """Take in a run, unless nothing of it is held or it is there already."""
        if not run.blocks or run.queue is not None:
            return
        place = (run.name, run.level, bin_of(now - run.time))
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _Queue(*place)
            queue.value = self._value(*place)
            bisect.insort(self._ranked, queue, key=_rank)
        run.queue = queue.runs
        run.queue[run] = None

    def unlink(self, run: Run) -> None:
        """Take out a run, where it is there."""
        if run.queue is not None:
            del run.queue[run]
            run.queue = None

    def reorder(self) -> None:
        """The model has changed."""
        self._queues = {place: queue for place, queue in self._queues.items() if queue.runs}
        for place, queue in self._queues.items():
            queue.value = self._value(*place)
        self._ranked = sorted(self._queues.values(), key=_rank)

    def value(self, run: Run, now: float) -> float:
        """What each second of keeping a run is expected to save."""
        return self._value(run.name, run.level, bin_of(now - run.time))

    def by_value(self, now: float) -> Iterator[tuple[float, Iterable[Run]]]:
        """The least valuable first, with what they are worth."""
        self._advance(now)
        for queue in self._ranked:
            if queue.runs:
                yield queue.value, queue.runs

    def by_age(self, now: float) -> Iterator[tuple[float, Iterable[Run]]]:
        """The longest unused first; what they are worth is not asked."""
        self._advance(now)
        by_bin: dict[int, list[Iterable[Run]]] = {}
        for queue in self._queues.values():
            by_bin.setdefault(queue.at, []).append(queue.runs)
        for at in sorted(by_bin, reverse=True):
            yield 0.0, heapq.merge(*by_bin[at], key=lambda run: run.time)

    def _value(self, name: Class, level: int, at: int) -> float:
        return float(self._model.index(name, at) * 2.0 ** (level / LEVELS_PER_OCTAVE))

    def _advance(self, now: float) -> None:
        """Move runs on; the oldest ages first, so that each queue stays ordered by time."""
        if now < self._advanced + ADVANCE_SECONDS:
            return
        self._advanced = now
        filled = [queue for queue in self._queues.values() if queue.runs]
        for queue in sorted(filled, key=lambda queue: -queue.at):
            while queue.runs and queue.at + 1 < NUM_BINS:
                run = next(iter(queue.runs))
                if now - run.time < UPPER[queue.at]:
                    break
                self.unlink(run)
                self.link(run, now)
