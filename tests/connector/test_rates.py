# SPDX-License-Identifier: Apache-2.0
"""Estimates that follow what they are told, and forget it again."""

from __future__ import annotations

import math
import random

import pytest

from stratakv.connector.costs.rates import MEMORY_STEPS, LinkRate, PrefillRate


def context(start: int, count: int) -> int:
    return sum(range(start, start + count))


def test_nothing_is_known_before_the_first_step() -> None:
    rate = PrefillRate()
    assert rate.seconds_per_token is None
    assert rate.estimate_prefill(0, 100) is None


def test_one_step_is_the_price_of_every_token() -> None:
    rate = PrefillRate()
    rate.record_prefill(100, context(0, 100), 0.2)
    assert rate.estimate_prefill(0, 50) == pytest.approx(0.1)
    assert rate.estimate_prefill(5000, 5050) == pytest.approx(0.1)


def test_tokens_far_into_a_prompt_cost_more(rng: random.Random) -> None:
    rate = PrefillRate()
    for _ in range(4 * MEMORY_STEPS):
        start, count = rng.randrange(0, 4000), rng.randrange(64, 512)
        noise = rng.uniform(0.9, 1.1)
        rate.record_prefill(
            count, context(start, count), noise * (1e-4 * count + 1e-7 * context(start, count))
        )
    for start in (0, 1000, 3500):
        truth = 1e-4 * 200 + 1e-7 * context(start, 200)
        assert rate.estimate_prefill(start, start + 200) == pytest.approx(truth, rel=0.1)


def test_no_token_is_ever_free_whatever_is_measured() -> None:
    rate = PrefillRate()
    for start, seconds in ((0, 0.0), (4000, 1.0)) * 10:
        rate.record_prefill(100, context(start, 100), seconds)
    assert rate.estimate_prefill(0, 100) > 0.0  # type: ignore[operator]
    falling = PrefillRate()
    for start, seconds in ((0, 1.0), (4000, 0.1)) * 10:
        falling.record_prefill(100, context(start, 100), seconds)
    assert falling.estimate_prefill(9000, 9100) == pytest.approx(falling.estimate_prefill(0, 100))


def test_a_link_inside_the_span_stays_as_it_is() -> None:
    link = LinkRate(1e-3, 1e9)
    link.record_transfer(10**6, 1e-3, 1.0)
    assert link.estimate_transfer(10**6) == pytest.approx(2e-3)


def test_both_parts_of_a_link_are_learned(rng: random.Random) -> None:
    link = LinkRate(2e-3, 1e9)
    for _ in range(300):
        num_bytes = rng.choice([10**4, 10**5, 10**7, 5 * 10**7])
        truth = (5e-4 + num_bytes / 2e8) * rng.uniform(0.9, 1.1)
        link.record_transfer(num_bytes, 0.95 * truth, truth)
    assert link.estimate_transfer(10**4) == pytest.approx(5.5e-4, rel=0.3)
    assert link.estimate_transfer(2 * 10**7) == pytest.approx(0.1005, rel=0.3)


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_link_100_times_slower_or_quicker_is_found_out_in_a_few_samples(factor: float) -> None:
    link = LinkRate(1e-3, 1e9)
    truth = factor * link.estimate_transfer(10**6)
    for _ in range(6):
        link.record_transfer(10**6, truth, truth)
    assert abs(math.log(link.estimate_transfer(10**6) / truth)) < math.log(2.5)


def test_one_hiccup_is_not_believed() -> None:
    link = LinkRate(1e-3, 1e9)
    before = link.estimate_transfer(10**6)
    link.record_transfer(10**6, 100 * before, 100 * before)
    assert link.estimate_transfer(10**6) < 6 * before


def test_a_lower_bound_alone_never_makes_a_link_quicker() -> None:
    link = LinkRate(1e-3, 1e9)
    link.record_transfer(10**6, 1e-4)
    assert link.estimate_transfer(10**6) == pytest.approx(2e-3)
    link.record_transfer(10**6, 1.0)
    assert link.estimate_transfer(10**6) > 2e-3


def test_a_trial_is_believed_at_once_and_its_fixed_part_is_not() -> None:
    link = LinkRate(1e-3, 1e9)
    assert not link.is_measured
    link.believe(10**8, 0.05)
    assert link.is_measured
    assert link.fixed_seconds == 1e-3
    assert link.estimate_transfer(10**8) == pytest.approx(0.051)


def test_a_first_sample_is_a_measurement_too() -> None:
    link = LinkRate(1e-3, 1e9)
    link.record_transfer(10**6, 1e-3, 1.0)
    assert link.is_measured
