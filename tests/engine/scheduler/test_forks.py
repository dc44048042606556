# SPDX-License-Identifier: Apache-2.0
"""Forks: answers to one prompt, which is computed once; its blocks are copied before they differ.

The worker (`conftest.py`) checks every slot that is read; requests with other seeds say other
things, so a block that two of them write to is noticed.
"""

from __future__ import annotations

import pytest

from stratakv.connector.page_keys import group_suffix
from stratakv.engine.models.layer_attention import LayerAttention, chunk, full, window
from stratakv.engine.request.request import Request
from stratakv.engine.request.request import RequestStatus as Status
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler.scheduler import Pause

from .conftest import HASHER, Engine, build_engine, reference
from .dict_tiers import SIZE, DictTiers

PROMPT = [7 * i % 49 + 1 for i in range(SIZE * 5)]
WINDOWED = (full(), window(6), chunk(8))


def add_family(
    engine: Engine, prompt: list[int], count: int, max_tokens: int = 5, **options: object
) -> list[str]:
    """Answers to a prompt, each with a seed of its own; their names."""
    first = engine.add("0", prompt, max_tokens=max_tokens, seed=0, ignore_eos=True, **options)
    for seed in range(1, count):
        engine.add(
            str(seed), prompt, fork_of=first, max_tokens=max_tokens, seed=seed, ignore_eos=True,
            **options,
        )  # fmt: skip
    return [str(seed) for seed in range(count)]


def check_answers(engine: Engine, prompt: list[int], names: list[str], max_tokens: int = 5) -> None:
    for name in names:
        expected = reference(prompt, max_tokens, ignore_eos=True, seed=int(name))
        assert engine.said(name) == expected, name
    assert engine.manager.pool.is_idle
    assert not engine.manager.shared_tails.families
    assert not engine.scheduler._states.num_forking


