# SPDX-License-Identifier: Apache-2.0
"""The scheduler with tiers: parking, loads that come, come in part or not at all, and room."""

from __future__ import annotations

from typing import Any

import pytest

from stratakv.connector.base import RequestView
from stratakv.connector.messages import EvictedBlock, LoadReport, Match, MatchKind
from stratakv.engine.request.request import RequestStatus
from stratakv.engine.scheduler.waiting.admission import MOST_DEFERRED

Make = Any


def prompt(length: int, first: int = 1) -> list[int]:
    return [first + i % 40 for i in range(length)]


@pytest.fixture
def tiers(make_tiers: Any) -> Any:
    return make_tiers()


def keep(engine: Any, tokens: list[int]) -> None:
    """Bring the full blocks of `tokens` into the tiers, and out of the pool."""
    engine.add("keep", tokens, max_tokens=1)
    engine.run_all()
    for block in engine.manager.pool.resident():
        engine.tiers.kept[block.key] = engine.contents[block.key[:32]]
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)
    engine.outputs.clear()


def test_a_parked_request_waits_for_its_load_and_goes_on(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(14))
    keep_pool = engine.add("pool", prompt(6), max_tokens=1)  # leaves one block in the pool
    engine.scheduler.connector.kept, kept = {}, engine.scheduler.connector.kept
    engine.run_all()
    assert keep_pool.num_cached_tokens == 0
    engine.scheduler.connector.kept = kept

    request = engine.add("r", prompt(14))
    output = engine.step()
    assert output.num_scheduled_tokens == {}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    (load,) = tiers.loads
    table = engine.table("r")
    assert load.block_ids == table[1:3]  # the part from the tiers, and nothing else
    assert request.num_computed_tokens == 4
    assert not engine.scheduler.has_runnable_work()
    assert (engine.scheduler.num_waiting, engine.scheduler.stats()["num_parked"]) == (1, 1)
    tiers.tick()
    assert not engine.scheduler.has_runnable_work()
    tiers.tick()
    assert engine.scheduler.has_runnable_work()
    engine.step()
    assert request.status is RequestStatus.WAITING
    assert request.num_computed_tokens == 12
    # What was loaded can be found at once, and would survive a failed step.
    pool = engine.manager.pool
    loaded = [pool.blocks[i] for i in table[1:3]]
    assert pool.get_cached_prefix(request.block_hashes[1:]) == (loaded,)
    assert pool.all_computed(loaded)
    output = engine.step()
    assert output.num_scheduled_tokens == {"r": 2}
    assert output.new_requests[0].block_ids == ([*table, engine.table("r")[3]],)
    assert output.new_requests[0].num_computed_tokens == 12
    engine.run_all()
    assert engine.said("r") == say(prompt(14), 5)
    first = engine.outputs["r"][0]
    assert first.num_cached_tokens == 12
    assert first.cached_tokens_by_tier == {"pool": 4, "cpu": 8}
    assert engine.outputs["r"][-1].timings["load_seconds"] == 0.5


def test_parked_requests_hold_up_nobody(make_engine: Make, tiers: Any) -> None:
    engine = make_engine(tiers=tiers, max_num_seqs=1)
    keep(engine, prompt(14))
    engine.add("parked", prompt(14))
    engine.add("other", prompt(5, 30))
    assert engine.step().num_scheduled_tokens == {"other": 5}
    engine.run_all()
    assert set(engine.outputs) == {"parked", "other"}


def test_a_load_that_comes_in_part(make_engine: Make, tiers: Any, say: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(18))
    tiers.outcome = lambda load: 1
    request = engine.add("r", prompt(18))
    engine.run_all()
    assert engine.said("r") == say(prompt(18), 5)
    assert not request.external_load_failed
    assert engine.outputs["r"][0].cached_tokens_by_tier == {"pool": 0, "cpu": 4}


def test_a_load_that_fails_is_not_tried_again(make_engine: Make, tiers: Any, say: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(18))
    tiers.outcome = lambda load: 0
    request = engine.add("r", prompt(18))
    engine.run_all()
    assert request.external_load_failed
    assert engine.said("r") == say(prompt(18), 5)
    assert engine.outputs["r"][0].cached_tokens_by_tier == {"pool": 0}
    assert engine.scheduler.stats()["loads"] == engine.scheduler.stats()["loads_failed"] == 1


