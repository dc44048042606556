# SPDX-License-Identifier: Apache-2.0
"""ReuseModel: learns, for each class of blocks, a rate of reuse that depends on the blocks' age.

The age of a block is the time since its last use. For each class, ages are divided into bins that
grow with age. A bin counts the reuses at these ages, and the seconds that blocks waited at these
ages for a reuse. Blocks that are never reused add seconds too, so a class that is never used again
gets low rates. A class is a tuple, and its parent is the tuple without the last element. A class
with few uses has the rates of its parent times one factor, until its own bins have enough uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from math import expm1, log2

Class = tuple[int, ...]

FIRST_SECONDS = 0.5
BINS_PER_OCTAVE = 2
NUM_BINS = 36  # the last edge is at 26 hours
UPPER = [FIRST_SECONDS * 2 ** (i / BINS_PER_OCTAVE) for i in range(NUM_BINS)]
LOWER = [0.0, *UPPER[:-1]]
WIDTH = [high - low for low, high in zip(LOWER, UPPER, strict=True)]
DECLINE = [1.0, *(low / high for low, high in pairwise(WIDTH))]
# The weight, in uses, of the parent's rate: for a bin, and for a class as a whole.
PRIOR_USES = 10.0
# The total weight above which all weights are halved, so that old uses fade.
MEMORY_WEIGHT = 50_000.0


def bin_of(age: float) -> int:
    """Return the bin of an age in seconds; the last bin has no upper end."""
    if age < FIRST_SECONDS:
        return 0
    return min(NUM_BINS - 1, 1 + int(BINS_PER_OCTAVE * log2(age / FIRST_SECONDS)))


def _zeros() -> list[float]:
    return [0.0] * NUM_BINS


@dataclass(slots=True)
class _Tally:
    """Sums for each bin of ages: the weight of blocks reused in the bin, the weight of blocks whose
    wait ended in the bin, and the seconds (times weight) that these waits spent in the bin."""

    used: list[float] = field(default_factory=_zeros)
    ended: list[float] = field(default_factory=_zeros)
    waited: list[float] = field(default_factory=_zeros)

    def count_ended(self, age: float, weight: float) -> int:
        """Count a wait for a reuse that ended at `age`. Return the bin of `age`."""
        at = bin_of(age)
        self.ended[at] += weight
        self.waited[at] += weight * min(max(0.0, age - LOWER[at]), WIDTH[at])
        return at

    def add(self, other: _Tally) -> None:
        for mine, its in zip(self._rows(), other._rows(), strict=True):
            mine[:] = map(float.__add__, mine, its)

    def halve(self) -> None:
        for row in self._rows():
            row[:] = [0.5 * value for value in row]

    def exposure(self) -> list[float]:
        """Return the seconds (times weight) waited in each bin, also by waits that ended later."""
        seconds, beyond = _zeros(), 0.0
        for at in reversed(range(NUM_BINS)):
            seconds[at] = self.waited[at] + WIDTH[at] * beyond
            beyond += self.ended[at]
        return seconds

    def _rows(self) -> tuple[list[float], list[float], list[float]]:
        return self.used, self.ended, self.waited


class ReuseModel:
    """Rates of reuse by class and bin. `index` is the value by which classes are ranked."""

    def __init__(self) -> None:
        self._tallies: dict[Class, _Tally] = {}
        self._fitted: dict[Class, _Tally] = {}
        self._rates: dict[Class, list[float]] = {}
        self._indexes: dict[Class, list[float]] = {}
        self._weight = 0.0

    def used(self, name: Class, age: float, weight: float) -> None:
        """Count blocks of class `name`, with a total `weight`, as used again at `age`."""
        tally = self._tally(name)
        tally.used[tally.count_ended(age, weight)] += weight
        self._weight += weight

    def given_up(self, name: Class, age: float, weight: float) -> None:
        """Count blocks of class `name`, with a total `weight`, as given up unused at `age`."""
        self._tally(name).count_ended(age, weight)
        self._weight += weight

    def refresh(self, waiting: Iterable[tuple[Class, float, float]]) -> None:
        """Fit the model to all counts and to blocks that wait, as (class, age, weight)."""
        if self._weight > MEMORY_WEIGHT:
            self._weight /= 2
            for tally in self._tallies.values():
                tally.halve()
        fitted: dict[Class, _Tally] = {}
        now: dict[Class, _Tally] = {}
        for name, age, weight in waiting:
            if name not in now:
                now[name] = _Tally()
            now[name].count_ended(age, weight)
        for tallies in (self._tallies, now):
            for name, tally in tallies.items():
                for length in range(len(name) + 1):
                    fitted.setdefault(name[:length], _Tally()).add(tally)
        self._fitted = fitted
        self._rates = {}
        self._indexes = {}

    def index(self, name: Class, at: int) -> float:
        """Return the most expected uses per second of waiting, from the start of bin `at` on."""
        indexes = self._indexes.get(name)
        if indexes is None:
            indexes = self._indexes[name] = _best_ratios(self._rate(name))
        return indexes[at]

    def chance(self, name: Class, age: float, horizon: float) -> float:
        """Return the probability of a use from `age` to `horizon`, with no use before `age`."""
        hazard = 0.0
        for at, rate in enumerate(self._rate(name)):
            seconds = min(horizon, UPPER[at]) - max(age, LOWER[at])
            hazard += rate * max(0.0, seconds)
        return -expm1(-hazard)

    def _tally(self, name: Class) -> _Tally:
        tally = self._tallies.get(name)
        if tally is None:
            tally = self._tallies[name] = _Tally()
        return tally

    def _rate(self, name: Class) -> list[float]:
        """Return the rate of reuse in each bin: uses per second of waiting."""
        rates = self._rates.get(name)
        if rates is not None:
            return rates
        tally = self._fitted.get(name) or _Tally()
        seconds = tally.exposure()
        if name:
            prior = self._rate(name[:-1])
            expected = sum(map(float.__mul__, seconds, prior))
            factor = (sum(tally.used) + PRIOR_USES) / (expected + PRIOR_USES)
            prior = [factor * rate for rate in prior]
        else:
            prior = []
        rates = self._rates[name] = []
        # The prior of all classes together: a bin has as many uses as the shorter bin before it.
        rate = (sum(tally.used) + 1) / (sum(seconds) + 1)
        for at in range(NUM_BINS):
            believed = prior[at] if prior else rate * DECLINE[at]
            rate = (tally.used[at] + PRIOR_USES) / (seconds[at] + PRIOR_USES / believed)
            rates.append(rate)
        return rates


def _best_ratios(rates: list[float]) -> list[float]:
    """Return the Gittins index of each bin: the largest ratio, over all times to stop waiting, of
    the probability of a use to the seconds waited. The index is computed from the last bin
    backwards: a stretch of bins is merged with the next stretch as long as the ratio grows."""
    ratios = _zeros()
    stretches: list[tuple[float, float, float]] = []  # P(use), seconds, P(no use)
    for at in reversed(range(NUM_BINS)):
        uses = -expm1(-rates[at] * WIDTH[at])
        seconds, none = uses / rates[at], 1 - uses
        while stretches and stretches[-1][0] * seconds > uses * stretches[-1][1]:
            later_uses, later_seconds, later_none = stretches.pop()
            uses += none * later_uses
            seconds += none * later_seconds
            none *= later_none
        stretches.append((uses, seconds, none))
        ratios[at] = uses / seconds
    return ratios
