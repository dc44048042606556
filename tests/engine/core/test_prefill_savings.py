# SPDX-License-Identifier: Apache-2.0
"""The savings: what a token of a prompt costs, and what not computing it has saved."""

from __future__ import annotations

import pytest

from stratakv.engine.core.prefill_savings import MEMORY_STEPS, MIN_PROMPT_TOKENS, PrefillSavings
from stratakv.engine.scheduler.output import CachedRequestData, SchedulerOutput


def step(*counts: int) -> SchedulerOutput:
    """A step that computes so many tokens for each of its requests."""
    return step_after({str(i): 0 for i in range(len(counts))}, *counts)


def step_after(computed: dict[str, int], *counts: int) -> SchedulerOutput:
    """A step that computes so many tokens for each request after those computed before."""
    cached = CachedRequestData(list(computed), [None] * len(counts), list(computed.values()))
    tokens = dict(zip(computed, counts, strict=True))
    return SchedulerOutput([], cached, tokens, sum(counts), set(), set())


def test_a_token_costs_what_steps_of_prompts_take() -> None:
    savings = PrefillSavings()
    assert savings.seconds_per_token is None
    savings.measure(step(60, 40), 2.0)
    assert savings.seconds_per_token == pytest.approx(0.02)


def test_longer_prompts_weigh_more() -> None:
    savings = PrefillSavings()
    savings.measure(step(1000), 10.0)
    savings.measure(step(MIN_PROMPT_TOKENS), 10.0)
    kept = 1 - 1 / MEMORY_STEPS
    expected = (10.0 * kept + 10.0) / (1000 * kept + MIN_PROMPT_TOKENS)
    assert savings.seconds_per_token == pytest.approx(expected)


def test_the_price_follows_the_machine() -> None:
    savings = PrefillSavings()
    for _ in range(10 * MEMORY_STEPS):
        savings.measure(step(100), 1.0)
    for _ in range(10 * MEMORY_STEPS):
        savings.measure(step(100), 3.0)
    assert savings.seconds_per_token == pytest.approx(0.03, rel=0.001)


@pytest.mark.parametrize("counts", [(), (1,), (1, 1, 1), (MIN_PROMPT_TOKENS - 1,)])
def test_steps_with_few_prompt_tokens_say_nothing_of_them(counts: tuple[int, ...]) -> None:
    savings = PrefillSavings()
    savings.measure(step(*counts), 1.0)
    assert savings.seconds_per_token is None


def test_drafts_are_no_prompt() -> None:
    savings = PrefillSavings()
    checked = step(9, 9, 9, 9, 9, 9)
    checked.draft_token_ids = {str(i): [1] * 8 for i in range(6)}
    assert sum(checked.num_scheduled_tokens.values()) > MIN_PROMPT_TOKENS
    assert savings.measure(checked, 1.0) is None
    assert savings.seconds_per_token is None


def test_rows_that_only_go_on_are_not_counted_as_prompts() -> None:
    savings = PrefillSavings()
    mixed = step(1, 1, 100, 1)
    savings.measure(mixed, 5.0)
    assert savings.seconds_per_token is None  # nobody knows yet what three rows take
    savings.measure(step(1, 1), 2.0)  # as many by powers of two
    savings.measure(mixed, 5.0)
    assert savings.seconds_per_token == pytest.approx(0.03)
    savings = PrefillSavings()
    savings.measure(step(*[1] * 64), 2.0)
    savings.measure(mixed, 5.0)
    assert savings.seconds_per_token is None  # sixty-four are no three


def test_a_mixed_step_never_costs_less_than_nothing() -> None:
    savings = PrefillSavings()
    savings.measure(step(1), 9.0)
    savings.measure(step(1, 100), 5.0)
    assert savings.seconds_per_token == 0.0


def test_what_rows_take_is_an_average_too() -> None:
    savings = PrefillSavings()
    for _ in range(10 * MEMORY_STEPS):
        savings.measure(step(1), 1.0)
    savings.measure(step(1), 1.0 + MEMORY_STEPS)  # one outlier moves it by one
    savings.measure(step(1, 100), 4.0)
    assert savings.seconds_per_token == pytest.approx(0.02)


def test_only_new_tokens_are_credited_and_each_at_the_price_of_its_time() -> None:
    savings = PrefillSavings()
    counts = {"reused_tokens_pool": 10.0, "reused_tokens_cpu": 0.0, "steps": 7.0}
    savings.add_counts(counts)
    assert not savings.saved_seconds  # no price yet, and none later for these
    savings.measure(step(100), 1.0)
    savings.add_counts(counts)
    assert not savings.saved_seconds
    counts["reused_tokens_pool"] += 20
    counts["reused_tokens_ssd"] = 5
    savings.add_counts(counts)
    savings.add_counts(counts)
    assert savings.saved_seconds == pytest.approx({"pool": 0.2, "ssd": 0.05})
    for _ in range(20 * MEMORY_STEPS):
        savings.measure(step(100), 2.0)
    counts["reused_tokens_ssd"] += 5
    savings.add_counts(counts)
    assert savings.saved_seconds == pytest.approx({"pool": 0.2, "ssd": 0.15}, rel=0.001)


def test_what_prompts_took_is_told_with_the_positions_before_them() -> None:
    savings = PrefillSavings()
    cost = savings.measure(step_after({"a": 100, "b": 0}, 40, 60), 3.0)
    assert cost == (100, 40 * 100 + 40 * 39 // 2 + 60 * 59 // 2, 3.0)
    assert savings.measure(step(1, 1), 2.0) is None
    cost = savings.measure(step_after({"a": 140, "b": 60}, 50, 1), 3.0)
    assert cost is None, "nobody knows what one row takes"


def test_tokens_far_into_a_prompt_are_credited_at_their_own_price() -> None:
    savings = PrefillSavings()
    for start in (0, 1000) * 200:  # a token costs 1 ms, and 1 us for each position before it
        positions = 100 * start + 100 * 99 // 2
        savings.measure(step_after({"a": start}, 100), 0.1 + 1e-6 * positions)
    savings.add_counts({"reused_tokens_pool": 100, "reused_positions_pool": 100 * 2000})
    assert savings.saved_seconds["pool"] == pytest.approx(0.3, rel=0.05)