@pytest.mark.parametrize("length", range(SIZE * 2, SIZE * 3 + 1))
@pytest.mark.parametrize("attention", [(full(),), WINDOWED], ids=["full", "windowed"])
def test_the_prompt_is_computed_once(length: int, attention: tuple[LayerAttention, ...]) -> None:
    engine = build_engine(attention=attention)
    names = add_family(engine, PROMPT[:length], 8)
    assert engine.scheduler.num_waiting == 8
    output = engine.step()
    assert output.num_scheduled_tokens == {"0": length}
    assert [len(engine.said(name)) for name in names] == [1] * 8
    # Of the others nothing was computed, and nothing was found either.
    cached = [engine.outputs[name][0].num_cached_tokens for name in names]
    assert cached == [0] + [length] * 7
    assert engine.scheduler.counts["reused_tokens_pool"] == 0
    blocks = -(-length // SIZE)
    assert engine.manager.pool.num_held == blocks * len(attention)
    engine.run_all()
    assert engine.scheduler.counts["scheduled_tokens"] == length + 8 * 4
    # The last one of them writes in place.
    assert engine.num_copied == (7 * len(attention) if length % SIZE else 0)
    check_answers(engine, PROMPT[:length], names)


@pytest.mark.parametrize("length", [SIZE * 2, SIZE * 2 + 3])
def test_drafts_are_computed_behind_blocks_that_are_shared_no_more(length: int) -> None:
    engine = build_engine(most_drafts=4, looks_ahead=True)
    names = add_family(engine, PROMPT[:length], 3, max_tokens=12)
    output = engine.step()
    # The first to be written is a new block, or one that they share.
    assert len(output.wanted_drafts) == (0 if length % SIZE else 3)
    assert len(engine.step().wanted_drafts) == 3
    engine.run_all()
    assert engine.scheduler.speculation.num_accepted_tokens > 3  # type: ignore[union-attr]
    check_answers(engine, PROMPT[:length], names, max_tokens=12)


@pytest.mark.parametrize("length", [2_000, 1_999])
def test_blocks_beyond_those_of_the_prompt_are_few(length: int) -> None:
    """As of the gate: eight answers of up to 16 tokens to a prompt of 2,000."""
    engine = build_engine(2_000, max_model_len=2_100, max_num_batched_tokens=512)
    prompt = [i % 49 + 1 for i in range(length)]
    add_family(engine, prompt, 8, max_tokens=16)
    most = 0
    while engine.scheduler.requests:
        engine.step()
        most = max(most, engine.manager.pool.num_held)
    assert most <= 1.1 * -(-length // SIZE)
    assert engine.scheduler.counts["scheduled_tokens"] == length + 8 * 15


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_a_prompt_in_parts_and_a_cache_that_is_off(caching: bool) -> None:
    engine = build_engine(caching=caching, max_num_batched_tokens=9)
    names = add_family(engine, PROMPT[:18], 3)
    engine.step()
    assert engine.scheduler.num_running == 1
    engine.step()
    assert engine.scheduler.num_running == 3
    engine.run_all()
    assert engine.scheduler.counts["scheduled_tokens"] == 18 + 3 * 4
    check_answers(engine, PROMPT[:18], names)


def test_who_finds_no_seat_waits_for_its_own_turn_before_others() -> None:
    engine = build_engine(max_num_seqs=3)
    names = add_family(engine, PROMPT[:18], 5)
    engine.add("later", PROMPT[:3], max_tokens=1)
    engine.step()
    assert [each.request_id for each in engine.scheduler._states.running] == ["0", "1", "2"]
    assert [each.request_id for each in engine.scheduler._states.waiting] == ["3", "4", "later"]
    engine.run_all()
    assert engine.scheduler.counts["forks"] == 2
    check_answers(engine, PROMPT[:18], names)


def test_a_full_pool_sends_some_back_and_all_say_what_they_would() -> None:
    engine = build_engine(1 + 12)
    names = add_family(engine, PROMPT[:18], 6, max_tokens=14)
    engine.run_all()
    assert engine.scheduler.counts["forks"] > 0
    assert engine.scheduler.counts["preemptions"] > 0
    check_answers(engine, PROMPT[:18], names, 14)


def test_the_last_block_is_written_in_place_where_there_is_no_room_for_a_copy() -> None:
    """With one free block left, one of two gets it; the other needs none."""
    engine = build_engine(1 + 6)
    names = add_family(engine, PROMPT[:18], 2, max_tokens=3)
    engine.run_all()
    assert engine.scheduler.counts["preemptions"] == 0
    assert engine.num_copied == 1
    check_answers(engine, PROMPT[:18], names, 3)


@pytest.mark.parametrize("has_begun", [False, True], ids=["waiting", "computing"])
def test_who_waited_for_one_that_ends_computes_the_prompt(has_begun: bool) -> None:
    engine = build_engine(max_num_batched_tokens=9)
    names = add_family(engine, PROMPT[:18], 3)
    if has_begun:
        engine.step()
    engine.take(engine.scheduler.finish_requests(["0"]))
    assert [each.request_id for each in engine.scheduler._states.waiting] == ["1", "2"]
    engine.run_all()
    assert engine.finish_reason("0") == "abort"
    check_answers(engine, PROMPT[:18], names[1:])


def test_who_is_aborted_while_it_waits_leaves_nothing() -> None:
    engine = build_engine()
    names = add_family(engine, PROMPT[:18], 3)
    engine.take(engine.scheduler.finish_requests(["1"]))
    assert engine.scheduler.num_waiting == 2
    engine.take(engine.scheduler.finish_requests(["2"]))
    assert not engine.scheduler._states.num_forking
    engine.run_all()
    assert engine.scheduler.counts["forks"] == 0
    check_answers(engine, PROMPT[:18], names[:1])


def test_a_step_that_fails_ends_all_that_chose_in_it() -> None:
    engine = build_engine()
    names = add_family(engine, PROMPT[:18], 3)
    output = engine.scheduler.schedule()
    engine.take(engine.scheduler.fail_step(output, "boom"))
    assert [engine.finish_reason(name) for name in names] == ["error"] * 3
    assert engine.manager.pool.is_idle
    assert not engine.manager.shared_tails.families


def test_nothing_is_copied_for_one_that_is_sent_back_in_the_same_step() -> None:
    """A more important request needs the block that the copy was to go to."""
    engine = build_engine(1 + 8, max_num_batched_tokens=12, policy="priority")
    names, first = ["0", "1"], None
    for name in names:
        params = SamplingParams(max_tokens=5, seed=int(name), ignore_eos=True)
        request = Request(name, PROMPT[:18], params, block_hasher=HASHER, priority=9, fork_of=first)
        engine.scheduler.add_request(request)
        first = first or request
    engine.step()
    engine.add("urgent", PROMPT[1:11], max_tokens=2)
    engine.step()
    assert engine.scheduler.counts["forks"] == 1
    assert engine.scheduler.num_running == 3
    output = engine.step()
    assert output.preempted_request_ids == {"0", "1"}
    assert output.block_copies == []
    engine.run_all()
    assert engine.said("urgent") == reference(PROMPT[1:11], 2)
    check_answers(engine, PROMPT[:18], names)


def test_a_load_is_waited_for_once() -> None:
    tiers = DictTiers()
    engine = build_engine(tiers=tiers)
    add_family(engine, PROMPT, 1)
    engine.run_all()
    engine.outputs.clear()
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)
    for digest, held in engine.contents.items():
        tiers.kept[digest + group_suffix(0)] = held
    names = add_family(engine, PROMPT, 4)
    engine.run_all()
    assert engine.scheduler.counts["loads"] == 1
    assert engine.scheduler.counts["forks"] == 3
    check_answers(engine, PROMPT, names)


def test_nobody_is_forked_during_a_pause() -> None:
    engine = build_engine(max_num_batched_tokens=9)
    names = add_family(engine, PROMPT[:18], 3)
    engine.step()
    engine.scheduler.pause(Pause.NEW)
    engine.step()
    assert engine.scheduler.num_running == 1
    assert engine.scheduler.num_waiting == 2
    engine.scheduler.resume()
    engine.run_all()
    check_answers(engine, PROMPT[:18], names)


@pytest.mark.parametrize(
    ("prompt", "options"),
    [(PROMPT[:17], {}), (PROMPT[1:19], {}), (PROMPT[:18], {"prompt_logprobs": 1})],
    ids=["shorter", "other", "logprobs"],
)
def test_who_asks_for_something_else_is_no_fork(
    prompt: list[int], options: dict[str, object]
) -> None:
    engine = build_engine()
    first = engine.add("0", PROMPT[:18])
    params = SamplingParams(max_tokens=5, **options)  # type: ignore[arg-type]
    engine.scheduler.add_request(Request("1", prompt, params, fork_of=first))
    assert not engine.scheduler._states.num_forking
    engine.run_all()
    assert engine.said("1") == reference(prompt, 5)


def test_who_comes_when_the_prompt_has_been_computed_is_no_fork() -> None:
    engine = build_engine()
    first = engine.add("0", PROMPT[:18])
    engine.step()
    late = engine.add("1", PROMPT[:18], fork_of=first)
    assert late.fork_of == ""
    engine.take(engine.scheduler.finish_requests(["0"]))
    gone = engine.add("2", PROMPT[:18], fork_of=first)
    assert gone.status is Status.WAITING
    engine.run_all()
    assert engine.said("1") == engine.said("2") == reference(PROMPT[:18], 5)


def test_forks_take_the_digests_of_the_blocks_from_the_first() -> None:
    hashed = []

    def digests(request: Request) -> list[bytes]:
        hashed.append(request.request_id)
        return HASHER.digests(request)

    hasher = HASHER._replace(digests=digests)
    params = SamplingParams(max_tokens=5)
    first = Request("0", PROMPT, params, block_hasher=hasher)
    second = Request("1", PROMPT, params, block_hasher=hasher, fork_of=first)
    assert second.block_hashes == first.block_hashes
    assert second.block_hashes is not first.block_hashes
