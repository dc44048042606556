# SPDX-License-Identifier: Apache-2.0
"""The cost of a cache miss: the time to compute or load the missing block."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import TierConfigError

# The levels of the cost of a miss are half-octaves.
LEVELS_PER_OCTAVE = 2


@dataclass(frozen=True, slots=True)
class MissCost:
    """The seconds that a missing block costs: to compute it, which grows with its depth in the
    chain, or to load it from the tier below, if faster. By default all costs are equal."""

    compute_seconds: float = 1.0
    compute_seconds_per_depth: float = 0.0
    load_seconds: float = math.inf

    def __post_init__(self) -> None:
        dear = self.compute_seconds > 0 and self.load_seconds > 0
        if not (dear and 0 <= self.compute_seconds_per_depth < math.inf):
            raise TierConfigError(f"a miss costs time, and no less the deeper it is: {self}")

    def level(self, depth: int) -> int:
        """Return the cost of a block with `depth` blocks before it, as a level of a log scale."""
        compute = self.compute_seconds + self.compute_seconds_per_depth * depth
        return round(LEVELS_PER_OCTAVE * math.log2(min(compute, self.load_seconds)))
