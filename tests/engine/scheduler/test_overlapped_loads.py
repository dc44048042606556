# SPDX-License-Identifier: Apache-2.0
"""Requests that compute from the front while their blocks are loaded from the back.

The worker of these engines fails where it would read a token that is neither computed nor loaded,
and where it would write to a block that is being written to.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from stratakv.engine.request.request import RequestStatus

Make = Any
PROMPT = 43  # ten blocks, and three tokens more


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


@pytest.fixture
def tiers(make_tiers: Any) -> Any:
    tiers = make_tiers()
    tiers.from_back = True
    tiers.load_ticks = 1
    return tiers


def keep(engine: Any, tokens: Sequence[int]) -> None:
    """Have the tiers, and only they, hold the blocks of these tokens."""
    engine.add("keeps", tokens, max_tokens=1)
    engine.run_all()
    for block in engine.manager.pool.resident():
        engine.tiers.kept[block.key] = engine.contents[block.key[:32]]
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)


def scheduled(engine: Any, name: str) -> list[int]:
    """Tokens that each step computes for a request, until it is done with its prompt."""
    counts = []
    while not engine.outputs.get(name):
        engine.tiers.tick()
        counts.append(engine.step().num_scheduled_tokens.get(name, 0))
    return counts


def test_front_and_loaded_blocks_meet(make_engine: Make, tiers: Any, say: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(PROMPT))
    engine.add("r", prompt(PROMPT))
    # A block is computed in each step, and one is loaded in each but the first.
    counts = scheduled(engine, "r")
    computed = sum(counts[:-1])
    loaded = 40 - computed
    assert counts[-1] == 3
    assert computed >= 4 and loaded >= 16
    first = engine.outputs["r"][0]
    assert first.cached_tokens_by_tier == {"pool": 0, "cpu": loaded}
    assert first.num_cached_tokens == loaded
    stats = engine.scheduler.stats()
    assert stats["meetings"] == 1
    assert stats["reused_tokens_cpu"] == stats["cached_tokens_cpu"] == loaded
    assert stats["reused_positions_cpu"] == sum(range(computed, 40))
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)
    # Computed or loaded, all of it can be found, and was written by nobody else.
    again = engine.add("again", prompt(PROMPT))
    engine.run_all()
    assert again.cached_tokens_by_tier == {"pool": 40}
    assert engine.said("again") == say(prompt(PROMPT), 5)


def test_a_prefix_in_the_pool_comes_before_the_front(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(PROMPT))
    kept, tiers.kept = tiers.kept, {}
    engine.add("short", prompt(PROMPT)[:9], max_tokens=1)
    engine.run_all()
    tiers.kept = kept
    request = engine.add("r", prompt(PROMPT))
    scheduled(engine, "r")
    assert request.cached_tokens_by_tier["pool"] == 8
    assert request.cached_tokens_by_tier["cpu"] > 0
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_piece_that_fails_is_computed_and_the_rest_behind_it_is_not(
    make_engine: Make, tiers: Any, say: Any, index: int
) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(PROMPT))
    tiers.piece_fails = lambda copy: copy.end == 10 - index
    request = engine.add("r", prompt(PROMPT))
    scheduled(engine, "r")
    assert request.cached_tokens_by_tier.get("cpu", 0) == 4 * index
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)


def test_a_front_before_a_copy_waits_and_is_woken(make_engine: Make, tiers: Any, say: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(PROMPT))
    tiers.load_ticks = 1000
    request = engine.add("r", prompt(PROMPT))
    counts = [engine.step().num_scheduled_tokens.get("r", 0) for _ in range(12)]
    assert sum(counts) < 40 and counts[-1] == 0
    assert request.status is RequestStatus.RUNNING
    assert not engine.scheduler.has_runnable_work(), "only a copy can help"
    for _ in range(1000):
        tiers.tick()
    assert engine.scheduler.has_runnable_work()
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)


@pytest.mark.parametrize("ending", ["abort", "fail", "nan"])
def test_blocks_of_one_that_ends_come_back_after_its_copies(
    make_engine: Make, tiers: Any, ending: str
) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(PROMPT))
    tiers.load_ticks = 3
    engine.add("r", prompt(PROMPT))
    engine.step()
    assert tiers.is_busy
    if ending == "abort":
        engine.take(engine.scheduler.finish_requests(["r"]))
    else:
        engine.bad = {"r"} if ending == "nan" else set()
        output = engine.scheduler.schedule()
        done = engine.run(output)
        if ending == "nan":
            engine.take(engine.scheduler.update_from_output(output, done))
        else:
            engine.take(engine.scheduler.fail_step(output, "boom"))
    assert engine.finish_reason("r") == ("abort" if ending == "abort" else "error")
    assert tiers.is_busy
    held = {block.block_id for block in engine.manager.pool.blocks if block.ref_cnt}
    assert held >= tiers.busy_blocks, "a copy writes to what may be reused"
    with pytest.raises(ValueError, match="in use"):
        engine.add("r", prompt(PROMPT))
    engine.run_all()
    assert engine.manager.pool.is_idle
    assert not tiers.overlapped


def test_one_that_is_preempted_keeps_its_blocks_until_its_copies_end(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    # Seven blocks for the first, whose answer grows into what is left of 23.
    engine = make_engine(24, tiers=tiers, max_model_len=92, max_num_seqs=2)
    keep(engine, prompt(PROMPT))
    tiers.load_ticks = 1000
    engine.add("long", prompt(46, 7), max_tokens=30, ignore_eos=True)
    engine.step()
    engine.add("r", prompt(PROMPT))
    preempted = []
    for _ in range(60):
        preempted += engine.step().preempted_request_ids
        if preempted:
            break
    assert preempted == ["r"]
    request = engine.scheduler.requests["r"]
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.manager.pool.num_free == 0
    assert engine.scheduler.stats()["preemptions"] == 1
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.has_runnable_work(), "nothing to do until the copies have ended"
    assert engine.scheduler.stats()["preemptions"] == 1
    for _ in range(1000):
        tiers.tick()
    engine.run_all()
    assert engine.said("long") == say(prompt(46, 7), 30, ignore_eos=True)
    assert engine.said("r") == say(prompt(PROMPT), 5)
    assert engine.manager.pool.is_idle


def test_one_that_is_preempted_between_two_copies_gives_its_blocks_back_at_once(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    engine = make_engine(24, tiers=tiers, max_model_len=92, max_num_seqs=2)
    keep(engine, prompt(PROMPT))
    tiers.piece_fails = lambda copy: True
    engine.add("long", prompt(46, 7), max_tokens=30, ignore_eos=True)
    engine.step()
    request = engine.add("r", prompt(PROMPT))
    while not engine.scheduler.stats().get("preemptions"):
        tiers.tick()
        engine.step()
    assert request.status is RequestStatus.PREEMPTED
    assert not tiers.overlapped
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)


def test_without_chunks_it_is_parked(make_engine: Make, tiers: Any, say: Any) -> None:
    engine = make_engine(tiers=tiers, enable_chunked_prefill=False, max_num_batched_tokens=200)
    keep(engine, prompt(PROMPT))
    request = engine.add("r", prompt(PROMPT))
    engine.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert len(tiers.loads) == 1 and not tiers.overlapped
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)


def test_the_random_lives_do_meet(make_engine: Make, make_tiers: Any) -> None:
    """What the random lives rely on: with luck of their own these tiers load from the back."""
    met = 0
    for seed in range(20):
        engine = make_engine(tiers=make_tiers(random.Random(seed)))
        keep(engine, prompt(PROMPT))
        engine.add("r", prompt(PROMPT))
        engine.run_all()
        met += engine.scheduler.stats().get("reused_tokens_cpu", 0) > 0
    assert met > 5
