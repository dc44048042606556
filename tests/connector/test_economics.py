# SPDX-License-Identifier: Apache-2.0
"""Load, recompute or both: what is decided, from rates that the test sets."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.connector.costs.economics import (
    GRACE_SECONDS,
    PROBE_BLOCKS,
    PROBE_EVERY,
    UNMEASURED_SECONDS,
    Choice,
    Economics,
    Plan,
)
from stratakv.connector.parts import Parts

BLOCK_TOKENS, BLOCK_BYTES = 16, 10_000
HIERARCHY: Any = SimpleNamespace(tiers=["cpu", "ssd"], block_bytes=BLOCK_BYTES)


def economics(
    *,
    prefill: float | None = 1e-4,
    cpu: tuple[float, float] = (1e-3, 1e-5),
    ssd: tuple[float, float] = (2e-3, 1e-4),
    choice: Choice = Choice.AUTO,
) -> Economics:
    """`prefill` seconds a token; of a tier, fixed seconds and seconds a block."""
    made = Economics(HIERARCHY, Parts(BLOCK_TOKENS), choice)
    for name, (fixed, block) in {"cpu": cpu, "ssd": ssd}.items():
        set_link(made, name, fixed, block)
    if prefill is not None:
        made.prefill.record_prefill(1000, 1000 * 500, 1000 * prefill)
    return made


def set_link(made: Economics, name: str, fixed: float, block: float) -> None:
    made.links[name].fixed_seconds = fixed
    made.links[name].seconds_per_byte = block / BLOCK_BYTES


def test_until_a_prompt_was_measured_everything_is_loaded() -> None:
    made = economics(prefill=None, ssd=(100.0, 1.0))
    assert made.plan_loads(0, ["ssd"] * 3, decides=True) == Plan(3)
    assert made.max_wait_seconds(0, 3) == UNMEASURED_SECONDS
    assert made.break_even_tokens("ssd") is None


def test_long_prefixes_are_loaded_and_short_ones_computed() -> None:
    made = economics()
    # Of n blocks: 1.6 ms n to compute, 1 ms + 0.01 ms n to copy.
    assert made.plan_loads(0, ["cpu"] * 100) == Plan(100)
    assert made.plan_loads(0, ["cpu"]) == Plan(1)
    assert economics(prefill=4e-5).plan_loads(0, ["cpu"]) == Plan(0)
    assert economics(prefill=4e-5).plan_loads(0, ["cpu"] * 2) == Plan(2)


def test_the_quick_part_of_a_prefix_is_loaded_without_the_slow_one() -> None:
    made = economics(ssd=(1.0, 0.01))
    assert made.plan_loads(0, ["cpu"] * 50 + ["ssd"] * 50) == Plan(50)
    assert made.plan_loads(0, ["ssd"] * 5 + ["cpu"] * 50) == Plan(0)
    assert economics().plan_loads(0, ["cpu"] * 50 + ["ssd"] * 50) == Plan(100)
    # Many changes of tier: all or nothing.
    assert made.plan_loads(0, ["cpu", "ssd"] * 20) == Plan(0)
    assert economics().plan_loads(0, ["cpu", "ssd"] * 20) == Plan(40)


def test_what_is_queued_before_it_counts() -> None:
    made = economics()
    assert made.plan_loads(0, ["ssd"] * 20) == Plan(20)
    made.queued = {"ssd": 1000}
    assert made.plan_loads(0, ["ssd"] * 20) == Plan(0)


def test_what_is_read_ahead_for_it_does_not_wait_for_itself() -> None:
    made = economics()
    made.queued = {"ssd": 1000}
    assert made.plan_loads(0, ["ssd"] * 20, num_read_ahead={"ssd": 20}) == Plan(0)
    assert made.plan_loads(0, ["ssd"] * 20, num_read_ahead={"ssd": 1000}) == Plan(20)
    made.queued = {}
    assert made.plan_loads(0, ["ssd"] * 20, num_read_ahead={"ssd": 20}) == Plan(20)


def test_a_load_costs_nothing_while_others_are_computed() -> None:
    """10 blocks take 16 ms to compute and 40 ms to load, so it pays once 24 ms are queued."""
    made = economics(cpu=(0.0, 0.0), ssd=(0.0, 4e-3))
    tiers = ["ssd"] * 10
    assert made.plan_loads(0, tiers, num_queued_tokens=200) == Plan(0)
    assert made.plan_loads(0, tiers, num_queued_tokens=300) == Plan(10)
    assert made.plan_loads(0, tiers, num_queued_tokens=10_000, decides=True) == Plan(10)
    assert made.max_wait_seconds(0, 10) == pytest.approx(16e-3)
    assert made.max_wait_seconds(0, 10, num_queued_tokens=300) == pytest.approx(46e-3)
    unknown = economics(prefill=None)
    assert unknown.plan_loads(0, tiers, num_queued_tokens=300) == Plan(10)


def test_tokens_that_cost_more_are_worth_more() -> None:
    made = economics(ssd=(6e-3, 1e-5))
    for start in (0, 4000) * 50:
        positions = 100 * start + 100 * 99 // 2
        made.prefill.record_prefill(100, positions, 100 * 1e-5 + 1e-8 * positions)
    assert made.plan_loads(0, ["ssd"] * 10) == Plan(0)
    assert made.plan_loads(6000, ["ssd"] * 10) == Plan(10)


def test_near_break_even_the_last_choice_stands() -> None:
    made = economics(cpu=(0.0, 0.0), ssd=(0.0, 1.6e-3))
    tiers = ["ssd"] * 10
    for _ in range(5):
        assert made.plan_loads(0, tiers, decides=True) == Plan(10)
        set_link(made, "ssd", 0.0, 1.7e-3)
    set_link(made, "ssd", 0.0, 2.0e-3)
    assert made.plan_loads(0, tiers, decides=True) == Plan(0)
    for block in (1.7e-3, 1.5e-3):
        set_link(made, "ssd", 0.0, block)
        assert made.plan_loads(0, tiers, decides=True) == Plan(0)
    set_link(made, "ssd", 0.0, 1.3e-3)
    assert made.plan_loads(0, tiers, decides=True) == Plan(10)
    set_link(made, "ssd", 0.0, 1.7e-3)
    assert made.plan_loads(0, tiers, decides=True) == Plan(10)


def test_few_requests_probe_a_slow_tier_with_few_blocks() -> None:
    made = economics(ssd=(10.0, 1.0))
    tiers = ["cpu"] * 10 + ["ssd"] * 100
    plans = [made.plan_loads(0, tiers, decides=True) for _ in range(4 * PROBE_EVERY)]
    assert plans.count(Plan(10 + PROBE_BLOCKS)) == made.probes == 4
    assert plans.count(Plan(10)) == 4 * PROBE_EVERY - 4
    computed = 4 * PROBE_EVERY * 100 - 4 * PROBE_BLOCKS
    assert made.declined_tokens == {"ssd": computed * BLOCK_TOKENS}


def test_a_tier_slows_down_a_hundred_times_and_recovers() -> None:
    """What is lost to it, and in how many requests it is trusted again."""
    made = economics()
    tiers = ["ssd"] * 60
    compute = 60 * BLOCK_TOKENS * 1e-4

    def live(factor: float, requests: int) -> tuple[int, float]:
        """Requests until the choice is as it stays, and the seconds beyond the better choice."""
        changed, lost, last = 0, 0.0, None
        for number in range(requests):
            plan = made.plan_loads(0, tiers, decides=True)
            read = factor * (2e-3 + 1e-4 * plan.num_blocks)
            max_wait_seconds = made.max_wait_seconds(0, plan.num_blocks) or math.inf
            if plan.num_blocks:
                made.links["ssd"].record_transfer(plan.num_blocks * BLOCK_BYTES, read, read)
                copied = plan.num_blocks if read <= max_wait_seconds else 0
                spent = min(read, max_wait_seconds) + compute * (60 - copied) / 60
                lost += max(0.0, spent - min(compute, factor * 8e-3))
            if plan.num_blocks != last:
                changed, last = number, plan.num_blocks
        return changed, lost

    assert live(1.0, 50)[0] == 0
    _, lost = live(100.0, 160)
    # The first few waited in vain, then every 16th for 16 of 60 blocks.
    assert lost < 5 * compute + 160 / PROBE_EVERY * 0.35 * compute
    changed, _ = live(1.0, 200)
    assert changed <= 8 * PROBE_EVERY
    assert made.plan_loads(0, tiers, decides=True) == Plan(60)


def test_nobody_waits_longer_than_computing_takes() -> None:
    made = economics()
    assert made.max_wait_seconds(0, 100) == pytest.approx(100 * BLOCK_TOKENS * 1e-4)
    assert made.max_wait_seconds(0, 1) == GRACE_SECONDS
    assert economics(choice=Choice.LOAD).max_wait_seconds(0, 100) is None


def test_both_at_once_where_it_wins_by_a_margin_for_one_alone() -> None:
    # 1.6 ms a block either way: they meet in the middle.
    made = economics(cpu=(0.0, 0.0), ssd=(0.0, 1.6e-3))
    plan = made.plan_loads(0, ["ssd"] * 100, num_sharing=1)
    assert plan.num_blocks == 100
    assert 48 <= plan.compute_blocks <= 52
    assert made.plan_loads(0, ["ssd"] * 100, num_sharing=0).compute_blocks == 0
    # Two and a half times slower it still saves two sevenths, nine times less than the margin.
    slow = economics(cpu=(0.0, 0.0), ssd=(0.0, 2.5 * 1.6e-3)).plan_loads(
        0, ["ssd"] * 100, num_sharing=1
    )
    assert 69 <= slow.compute_blocks <= 75
    made = economics(cpu=(0.0, 0.0), ssd=(0.0, 9 * 1.6e-3))
    assert made.plan_loads(0, ["ssd"] * 100, num_sharing=1) == Plan(0)
    assert economics().plan_loads(0, ["cpu"] * 100, num_sharing=1) == Plan(100)


@pytest.mark.parametrize(("num_sharing", "meets_at"), [(1, 50), (2, 33), (3, 25), (5, 0)])
def test_those_that_share_the_engine_compute_less_each(num_sharing: int, meets_at: int) -> None:
    """Of five it would save each too little."""
    made = economics(cpu=(0.0, 0.0), ssd=(0.0, 1.6e-3))
    plan = made.plan_loads(0, ["ssd"] * 100, num_sharing=num_sharing)
    assert abs(plan.compute_blocks - meets_at) <= (2 if meets_at else 0)


def test_a_choice_can_be_forced() -> None:
    assert economics(choice=Choice.LOAD, ssd=(9.0, 9.0)).plan_loads(
        0, ["ssd"] * 9, decides=True
    ) == Plan(9)
    assert economics(choice=Choice.OVERLAP).plan_loads(0, ["ssd"] * 9, decides=True) == Plan(9, 4)
    assert economics(choice=Choice.OVERLAP).plan_loads(0, ["ssd"], decides=True) == Plan(1)


def test_break_even_is_where_the_choice_changes() -> None:
    made = economics(prefill=1e-5)
    for tier in ("cpu", "ssd"):
        tokens = made.break_even_tokens(tier)
        assert tokens is not None
        blocks = tokens // BLOCK_TOKENS
        assert not made._pays(tier, blocks - 1)
        assert made._pays(tier, blocks)
    assert economics(ssd=(0.0, 1.0)).break_even_tokens("ssd") is None


def test_the_estimates_are_plain_values() -> None:
    made = economics(ssd=(0.0, 1.0))
    figures = json.loads(json.dumps(made.stats()))
    assert figures["break_even_tokens"]["ssd"] is None
    assert figures["bytes_per_second"]["cpu"] == pytest.approx(BLOCK_BYTES / 1e-5)
    assert figures["fixed_seconds"]["cpu"] == pytest.approx(1e-3)
    assert figures["prefill_tokens_per_second"] > 0
