# SPDX-License-Identifier: Apache-2.0
"""A histogram in plain numbers: what travels to whoever shows it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

# From a look-up in memory to a disk that hardly answers.
IO_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


@dataclass(slots=True)
class Histogram:
    """Observations counted by bucket: `counts[i]` of them are at most `bounds[i]` and above the
    bound before; the last count is of those above every bound. One thread at a time."""

    bounds: tuple[float, ...]  # ascending
    counts: list[int] = field(init=False)
    total: float = 0.0  # the sum of what was observed

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value
