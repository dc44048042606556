# SPDX-License-Identifier: Apache-2.0
"""The model of reuse: it finds the rates that uses were drawn from, and the best time to wait."""

from __future__ import annotations

import math
import random

import pytest

from stratakv.tiers.policies.reuse_model import (
    LOWER,
    NUM_BINS,
    UPPER,
    WIDTH,
    ReuseModel,
    _best_ratios,
    bin_of,
)


def test_bins_are_found_by_age() -> None:
    assert bin_of(0.0) == bin_of(0.49) == 0
    for at in range(1, NUM_BINS):
        assert bin_of((LOWER[at] + UPPER[at]) / 2) == at
    assert bin_of(1e9) == NUM_BINS - 1


def test_it_finds_the_rate_of_random_uses(rng: random.Random) -> None:
    model = ReuseModel()
    for _ in range(5000):
        model.used((1,), rng.expovariate(0.02), 1.0)
    model.refresh([])
    for age in (1.0, 20.0, 60.0):
        expected = 1 - math.exp(-0.02 * 40)
        assert model.chance((1,), age, age + 40) == pytest.approx(expected, rel=0.1)


def test_what_waits_in_vain_counts(rng: random.Random) -> None:
    """One in four is used; the others are given up or wait still."""
    model = ReuseModel()
    for i in range(4000):
        if i % 4 == 0:
            model.used((1,), rng.expovariate(0.1), 1.0)
        elif i % 4 == 1:
            model.given_up((1,), 500.0, 1.0)
    model.refresh([((1,), 500.0, 1.0)] * 2000)
    assert model.chance((1,), 0.0, 400.0) == pytest.approx(0.25, abs=0.03)
    assert model.chance((1,), 100.0, 400.0) < 0.06, "what has waited so long is lost"
    assert model.index((1,), 0) > 5 * model.index((1,), bin_of(100.0))


def test_a_class_with_few_uses_is_like_its_parent() -> None:
    model = ReuseModel()
    for i in range(3000):
        model.used((1, 0), 5.0 + i % 10, 1.0)
        model.given_up((1, 1), 60.0, 1.0)
    model.used((1, 2), 10.0, 1.0)
    model.refresh([])
    used, never, rare = (model.chance((1, i), 0.0, 60.0) for i in range(3))
    assert never < 0.02 < 0.3 < rare < used
    assert model.chance((1, 9), 0.0, 60.0) == pytest.approx(model.chance((1,), 0.0, 60.0), rel=0.3)


def test_it_knows_nothing_at_first_and_forgets_slowly() -> None:
    model = ReuseModel()
    assert 0 < model.chance((1,), 0.0, 10.0) < 1
    for _ in range(200):
        model.used((1,), 10.0, 1000.0)
        model.refresh([])
    for _ in range(200):
        model.given_up((1,), 100.0, 1000.0)
        model.refresh([])
    assert model.chance((1,), 0.0, 50.0) < 0.3


def test_the_index_is_the_best_of_all_times_to_wait(rng: random.Random) -> None:
    for _ in range(50):
        rates = [10 ** rng.uniform(-5, 0.5) for _ in range(NUM_BINS)]
        for start, index in enumerate(_best_ratios(rates)):
            none, uses, seconds, best = 1.0, 0.0, 0.0, 0.0
            for at in range(start, NUM_BINS):
                used = -math.expm1(-rates[at] * WIDTH[at])
                uses += none * used
                seconds += none * used / rates[at]
                none *= 1 - used
                best = max(best, uses / seconds)
            assert index == pytest.approx(best, rel=1e-6)
