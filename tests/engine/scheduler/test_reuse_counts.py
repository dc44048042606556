# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens that were found instead of computed, or computed again, and of who waits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from stratakv.connector.base import RequestView
from stratakv.connector.messages import Match, MatchKind
from stratakv.engine.request.request import Progress


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


@pytest.fixture
def tiers(make_tiers: Any) -> Any:
    return make_tiers()


def keep(engine: Any, tokens: Sequence[int]) -> None:
    """Have the tiers, and only they, hold the blocks of these tokens."""
    engine.add("keeps", tokens, max_tokens=1)
    engine.run_all()
    for block in engine.manager.pool.resident():
        engine.tiers.kept[block.key] = engine.contents[block.key[:32]]
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)


def counted(engine: Any, before: dict[str, float]) -> dict[str, float]:
    """The counts of tokens that have grown."""
    after = engine.scheduler.stats()
    words = ("reused", "recompute", "queried")
    return {
        name: after[name] - before.get(name, 0)
        for name in after
        if name.startswith(words) or "queried" in name
        if after[name] != before.get(name, 0)
    }


def test_tokens_from_the_pool_and_from_a_tier(make_engine: Any, tiers: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(14))
    before = engine.scheduler.stats()
    engine.add("a", prompt(14))
    engine.run_all()
    assert counted(engine, before) == {
        "prefix_queried_tokens": 14, "external_queried_tokens": 14, "reused_tokens_cpu": 12,
        "reused_positions_cpu": sum(range(12)),
    }  # fmt: skip
    before = engine.scheduler.stats()
    engine.add("b", prompt(14))
    engine.run_all()
    assert counted(engine, before) == {
        "prefix_queried_tokens": 14, "external_queried_tokens": 2, "reused_tokens_pool": 12,
        "reused_positions_pool": sum(range(12)),
    }  # fmt: skip


def test_without_caching_nothing_is_asked_for(make_engine: Any) -> None:
    engine = make_engine(caching=False)
    before = engine.scheduler.stats()
    engine.add("a", prompt(14))
    engine.run_all()
    assert counted(engine, before) == {}


@pytest.mark.parametrize("num_blocks_loaded", [0, 1, 2])
def test_what_a_tier_promised_and_did_not_bring(
    make_engine: Any, tiers: Any, num_blocks_loaded: int
) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(14))
    tiers.outcome = lambda load: num_blocks_loaded
    before = engine.scheduler.stats()
    engine.add("a", prompt(14))
    engine.run_all()
    loaded = 4 * num_blocks_loaded
    grown = counted(engine, before)
    assert grown["recomputes_load_failed"] == 1
    assert grown["recomputed_tokens_load_failed"] == 12 - loaded
    assert grown.get("reused_tokens_cpu", 0) == loaded
    assert not [name for name in grown if "preemption" in name or "given_up" in name]


def test_what_is_lost_by_a_preemption(make_engine: Any) -> None:
    engine = make_engine(8, max_model_len=28)
    for name in ("a", "b"):
        engine.add(name, prompt(10, ord(name)), max_tokens=12, ignore_eos=True)
    engine.run_all()
    stats = engine.scheduler.stats()
    assert stats["preemptions"] >= 1
    assert stats["recomputed_tokens_preemption"] > 0
    # Both prompts and answers, all but the last tokens, and what was computed again.
    assert stats["scheduled_tokens"] == 2 * (10 + 11) + stats["recomputed_tokens_preemption"]


@pytest.mark.parametrize("loads", [True, False])
def test_who_was_preempted_comes_back_by_a_load_or_computes(
    make_engine: Any, tiers: Any, loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The victim's blocks are stored when they are evicted; the tiers decide what is quicker."""
    engine = make_engine(8, tiers=tiers, max_model_len=28)
    if not loads:
        monkeypatch.setattr(tiers, "get_matched_tokens", lambda *_, **__: Match(0, MatchKind.NONE))
    for name in ("a", "b"):
        engine.add(name, prompt(10, ord(name)), max_tokens=12, ignore_eos=True)
    engine.run_all()
    stats = engine.scheduler.stats()
    assert stats["preemptions"] >= 1
    assert bool(stats.get("resumed_by_load", 0)) is loads
    assert stats.get("resumed_by_load", 0) == stats.get("reused_tokens_cpu", 0)
    assert bool(stats.get("recomputed_tokens_preemption", 0)) is not loads


def test_what_is_lost_by_giving_a_load_up(
    make_engine: Any, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `late` of test_admission: it has loaded, gives its blocks back, and loads them no more."""
    engine = make_engine(8, tiers=tiers, max_model_len=28, max_num_seqs=1)
    keep(engine, prompt(14))
    tiers.load_ticks = 1
    before = engine.scheduler.stats()
    engine.add("late", prompt(14), max_tokens=2)
    engine.add("runs", prompt(15, 20), max_tokens=9, ignore_eos=True)
    engine.step()
    tiers.tick()
    engine.step()
    monkeypatch.setattr(tiers, "get_matched_tokens", lambda *_, **__: Match(0, MatchKind.NONE))
    engine.run_all()
    grown = counted(engine, before)
    assert engine.scheduler.stats()["loads_given_up"] == 1
    assert grown["recomputes_load_given_up"] == 1
    # One of the three blocks is still in the pool.
    assert grown["recomputed_tokens_load_given_up"] == 8
    assert grown["reused_tokens_pool"] == 4
    assert "reused_tokens_cpu" not in grown


def test_the_longest_loss_counts_and_of_equal_ones_the_last() -> None:
    progress = Progress()
    progress.lose(8, "preemption")
    progress.lose(4, "load_failed")
    assert (progress.lost_tokens, progress.lost_cause) == (8, "preemption")
    progress.lose(8, "load_given_up")
    assert (progress.lost_tokens, progress.lost_cause) == (8, "load_given_up")


def test_who_waits_for_a_tier_is_deferred(
    make_engine: Any, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiers=tiers, max_num_seqs=1)
    keep(engine, prompt(14))
    engine.add("loads", prompt(14))
    engine.step()
    assert engine.scheduler.stats()["num_deferred"] == 1  # parked

    def pending(request: RequestView, num_computed_tokens: int, **_: int) -> Match:
        return Match(0, MatchKind.RETRY)

    with monkeypatch.context() as patch:
        patch.setattr(tiers, "get_matched_tokens", pending)
        engine.add("asks", prompt(9, 5))
        engine.step()
        stats = engine.scheduler.stats()
        assert (stats["num_deferred"], stats["num_waiting"]) == (2, 2)
    engine.add("runs", prompt(5, 6), max_tokens=9, ignore_eos=True)
    engine.step()
    engine.add("queues", prompt(5, 7))
    engine.step()
    stats = engine.scheduler.stats()
    assert stats["num_running"] == 1
    assert stats["num_waiting"] - stats["num_deferred"] >= 1  # for want of a place
    engine.run_all()
    assert engine.scheduler.stats()["num_deferred"] == 0
