# SPDX-License-Identifier: Apache-2.0
"""Two tiers: what each arrangement hits and writes, by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from stratakv.benchmarks.trace.formats import Trace
from stratakv.benchmarks.trace.replay import (
    Arrangement,
    ReplayTier,
    TwoTierOutcome,
    replay,
    replay_two_tiers,
)
from stratakv.tiers.admission import AdmissionFilter
from stratakv.tiers.policies.lru import LruPolicy

from .tiny_traces import random_trace, trace_of

IN_TURN = trace_of([0], [1], [0], [1])


class Doorkeeper(AdmissionFilter):
    """Admits what was asked for twice; notes what it was asked about."""

    def __init__(self) -> None:
        self.seen: Counter[bytes] = Counter()
        self.times: list[float] = []

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self.seen.update(chain)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        self.times += [now] * len(keys)
        return [self.seen[key] >= 2 for key in keys]


def run(
    trace: Trace,
    arrangement: Arrangement,
    upper: int,
    lower: int,
    admission: AdmissionFilter | None = None,
) -> TwoTierOutcome:
    tiers = [ReplayTier(LruPolicy(), capacity) for capacity in (upper, lower)]
    found = replay_two_tiers(trace, arrangement, tiers[0], tiers[1], admission)
    for tier in tiers:
        assert len(tier.policy) == len(tier.resident) <= tier.capacity_blocks
    return found


@pytest.mark.parametrize(
    ("arrangement", "lower_percent", "written"),
    [
        (Arrangement.WRITE_THROUGH, 50.0, 2 / 4),  # each block once, when it came
        (Arrangement.WRITE_BACK, 50.0, 2 / 4),  # each once, when it was put out first
        (Arrangement.EXCLUSIVE, 50.0, 3 / 4),  # 0 twice: it had left the lower tier
    ],
)
def test_blocks_that_take_turns(
    arrangement: Arrangement, lower_percent: float, written: float
) -> None:
    assert run(IN_TURN, arrangement, 1, 2) == TwoTierOutcome(0.0, lower_percent, written)


def test_a_filter_decides_what_is_written() -> None:
    """0 and 1 are put out unknown, then 0 once more when it was seen twice."""
    admission = Doorkeeper()
    assert run(IN_TURN, Arrangement.WRITE_BACK, 1, 2, admission) == TwoTierOutcome(0.0, 0.0, 1 / 4)
    assert admission.times == [1.0, 2.0, 3.0]


def test_a_prompt_longer_than_the_upper_tier_runs_over() -> None:
    found = run(trace_of([0, 1, 2], [0, 1, 2]), Arrangement.WRITE_BACK, 1, 2)
    assert found.upper_percent == pytest.approx(100 * 1 / 6)
    assert found.lower_percent == pytest.approx(100 * 2 / 6)
    assert found.written_per_block == pytest.approx(2 / 6)


def test_a_copy_below_was_used_until_the_upper_tier_gave_it_up() -> None:
    """When 2 goes down, the copy of 0 was given up last, and 1 goes to make room."""
    trace = trace_of([0], [1], [0], [2], [3], [0], [1])
    found = run(trace, Arrangement.WRITE_BACK, 1, 2)
    # 0 hits twice below; 1 went.
    assert found.lower_percent == pytest.approx(100 * 2 / 7)


def test_write_through_is_one_tier_of_the_lower_size(rng: random.Random) -> None:
    trace = random_trace(rng, requests=400, blocks=40)
    found = run(trace, Arrangement.WRITE_THROUGH, 4, 16)
    one = replay(trace, LruPolicy(), 16)
    assert found.hit_percent == pytest.approx(one.hit_percent)
    assert found.upper_percent == pytest.approx(replay(trace, LruPolicy(), 4).hit_percent)
    assert found.written_per_block == pytest.approx(1 - one.hit_percent / 100)


def test_write_back_writes_no_more_than_exclusive(rng: random.Random) -> None:
    trace = random_trace(rng, requests=400, blocks=40)
    back, exclusive = (
        run(trace, each, 8, 16) for each in (Arrangement.WRITE_BACK, Arrangement.EXCLUSIVE)
    )
    assert back.written_per_block < exclusive.written_per_block
    assert exclusive.hit_percent > 0
