# SPDX-License-Identifier: Apache-2.0
"""The scheduler without tiers: budget, chunks, preemption, differences, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from stratakv.engine.request.request import RequestStatus
from stratakv.engine.scheduler.request_limits import QueueFull
from stratakv.tiers.settings.values import ConfigError

Make = Any


def prompt(length: int, first: int = 1) -> list[int]:
    return [first + i % 40 for i in range(length)]


def test_one_request_from_arrival_to_end(make_engine: Make, say: Any) -> None:
    engine = make_engine()
    request = engine.add("r", prompt(10), ignore_eos=True)
    assert (engine.scheduler.num_waiting, engine.scheduler.num_running) == (1, 0)
    output = engine.step()
    (new,) = output.new_requests
    assert new.request_id == "r"
    assert new.prompt_token_ids.tolist() == prompt(10)
    assert new.block_ids == ([1, 2, 3],)
    assert new.num_computed_tokens == 0
    assert output.num_scheduled_tokens == {"r": 10}
    assert request.status is RequestStatus.RUNNING
    output = engine.step()
    assert not output.new_requests
    assert output.num_scheduled_tokens == {"r": 1}
    assert output.cached_requests.request_ids == [], "it goes on where it ended"
    output = engine.step()
    assert output.cached_requests.request_ids == ["r"], "and fills a block"
    assert output.cached_requests.new_block_ids == [None]
    assert output.cached_requests.num_computed_tokens == [11]
    output = engine.step()
    assert output.cached_requests.new_block_ids == [([4],)]
    engine.run_all()
    assert engine.said("r") == say(prompt(10), 5, ignore_eos=True)
    assert engine.finish_reason("r") == "length"
    assert engine.manager.pool.is_idle
    assert engine.step().finished_request_ids == {"r"}
    assert engine.step().finished_request_ids == set()


def test_a_step_mixes_decodes_a_continued_prefill_and_a_new_one(make_engine: Make) -> None:
    engine = make_engine(max_num_batched_tokens=20, max_num_seqs=4)
    engine.add("a", prompt(3, 1), ignore_eos=True)
    engine.add("b", prompt(30, 2))
    engine.add("c", prompt(9, 3))
    engine.add("d", prompt(9, 4))
    assert engine.step().num_scheduled_tokens == {"a": 3, "b": 17}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 13, "c": 6}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 1, "c": 3, "d": 9}


def test_long_prompts_are_cut_to_the_threshold(make_engine: Make) -> None:
    engine = make_engine(max_num_batched_tokens=20, long_prefill_token_threshold=6)
    engine.add("a", prompt(14, 1))
    engine.add("b", prompt(9, 2))
    assert engine.step().num_scheduled_tokens == {"a": 6, "b": 6}
    assert engine.step().num_scheduled_tokens == {"a": 6, "b": 3}
    assert engine.step().num_scheduled_tokens == {"a": 2, "b": 1}


def test_without_chunks_a_prompt_waits_until_it_fits_whole(make_engine: Make) -> None:
    engine = make_engine(max_num_batched_tokens=20, max_model_len=20, enable_chunked_prefill=False)
    engine.add("a", prompt(12, 1))
    engine.add("b", prompt(10, 2))
    engine.add("c", prompt(2, 3))
    # Nobody overtakes b, although c would fit.
    assert engine.step().num_scheduled_tokens == {"a": 12}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 10, "c": 2}


def test_settings_that_could_never_admit_a_prompt_are_refused(make_engine: Make) -> None:
    with pytest.raises(ConfigError, match="20 cannot hold a whole prompt of up to 200 tokens"):
        make_engine(max_num_batched_tokens=20, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="--long-prefill-token-threshold cuts prompts"):
        make_engine(
            max_num_batched_tokens=200,
            enable_chunked_prefill=False,
            long_prefill_token_threshold=8,
        )


def test_no_more_run_than_may(make_engine: Make) -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, prompt(3, ord(name)))
    assert engine.step().num_scheduled_tokens == {"a": 3, "b": 3}
    engine.run_all()
    assert set(engine.outputs) == {"a", "b", "c"}


def test_requests_of_one_step_share_blocks_that_it_writes(make_engine: Make, say: Any) -> None:
    engine = make_engine()
    engine.add("a", prompt(10))
    engine.add("b", prompt(10))
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 10, "b": 2}
    assert engine.table("a") == [1, 2, 3]
    assert engine.table("b") == [1, 2, 4]
    engine.run_all()
    assert engine.said("a") == engine.said("b") == say(prompt(10), 5)
    assert engine.outputs["b"][0].num_cached_tokens == 8
    assert engine.outputs["b"][0].cached_tokens_by_tier == {"pool": 8}


def test_the_last_to_come_is_preempted_and_comes_back_first(make_engine: Make, say: Any) -> None:
    """Six usable blocks: a and b hold three each when a needs a fourth."""
    engine = make_engine(7, max_model_len=20)
    a = engine.add("a", prompt(11, 1), max_tokens=8, ignore_eos=True)
    b = engine.add("b", prompt(11, 9), max_tokens=8, ignore_eos=True)
    late = engine.add("late", prompt(4, 20), ignore_eos=True)
    engine.step()
    assert engine.table("a") == [1, 2, 3]
    assert engine.table("b") == [4, 5, 6]
    engine.step()
    output = engine.step()
    assert output.preempted_request_ids == {"b"}
    assert output.num_scheduled_tokens == {"a": 1}  # and nobody is let in
    assert output.cached_requests.new_block_ids == [([6],)]  # b's tail goes first
    assert b.status is RequestStatus.PREEMPTED
    assert (b.num_computed_tokens, b.num_preemptions) == (0, 1)
    assert engine.table("b") == []
    assert a.num_preemptions == late.num_preemptions == 0
    while not (output := engine.step()).cached_requests.resumed_request_ids:
        assert late.status is RequestStatus.WAITING
    assert output.cached_requests.resumed_request_ids == {"b"}
    index = output.cached_requests.request_ids.index("b")
    assert output.cached_requests.new_block_ids[index] == (engine.table("b"),)
    assert output.cached_requests.num_computed_tokens[index] == 4  # block 4 is left of it
    assert output.cached_requests.output_token_ids == {"b": engine.said("b")[:2]}
    engine.run_all()
    for name, first in (("a", 1), ("b", 9)):
        assert engine.said(name) == say(prompt(11, first), 8, ignore_eos=True)
    assert engine.outputs["b"][0].num_cached_tokens == 0  # its own blocks are no find
    assert engine.outputs["b"][-1].timings["num_preemptions"] == b.num_preemptions
    assert engine.scheduler.stats()["preemptions"] == b.num_preemptions + late.num_preemptions


def test_nobody_is_let_in_while_room_is_made(make_engine: Make) -> None:
    """b goes, a takes one of its three blocks; the first chunk of b would fit into the others."""
    engine = make_engine(7, max_model_len=20, caching=False, long_prefill_token_threshold=4)
    engine.add("a", prompt(11, 1), max_tokens=8, ignore_eos=True)
    engine.add("b", prompt(11, 9), max_tokens=8, ignore_eos=True)
    while not (output := engine.step()).preempted_request_ids:
        assert len(output.num_scheduled_tokens) == 2
    assert output.num_scheduled_tokens == {"a": 1}
    assert engine.manager.pool.num_free == 2
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 4}


def test_the_watermark_keeps_room_for_those_that_run(make_engine: Make) -> None:
    engine = make_engine(21, watermark=0.1, max_model_len=80, max_num_batched_tokens=128)
    assert engine.manager.watermark_blocks == 2
    # With nothing running it does not count: this one needs all 20 blocks.
    engine.add("a", prompt(79), max_tokens=1)
    assert engine.step().num_scheduled_tokens == {"a": 79}
    engine.add("b", prompt(40, 2), max_tokens=3, ignore_eos=True)
    engine.add("c", prompt(33, 3), max_tokens=3)
    assert engine.step().num_scheduled_tokens == {"b": 40}
    # c would leave one block free, b runs: not yet.
    assert engine.step().num_scheduled_tokens == {"b": 1}
    engine.run_all()
    assert set(engine.outputs) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("length", "max_tokens", "message"),
    [
        (40, 1, "the prompt has 40 tokens, but a context of 40 must hold it and at least one new"),
        (30, 20, "30 tokens with max_tokens 20 needs 10 blocks, but the KV pool has 8"),
    ],
)
def test_what_can_never_run_is_refused(
    make_engine: Make, length: int, max_tokens: int, message: str
) -> None:
    engine = make_engine(9, max_model_len=40)
    with pytest.raises(ValueError, match=message):
        engine.add("r", prompt(length), max_tokens=max_tokens)
    assert engine.scheduler.requests == {}
    # The last token needs no slot, so 33 tokens fit into 8 blocks.
    engine.add("r", prompt(28), max_tokens=5, ignore_eos=True)
    engine.run_all()
    assert len(engine.said("r")) == 5


def test_ids_are_used_once_and_queues_are_bounded(make_engine: Make) -> None:
    engine = make_engine(max_waiting_requests=2)
    engine.add("a", prompt(3))
    with pytest.raises(ValueError, match="'a' is in use"):
        engine.add("a", prompt(3))
    engine.add("b", prompt(3))
    with pytest.raises(QueueFull, match="2 requests are waiting"):
        engine.add("c", prompt(3))
    engine.run_all()
    engine.add("a", prompt(3))


def test_the_prefix_cache_is_reset_when_idle_only(make_engine: Make) -> None:
    engine = make_engine()
    engine.add("a", prompt(10))
    engine.step()
    assert not engine.scheduler.reset_prefix_cache(reset_tiers=True)
    engine.run_all()
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)
    engine.add("b", prompt(10))
    engine.run_all()
    assert engine.outputs["b"][0].num_cached_tokens == 0


def test_work_is_there_or_not(make_engine: Make) -> None:
    engine = make_engine()
    assert not engine.scheduler.has_runnable_work()
    engine.add("a", prompt(10))
    assert engine.scheduler.has_runnable_work()
    engine.run_all()
    assert not engine.scheduler.has_runnable_work()


def test_stats_count(make_engine: Make) -> None:
    engine = make_engine()
    engine.add("a", prompt(10))
    engine.add("b", prompt(10))
    engine.step()
    stats = engine.scheduler.stats()
    assert stats["num_running"] == 2
    assert stats["num_waiting"] == stats["num_parked"] == 0
    assert stats["num_blocks"] == 100
    assert stats["num_free_blocks"] == 95
    assert stats["pool_usage"] == pytest.approx(4 / 99)
    assert stats["prompt_tokens"] == 20
    assert stats["cached_tokens_pool"] == 8
    assert stats["scheduled_tokens"] == 12
    engine.run_all()
    ended = {key: n for key, n in engine.scheduler.stats().items() if key.startswith("ended_")}
    assert sum(ended.values()) == 2
