# SPDX-License-Identifier: Apache-2.0
"""A figure and its limit, measured in turn, so that other work affects the two equally.

    warm-up      round 0      round 1      round 2      round 3
    ours limit | ours limit | limit ours | ours limit | limit ours
                      └─ limit twice ┘          └─ limit twice ┘

The figure is the median of the ratios within a round; the quartiles of the ratios show the spread.
At every second boundary of rounds the limit runs twice in a row. The ratio of two consecutive runs
of the limit would be 1 on an idle machine; the spread of this ratio shows which differences are
meaningless. If a figure has several limits, the strictest, with the lowest median ratio, is
used."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .gate import Gate
from .report import Report, median, ratios

LEAST_ROUNDS = 4


class WrongWork(RuntimeError):
    """Measured work had a wrong result, so the measured time is meaningless."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A figure to measure. `ours` and `limit` do the work of one round and return the rate, as do
    `rivals` (further limits by name) and `beside`, a rate that is only reported. The strictest
    limit is used, except for the limits in `shown`."""

    name: str
    unit: str
    limit_name: str
    ours: Callable[[], float]
    limit: Callable[[], float]
    beside: Callable[[], float] | None = None
    rivals: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # names of limits that are reported but never used


@dataclass(slots=True)
class Outcome:
    """The rates of all rounds of a comparison."""

    comparison: Comparison
    ours: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    besides: list[float] = field(default_factory=list)
    rivals: dict[str, list[float]] = field(default_factory=dict)

    @property
    def by_limit(self) -> dict[str, list[float]]:
        """The rates of each limit, one for each round, by the limit's name."""
        return {self.comparison.limit_name: self.limits, **self.rivals}

    @property
    def strictest(self) -> str:
        """The name of the limit that is used, the limit with the lowest median ratio."""
        names = [name for name in self.by_limit if name not in self.comparison.shown]
        return min(names, key=lambda name: median(self.ratios_to(name)))

    def ratios_to(self, name: str) -> list[float]:
        """Return the rates of `ours` divided by the rates of the limit `name`, round by round."""
        return ratios(self.ours, self.by_limit[name])

    @property
    def ratios(self) -> list[float]:
        """The rates of `ours` divided by the rates of the strictest limit, round by round."""
        return self.ratios_to(self.strictest)

    @property
    def ratio(self) -> float:
        """The median of the ratios within a round."""
        return median(self.ratios)

    @property
    def limit_twice(self) -> list[float]:
        """The ratios of the limit's two runs at boundaries of rounds. Numerator is in turn the
        later and the earlier run, so that a machine that slows down does not shift the median.
        """
        limits = self.by_limit[self.strictest] if self.ours and self.rivals else self.limits
        pairs = zip(limits[::2], limits[1::2], strict=False)
        return [
            later / earlier if number % 2 else earlier / later
            for number, (earlier, later) in enumerate(pairs)
        ]

    def figures(self) -> dict[str, Any]:
        """Return the JSON entries of the figure."""
        strictest = self.by_limit[self.strictest]
        figures = {
            "unit": self.comparison.unit,
            "limit": self.strictest,
            "median": median(self.ours),
            "limit_median": median(strictest),
            "rounds": self.ours,
            "limit_rounds": strictest,
        }
        if self.rivals:
            figures["by_limit"] = {
                name: {
                    "median": median(rates),
                    "ratio": median(self.ratios_to(name)),
                    "rounds": rates,
                }
                for name, rates in self.by_limit.items()
            }
        if self.besides:
            figures |= {
                "beside_rounds": self.besides,
                "beside_median": median(self.besides),
                "beside_ratio": median(ratios(self.ours, self.besides)),
            }
        return figures

    def add_to(
        self, report: Report, figure: Callable[[float], float] = float, **more: float
    ) -> None:
        """Add the figures with `more`, the ratio and the limit to the report, and spreads if the
        report has spreads. `figure` computes the reported value from the ratio of the rates."""
        name = self.comparison.name
        figures = report.figures["contests"][name] = self.figures() | more
        report.ratios[name] = figure(self.ratio)
        report.limits[f"{name}_limit"] = figures["limit_median"]
        if (spreads := report.figures.get("spreads")) is not None:
            for spread, taken in ((name, self.ratios), (f"{name}_aa", self.limit_twice)):
                spreads[spread] = quartiles([figure(ratio) for ratio in taken])


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile of the values; for a single value, the value twice."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


COMPARISON_COLUMNS = ("what", "GB/s / limit", "limit", "ratio", "quartiles", "A/A", "gate")


def comparison_row(report: Report, name: str, gate: Gate | None) -> list[str]:
    """Return the cells of a table row for one ratio, in the order of COMPARISON_COLUMNS."""
    ratio, rates = report.ratios[name], ["", ""]
    comparison = report.figures["contests"].get(name)
    if comparison is not None:
        ours, limit = comparison["median"] / 1e9, comparison["limit_median"] / 1e9
        rates = [f"{ours:.2f} / {limit:.2f}", comparison["limit"]]
    value = f"{ratio:.2f}" if ratio < 1000 else f"{ratio:,.0f}"
    spreads = [_spread(report.figures["spreads"].get(each)) for each in (name, f"{name}_aa")]
    verdict = "" if gate is None else f"{gate.wanted} {gate.verdict(ratio)}"
    return [name, *rates, value, *spreads, verdict]


def _spread(quarters: Sequence[float] | None) -> str:
    if quarters is None:
        return ""
    low, high = quarters
    return f"{low:.2f}..{high:.2f}" if high < 1000 else f"{low / 1e3:.0f}k..{high / 1e3:.0f}k"


def take_rounds(comparison: Comparison, rounds: int, seconds: float = math.inf) -> Outcome:
    """Run all sides in each round, in alternating order, after one uncounted run of `ours` and
    `limit` that warms up threads, files and processors. After `seconds`, no round begins if
    LEAST_ROUNDS rounds are measured."""
    over = time.monotonic() + seconds
    outcome = Outcome(comparison, rivals={name: [] for name in comparison.rivals})
    comparison.ours()
    comparison.limit()
    for number in range(rounds):
        if number >= LEAST_ROUNDS and number % 2 == 0 and time.monotonic() >= over:
            break
        turns = [(comparison.ours, outcome.ours), (comparison.limit, outcome.limits)]
        turns += [(take, outcome.rivals[name]) for name, take in comparison.rivals.items()]
        if comparison.beside is not None:
            turns.insert(0, (comparison.beside, outcome.besides))
        for take, rates in reversed(turns) if number % 2 else turns:
            rates.append(take())
    return outcome
