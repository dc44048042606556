# SPDX-License-Identifier: Apache-2.0
"""A figure and its limit, taken in turn: what else the machine does in a round meets both alike.

Knows nothing of what is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..report import median


class WrongWork(RuntimeError):
    """Something did not do what its figure would claim."""


@dataclass(frozen=True, slots=True)
class Contest:
    """`ours` and `limit` do one round's work and give its rate."""

    name: str
    unit: str
    limit_name: str
    ours: Callable[[], float]
    limit: Callable[[], float]


@dataclass(slots=True)
class Outcome:
    """The rates of all rounds."""

    contest: Contest
    ours: list[float] = field(default_factory=list)
    limits: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of the ratios within a round."""
        return median([one / other for one, other in zip(self.ours, self.limits, strict=True)])

    def figures(self) -> dict[str, Any]:
        """What the JSON holds of it."""
        return {
            "unit": self.contest.unit,
            "limit": self.contest.limit_name,
            "median": median(self.ours),
            "limit_median": median(self.limits),
            "rounds": self.ours,
            "limit_rounds": self.limits,
        }


def take_rounds(contest: Contest, rounds: int) -> Outcome:
    """Both in each round; who comes first changes from round to round."""
    outcome = Outcome(contest)
    for number in range(rounds):
        if number % 2:
            outcome.limits.append(contest.limit())
        outcome.ours.append(contest.ours())
        if not number % 2:
            outcome.limits.append(contest.limit())
    return outcome
