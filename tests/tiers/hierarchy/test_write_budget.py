# SPDX-License-Identifier: Apache-2.0
"""The daily bound: bursts pass, a day does not see more, and refused blocks cost nothing."""

from __future__ import annotations

import random

import pytest

from stratakv.tiers.admission import AdmissionFilter, AdmitAll
from stratakv.tiers.admission.filters import BURST_SECONDS, SECONDS_PER_DAY, WhileUsed, WriteBudget
from stratakv.tiers.errors import TierConfigError

from ..blocks import make_keys


class Every(AdmissionFilter):
    """Admits every second block."""

    def admit(self, keys: list[bytes], now: float) -> list[bool]:
        return [index % 2 == 0 for index in range(len(keys))]


def test_an_hours_worth_passes_at_once_and_then_as_much_as_time_brings() -> None:
    budget = WriteBudget(AdmitAll(), 2400.0)  # 100 an hour
    keys = make_keys(150)
    assert budget.admit(keys, 0.0).count(True) == 100
    assert budget.admit(keys, 0.0).count(True) == 0
    assert budget.admit(keys, BURST_SECONDS / 2).count(True) == 50
    assert budget.admit(keys, 100 * BURST_SECONDS).count(True) == 100, "a bucket holds no more"
    assert budget.admit(keys, 99 * BURST_SECONDS).count(True) == 0, "time never runs backwards"


def test_what_the_filter_refuses_takes_nothing_from_the_budget() -> None:
    budget = WriteBudget(Every(), 2400.0)
    assert budget.admit(make_keys(120), 0.0).count(True) == 60
    assert budget.admit(make_keys(120), 0.0).count(True) == 40


def test_the_filter_hears_what_was_promoted() -> None:
    inner = WhileUsed(100)
    budget = WriteBudget(inner, 1e6)
    budget.admit(make_keys(100), 0.0)
    assert inner.is_sampling
    budget.promoted(2)
    assert not inner.is_sampling


def test_no_day_sees_more_than_the_bound_and_one_bucket(rng: random.Random) -> None:
    budget, now, written = WriteBudget(AdmitAll(), 500.0), 0.0, 0
    while now < SECONDS_PER_DAY:
        written += budget.admit(make_keys(rng.randrange(40)), now).count(True)
        now += rng.expovariate(1 / 60)
    assert 450 <= written <= 500 + 500 * BURST_SECONDS / SECONDS_PER_DAY + 1


@pytest.mark.parametrize("blocks", [0.0, 0.5, -1.0, float("nan")])
def test_a_bound_below_one_block_is_refused(blocks: float) -> None:
    with pytest.raises(TierConfigError, match="must let one block pass"):
        WriteBudget(AdmitAll(), blocks)
