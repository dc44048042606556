# SPDX-License-Identifier: Apache-2.0
"""Queues of runs: one queue for each class, cost of a miss and bin of ages, ranked by value."""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from .miss_cost import LEVELS_PER_OCTAVE
from .reuse_model import NUM_BINS, UPPER, Class, ReuseModel, bin_of
from .runs import Run

# The shortest time between two checks of the runs' ages.
ADVANCE_SECONDS = 0.25


class RunQueues:
    """The runs with blocks that the owner holds, in queues that are ranked by value."""

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._queues: dict[tuple[Class, int, int], _Queue] = {}
        self._ranked: list[_Queue] = []  # the least valuable first
        self._advanced = -math.inf

    def link(self, run: Run, now: float) -> None:
        """Add a run to its queue, unless it is in a queue or has no block that the owner holds."""
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
        if run.queue is not None:
            del run.queue[run]
            run.queue = None

    def reorder(self) -> None:
        """Compute the values of all queues and rank the queues, after the model has changed."""
        self._queues = {place: queue for place, queue in self._queues.items() if queue.runs}
        for place, queue in self._queues.items():
            queue.value = self._value(*place)
        self._ranked = sorted(self._queues.values(), key=_rank)

    def value(self, run: Run, now: float) -> float:
        """Return the value of a run: expected seconds saved per second of keeping its blocks."""
        return self._value(run.name, run.level, bin_of(now - run.time))

    def by_value(self, now: float) -> Iterator[tuple[float, Iterable[Run]]]:
        """Yield the value and the runs of each queue, the least valuable queue first."""
        self._advance(now)
        for queue in self._ranked:
            if queue.runs:
                yield queue.value, queue.runs

    def by_age(self, now: float) -> Iterator[tuple[float, Iterable[Run]]]:
        """Yield the runs of each bin of ages, the longest unused first, with the value 0."""
        self._advance(now)
        by_bin: dict[int, list[Iterable[Run]]] = {}
        for queue in self._queues.values():
            by_bin.setdefault(queue.at, []).append(queue.runs)
        for at in sorted(by_bin, reverse=True):
            yield 0.0, heapq.merge(*by_bin[at], key=lambda run: run.time)

    def _value(self, name: Class, level: int, at: int) -> float:
        return float(self._model.index(name, at) * 2.0 ** (level / LEVELS_PER_OCTAVE))

    def _advance(self, now: float) -> None:
        """Move runs to the queues of their ages, oldest first; queues stay in time order."""
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


class _Queue:
    """Runs of equal value, the oldest first."""

    __slots__ = ("at", "level", "name", "runs", "value")

    def __init__(self, name: Class, level: int, at: int) -> None:
        self.name = name
        self.level = level
        self.at = at  # the number of the bin of ages
        self.value = 0.0
        self.runs: OrderedDict[Run, None] = OrderedDict()


def _rank(queue: _Queue) -> tuple[float, int]:
    """Return the sort key of a queue: least value first; of equal values, larger ages first."""
    return queue.value, -queue.at
