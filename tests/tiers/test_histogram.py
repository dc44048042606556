# SPDX-License-Identifier: Apache-2.0
"""A histogram counts each value in the bucket of the first bound that is not below it."""

from __future__ import annotations

import random
from dataclasses import asdict

from stratakv.tiers.base import Histogram


def test_values_on_between_and_beyond_the_bounds() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.0, 1.0, 1.5, 2.0, 4.0, 4.1, 100.0):
        histogram.observe_value(value)
    assert histogram.counts == [2, 2, 1, 2]
    assert histogram.total == 112.6


def test_it_travels_as_plain_values() -> None:
    histogram = Histogram((1.0,))
    histogram.observe_value(3.0)
    assert asdict(histogram) == {"bounds": (1.0,), "counts": [0, 1], "total": 3.0}


def test_against_counting_by_hand(rng: random.Random) -> None:
    bounds = tuple(sorted(rng.uniform(0, 10) for _ in range(8)))
    histogram = Histogram(bounds)
    values = [rng.choice((*bounds, rng.uniform(-1, 12))) for _ in range(500)]
    for value in values:
        histogram.observe_value(value)
    for i, bound in enumerate(bounds):
        assert sum(histogram.counts[: i + 1]) == sum(value <= bound for value in values)
    assert sum(histogram.counts) == len(values)