def test_an_aborted_load_keeps_its_blocks_until_it_is_reported(
    make_engine: Make, tiers: Any
) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(14))
    engine.add("r", prompt(14))
    engine.step()
    engine.scheduler.finish_requests(["r"])
    assert engine.scheduler.requests == {}
    assert not engine.manager.pool.is_idle
    assert not engine.scheduler.reset_prefix_cache(reset_tiers=True)
    with pytest.raises(ValueError, match="'r' is in use"):
        engine.add("r", prompt(14))
    tiers.tick()
    tiers.tick()
    engine.step()
    assert engine.manager.pool.is_idle
    engine.add("r", prompt(14))
    assert engine.scheduler.reset_prefix_cache(reset_tiers=True)
    assert tiers.kept == {}


def test_beside_running_requests_few_are_asked_again_and_in_turns(
    make_engine: Make, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They hold up nobody who came later, and with nothing running all are asked."""
    engine = make_engine(tiers=tiers, max_num_seqs=8, num_blocks=200)
    asked: list[str] = []

    def answer(request: Any, *_: Any, **__: Any) -> Match:
        asked.append(request.request_id)
        is_slow = request.request_id.startswith("slow")
        return Match(0, MatchKind.RETRY if is_slow else MatchKind.NONE)

    monkeypatch.setattr(tiers, "get_matched_tokens", answer)
    slow = [f"slow {number}" for number in range(3 * MOST_DEFERRED)]
    for name in slow:
        engine.add(name, prompt(6))
    engine.step()
    assert asked == slow
    engine.add("runs", prompt(6, 30), max_tokens=20, ignore_eos=True)
    engine.step()
    asked.clear()
    for _ in range(3):
        engine.step()
    assert asked == slow, "sixteen in each step, from where the last one left off"
    asked.clear()
    engine.add("fast", prompt(6, 40), max_tokens=20, ignore_eos=True)
    assert "fast" in engine.step().num_scheduled_tokens
    assert asked == [*slow[:MOST_DEFERRED], "fast"]
    engine.scheduler.finish_requests(["runs", "fast", *slow])
    assert engine.scheduler.stats()["num_deferred"] == 0


def test_a_request_told_to_ask_again_steps_aside(
    make_engine: Make, tiers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiers=tiers)
    answers = [Match(0, MatchKind.RETRY)] * 2 + [Match(0, MatchKind.NONE)] * 9
    monkeypatch.setattr(
        tiers,
        "get_matched_tokens",
        lambda request, computed, **_: (
            answers.pop(0) if request.request_id == "slow" else Match(0, MatchKind.NONE)
        ),
    )
    engine.add("slow", prompt(6))
    engine.add("fast", prompt(6, 30), max_tokens=1)
    assert engine.step().num_scheduled_tokens == {"fast": 6}
    assert [r.request_id for r in engine.scheduler._states.deferred] == ["slow"]
    assert engine.step().num_scheduled_tokens == {}
    # Nothing to do until the tiers call, or a moment has passed.
    assert not engine.scheduler.has_runnable_work()
    engine.run_all()
    assert len(answers) == 8
    assert set(engine.outputs) == {"slow", "fast"}


def test_hits_that_this_step_writes_are_no_ground_for_a_load(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    """b finds one block that a is about to write, and the tiers have the next one. Were b parked
    and the step to fail, it would come back to a block that holds nothing."""
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(10))
    first = next(key for key in tiers.kept if engine.contents[key[:32]][0] < 10**8)
    del tiers.kept[first]
    engine.add("a", prompt(6))
    b = engine.add("b", prompt(10))
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 6}
    assert b.status is RequestStatus.WAITING
    engine.scheduler.fail_step(output, "boom")
    engine.run_all()
    assert engine.said("b") == say(prompt(10), 5)
    assert engine.outputs["b"][0].num_cached_tokens == 0


def test_evicted_blocks_reach_the_tiers_in_their_step(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    engine = make_engine(7, tiers=tiers, max_model_len=24)
    engine.add("a", prompt(14), max_tokens=1)
    engine.run_all()
    assert tiers.kept == {}
    keys = [engine.manager.pool.blocks[i].block_hash for i in (3, 2, 1)]
    engine.add("b", prompt(18, 20), max_tokens=1)
    output = engine.scheduler.schedule()
    assert tiers.stores == [EvictedBlock(3, keys[0]), EvictedBlock(2, keys[1])]
    assert output.connector_meta.stores[0].block_ids == [3, 2]
    engine.take(engine.scheduler.update_from_output(output, engine.run(output)))
    assert set(tiers.kept) == set(keys[:2])
    engine.add("a2", prompt(14))
    engine.run_all()
    assert engine.said("a2") == say(prompt(14), 5)
    by_tier = engine.outputs["a2"][0].cached_tokens_by_tier
    assert by_tier == {"pool": 4, "cpu": 8}


def test_no_room_for_a_load_changes_nothing(make_engine: Make, tiers: Any) -> None:
    engine = make_engine(7, tiers=tiers, max_model_len=24)
    keep(engine, prompt(14))
    engine.add("runs", prompt(13, 30), max_tokens=4, ignore_eos=True)
    engine.step()
    request = engine.add("r", prompt(14))
    free = engine.manager.pool.num_free
    assert engine.step().num_scheduled_tokens == {"runs": 1}
    assert request.status is RequestStatus.WAITING
    assert engine.manager.pool.num_free == free
    assert tiers.loads == []
    engine.run_all()
    assert set(engine.outputs) == {"runs", "r"}


def test_ended_loads_give_way_to_those_that_run(make_engine: Make, tiers: Any, say: Any) -> None:
    """Seven blocks. `runs` needs room for its next token; `late` has loaded, but does not run."""
    engine = make_engine(8, tiers=tiers, max_model_len=28, max_num_seqs=1)
    keep(engine, prompt(14))
    tiers.load_ticks = 1
    late = engine.add("late", prompt(14), max_tokens=2)
    engine.add("runs", prompt(15, 20), max_tokens=9, ignore_eos=True)
    assert engine.step().num_scheduled_tokens == {"runs": 15}
    tiers.tick()
    engine.step()
    assert late.status is RequestStatus.WAITING
    assert late.num_computed_tokens == 12
    output = engine.step()  # `late` gives its blocks back, and is not let in again at once
    assert output.num_scheduled_tokens == {"runs": 1}
    assert late.num_computed_tokens == 0
    assert late.cached_tokens_by_tier == {}
    assert engine.scheduler.stats()["loads_given_up"] == 1
    assert engine.scheduler.stats().get("preemptions", 0) == 0
    engine.run_all()
    assert engine.said("runs") == say(prompt(15, 20), 9, ignore_eos=True)
    assert engine.said("late") == say(prompt(14), 2)


def test_the_first_running_request_waits_for_loads_and_keeps_what_it_has(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    engine = make_engine(8, tiers=tiers, max_model_len=28, max_num_seqs=1)
    keep(engine, prompt(14))
    tiers.load_ticks = 3
    engine.add("late", prompt(14), max_tokens=2)
    runs = engine.add("runs", prompt(15, 20), max_tokens=9, ignore_eos=True)
    engine.step()
    engine.step()
    output = engine.step()
    assert output.num_scheduled_tokens == {}
    assert runs.status is RequestStatus.RUNNING
    assert runs.num_computed_tokens == 16
    assert not engine.scheduler.has_runnable_work()
    engine.run_all()
    assert runs.num_preemptions == 0
    assert engine.said("runs") == say(prompt(15, 20), 9, ignore_eos=True)


def test_ended_loads_cannot_lock_each_other_out(make_engine: Make, tiers: Any, say: Any) -> None:
    """Nothing runs; both have loaded three of the six blocks, and each needs a fourth."""
    engine = make_engine(7, tiers=tiers, max_model_len=24)
    keep(engine, prompt(14, 1))
    keep(engine, prompt(14, 20))
    engine.add("a", prompt(14, 1))
    engine.add("b", prompt(14, 20))
    engine.step()
    assert len(tiers.loads) == 2
    engine.run_all()
    assert engine.said("a") == say(prompt(14, 1), 5)
    assert engine.said("b") == say(prompt(14, 20), 5)


def test_loads_cannot_take_room_from_each_other_for_ever(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    """Nothing runs, and four of the six blocks are loaded for either. `first` is told to ask again,
    so that `second` is loaded before it. Were `first` to take those blocks for its own load,
    `second` would take them back for its next one."""
    engine = make_engine(7, tiers=tiers, max_model_len=24)
    keep(engine, prompt(18, 1))
    keep(engine, prompt(18, 20))
    ask = tiers.get_matched_tokens
    answers = {"first": Match(0, MatchKind.RETRY)}
    tiers.get_matched_tokens = lambda request, num_tokens, **_: (
        answers.pop(request.request_id, None) or ask(request, num_tokens)
    )
    engine.add("first", prompt(18, 1))
    engine.add("second", prompt(18, 20))
    engine.run_all(100)
    assert engine.said("first") == say(prompt(18, 1), 5)
    assert engine.said("second") == say(prompt(18, 20), 5)
    assert engine.scheduler.stats()["loads"] == 2
    assert engine.scheduler.stats().get("loads_given_up", 0) == 0


def test_an_abort_wakes_those_behind(make_engine: Make, tiers: Any) -> None:
    """A load holds three of six blocks; the first in the queue needs four, the next one two."""
    engine = make_engine(7, tiers=tiers, max_model_len=24)
    keep(engine, prompt(14))
    engine.add("parked", prompt(14))
    engine.add("big", prompt(15, 20))
    engine.add("small", prompt(5, 30))
    assert engine.step().num_scheduled_tokens == {}
    assert engine.step().num_scheduled_tokens == {}
    assert not engine.scheduler.has_runnable_work()
    engine.scheduler.finish_requests(["big"])
    assert engine.scheduler.has_runnable_work()
    assert engine.step().num_scheduled_tokens == {"small": 5}


def test_a_report_for_nobody_is_only_noted(
    make_engine: Make, tiers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tiers=tiers)
    engine.add("r", prompt(5))
    tiers.update_from_worker = lambda output: [LoadReport("ghost", 4)]
    engine.step()
    assert "ghost, which does not wait for one" in caplog.text


def test_the_connector_hears_of_every_step(make_engine: Make, tiers: Any) -> None:
    engine = make_engine(tiers=tiers)
    for count in range(1, 4):
        assert engine.step().connector_meta is not None
        assert tiers.num_metas == count


def test_skipping_the_cache_skips_the_tiers(make_engine: Make, tiers: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(14))
    request = engine.add("r", prompt(14))
    request.skip_reading_prefix_cache = True
    assert engine.step().num_scheduled_tokens == {"r": 14}


def test_a_load_begins_while_others_use_up_the_step(
    make_engine: Make, tiers: Any, say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`long` takes every token of two steps. `loads` need none of them, so its load is over when
    its turn comes; and `new`, for which nothing can be loaded, is not asked about twice."""
    engine = make_engine(tiers=tiers, max_num_batched_tokens=8)
    keep(engine, prompt(14))
    queued: dict[str, list[int]] = {}
    ask = tiers.get_matched_tokens

    def asked(
        request: RequestView,
        num_tokens: int,
        *,
        num_queued_tokens: int,
        num_pool_tokens: int | None,
    ) -> Match:
        assert num_pool_tokens is None, "of models without states"
        queued.setdefault(request.request_id, []).append(num_queued_tokens)
        return ask(request, num_tokens)

    monkeypatch.setattr(tiers, "get_matched_tokens", asked)
    engine.add("long", prompt(30, 20))
    engine.add("loads", prompt(14))
    engine.add("new", prompt(6, 40))
    assert engine.step().num_scheduled_tokens == {"long": 8}
    assert [load.request_id for load in tiers.loads] == ["loads"]
    assert engine.step().num_scheduled_tokens == {"long": 8}
    assert queued == {"long": [0], "loads": [30], "new": [30]}
    for _ in range(3):
        tiers.tick()
    engine.run_all()
    assert queued["new"] == [30, 2], "asked again with its turn, after the two that `loads` lacks"
    assert engine.said("loads") == say(prompt(14), 5)
    assert engine.said("new") == say(prompt(6, 40), 5)
