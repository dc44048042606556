# SPDX-License-Identifier: Apache-2.0
"""A figure and its limit, taken in turn: what else the machine does in a round meets both alike.

    warm-up      round 0      round 1      round 2      round 3
    ours limit | ours limit | limit ours | ours limit | limit ours
                      └─ limit twice ┘          └─ limit twice ┘

The figure is the median of the ratios within a round; their quartiles tell how far they spread.
Where two rounds meet the limit runs twice in a row: the spread of those ratios, which would be 1 if
the machine were still, is the floor below which no difference means anything. Where a figure has
several limits, the strictest decides: the one whose median ratio is least.
"""

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
    """A piece of work did not do what its figure would claim."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`ours` and `limit` do one round's work and give its rate; so do `rivals`, further limits by
    name, and `beside`, which decides nothing. The strictest limit decides; none of `shown` can be
    it."""

    name: str
    unit: str
    limit_name: str
    ours: Callable[[], float]
    limit: Callable[[], float]
    beside: Callable[[], float] | None = None
    rivals: Mapping[str, Callable[[], float]] = field(default_factory=dict)
    shown: tuple[str, ...] = ()  # limits of something else, in the same table


@dataclass(slots=True)
class Outcome:
    """The rates of all rounds."""

    comparison: Comparison
    ours: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)
    besides: list[float] = field(default_factory=list)
    rivals: dict[str, list[float]] = field(default_factory=dict)

    @property
    def by_limit(self) -> dict[str, list[float]]:
        """Rates of each limit by its name, one for every round."""
        return {self.comparison.limit_name: self.limits, **self.rivals}

    @property
    def strictest(self) -> str:
        """The name of the limit that decides: its median ratio is least."""
        names = [name for name in self.by_limit if name not in self.comparison.shown]
        return min(names, key=lambda name: median(self.ratios_to(name)))

    def ratios_to(self, name: str) -> list[float]:
        """Our rates over those of the limit `name`, round by round."""
        return ratios(self.ours, self.by_limit[name])

    @property
    def ratios(self) -> list[float]:
        """Ours over the strictest limit, round by round."""
        return self.ratios_to(self.strictest)

    @property
    def ratio(self) -> float:
        """The median of the ratios within a round."""
        return median(self.ratios)

    @property
    def limit_twice(self) -> list[float]:
        """Neighbouring runs of the limit, one over the other; the earlier and the later one are
        above in turn, so that a machine that slows down shifts no median."""
        limits = self.by_limit[self.strictest] if self.ours and self.rivals else self.limits
        pairs = zip(limits[::2], limits[1::2], strict=False)
        return [
            later / earlier if number % 2 else earlier / later
            for number, (earlier, later) in enumerate(pairs)
        ]

    def figures(self) -> dict[str, Any]:
        """Entries of this figure in the JSON."""
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
        """Figures with `more`, ratio, limit; spreads where the report has them. `figure` makes what
        is promised from the ratio of the rates, where that is another."""
        name = self.comparison.name
        figures = report.figures["contests"][name] = self.figures() | more
        report.ratios[name] = figure(self.ratio)
        report.limits[f"{name}_limit"] = figures["limit_median"]
        if (spreads := report.figures.get("spreads")) is not None:
            for spread, taken in ((name, self.ratios), (f"{name}_aa", self.limit_twice)):
                spreads[spread] = quartiles([figure(ratio) for ratio in taken])


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """A quarter of the values is below the first, a quarter above the second; of a single value,
    which has no spread, itself."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


COMPARISON_COLUMNS = ("what", "GB/s / limit", "limit", "ratio", "quartiles", "A/A", "gate")


def comparison_row(report: Report, name: str, gate: Gate | None) -> list[str]:
    """A row of COMPARISON_COLUMNS for one ratio."""
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
    """Run both sides in each round; the first one changes from round to round. Both run once
    before, uncounted: threads, files and processors are warm then. After `seconds` LEAST_ROUNDS are
    enough."""
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
