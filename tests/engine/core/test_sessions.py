# SPDX-License-Identifier: Apache-2.0
"""Prompts that come in parts: what is answered is what is answered to the whole, and what has come
is computed before the rest is there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import (
    AddRequest,
    ExtendPrompt,
    RequestExtras,
    TokenOutput,
    share_prompt,
)
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.structured_params import StructuredOutputsParams

from .conftest import VOCAB, config_of, finish, prompt_of, request, run
from .test_speculation import told

OPEN = RequestExtras(more_follows=True)


@contextmanager
def core_with(model: Path, depth: int = 1, **options: Any) -> Iterator[EngineCore]:
    core = EngineCore(config_of(model, **options), max_steps_in_flight=depth)
    try:
        yield core
    finally:
        core.shutdown(5.0)


def check_nothing_left(core: EngineCore) -> None:
    assert not len(core._continuations.sessions)
    assert core.scheduler.manager.pool.is_idle
    assert not core.scheduler.requests
    assert not len(core.scheduler._states.kept)


def opening(name: str, part: Sequence[int], **fields: Any) -> AddRequest:
    return request(name, part, extras=OPEN, **fields)


def part_of(name: str, tokens: Sequence[int], *, is_last: bool = False) -> ExtendPrompt:
    return ExtendPrompt(name, pack_token_ids(tokens) if tokens else b"", is_last)


def cut(prompt: Sequence[int], count: int, rng: random.Random) -> list[list[int]]:
    """The prompt in so many parts, of any length from one token on."""
    places = sorted(rng.sample(range(1, len(prompt)), count - 1))
    return [list(prompt[a:b]) for a, b in zip([0, *places], [*places, len(prompt)], strict=True)]


def feed(
    core: EngineCore, name: str, parts: Sequence[Sequence[int]], rng: random.Random, **fields: Any
) -> dict[str, TokenOutput]:
    """A session, between whose parts any number of steps is made."""
    outputs = core.add(opening(name, parts[0], **fields))
    for number, part in enumerate(parts[1:], start=2):
        for _ in range(rng.choice([0, 0, 1, 3])):
            if core.has_work():
                outputs += core.step()
        outputs += core.extend_prompt(part_of(name, part, is_last=number == len(parts)))
    return finish(core, outputs, 1)


@pytest.mark.parametrize("options", [
    {}, {"depth": 2, "async_scheduling": True}, {"max_num_batched_tokens": 11},
    {"enable_prefix_caching": False},
    {"enable_chunked_prefill": False, "max_model_len": 140, "max_num_batched_tokens": 140},
    {"reserve": "full"}, {"speculative_method": "ngram", "prompt_lookup_min": 1},
], ids=str)  # fmt: skip
def test_the_answer_is_that_to_the_whole_prompt(
    model: Path, options: dict[str, Any], seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [prompt_of(length, length) for length in (9, 48, 61, 120)]
    wishes: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "seed": 4}, {"logprobs": 2, "repetition_penalty": 1.3},
        {"structured_outputs": StructuredOutputsParams(regex="[a-f]{5,9}")},
    ]  # fmt: skip
    with core_with(model, enable_prefix_caching=False) as core:
        asked = [request(str(i), *each) for i, each in enumerate(zip(prompts))]
        for each, wish in zip(asked, wishes, strict=True):
            each.sampling_params = request("", [1], max_tokens=12, **wish).sampling_params
        expected = told(run(core, *asked))
    with core_with(model, **options) as core:
        for number, (prompt, wish) in enumerate(zip(prompts, wishes, strict=True)):
            for turn in range(3):
                parts = cut(prompt, rng.randint(2, 9), rng)
                name = f"{turn} {number}"
                found = told(feed(core, name, parts, rng, max_tokens=12, **wish))
                assert found[name] == expected[str(number)], parts
        check_nothing_left(core)


def test_parts_are_computed_before_the_next_ones_come(model: Path) -> None:
    prompt = prompt_of(61)
    with core_with(model) as core:
        core.add(opening("a", prompt[:20], max_tokens=4))
        counts = core.scheduler.counts
        for end in (20, 21, 50):
            if end > 20:
                assert (
                    core.extend_prompt(part_of("a", prompt[counts["scheduled_tokens"] : end])) == []
                )
            while core.has_work():
                assert core.step() == []
            assert counts["scheduled_tokens"] == end
            assert core.idle_seconds() > 4.0
        outputs = core.extend_prompt(part_of("a", prompt[50:], is_last=True))
        found = finish(core, outputs, 1)["a"]
        assert counts["scheduled_tokens"] == 61 + 3
        assert (found.timings or {})["first_token_seconds"] < 5.0
        check_nothing_left(core)


def test_a_last_part_may_be_empty(model: Path) -> None:
    """The last token alone is computed again, for what is to be chosen behind it."""
    for length in (31, 32, 33):
        prompt = prompt_of(length)
        with core_with(model) as core:
            expected = run(core, request("whole", prompt))["whole"].new_token_ids
        with core_with(model) as core:
            core.add(opening("a", prompt))
            while core.has_work():
                core.step()
            outputs = core.extend_prompt(part_of("a", [], is_last=True))
            assert finish(core, outputs, 1)["a"].new_token_ids == expected
            assert core.scheduler.counts["scheduled_tokens"] == length + 1 + 5
            check_nothing_left(core)


@pytest.mark.parametrize(
    "tiers",
    [{}, {"kv_offload": "cpu", "kv_offload_cpu_bytes": "8MiB", "kv_offload_load": "always"}],
    ids=["pool", "cpu"],
)
def test_blocks_that_others_took_are_found_again_or_computed(
    model: Path, tiers: dict[str, Any], seed: int
) -> None:
    prompt, others = prompt_of(90), [prompt_of(70, i) for i in range(3)]
    with core_with(model) as core:
        expected = run(core, request("a", prompt, max_tokens=9))["a"].new_token_ids
    with core_with(model, num_blocks=20, max_model_len=110, **tiers) as core:
        core.add(opening("a", prompt[:60], max_tokens=9))
        while core.has_work():
            core.step()
        assert len(core.scheduler._states.kept) == 1
        run(core, *[request(f"other {i}", each, max_tokens=20) for i, each in enumerate(others)])
        assert len(core.scheduler._states.kept) == 0
        found = finish(core, core.extend_prompt(part_of("a", prompt[60:], is_last=True)), 1)["a"]
        assert found.new_token_ids == expected
        if tiers:
            assert (found.cached_tokens_by_tier or {}).get("cpu", 0) > 0
        check_nothing_left(core)


def test_a_session_that_gets_no_part_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with core_with(model, session_idle_seconds=0.5) as core:
        sessions = core._continuations.sessions
        core.add(opening("a", prompt_of(20)))
        while core.has_work():
            assert core.step() == []
        assert 0.0 < core.idle_seconds() <= 0.5
        sessions._open["a"].waits_since -= 0.5
        assert core.has_work()
        [output] = core.step()
        assert (output.request_id, output.finish_reason) == ("a", "error")
        assert "no part of the prompt came for 0.5 s" in (output.error or "")
        assert core.call("stats", "")["sessions"] == {"num_open": 0, "num_timed_out": 1}
        assert core.extend_prompt(part_of("a", [1], is_last=True)) == []
        check_nothing_left(core)


def test_a_part_without_tokens_is_a_part_all_the_same(model: Path) -> None:
    """The tokens of a text are told when they are sure: until then it has come, though."""
    with core_with(model, session_idle_seconds=0.5) as core:
        session = core._continuations.sessions._open
        core.add(opening("a", prompt_of(20), max_tokens=3))
        while core.has_work():
            core.step()
        session["a"].waits_since -= 0.4
        assert core.extend_prompt(part_of("a", [])) == []
        assert 0.4 < core.idle_seconds() <= 0.5
        assert not core.has_work()
        outputs = core.extend_prompt(part_of("a", [7], is_last=True))
        found = finish(core, outputs, 1)["a"]
        expected = run(core, request("b", [*prompt_of(20), 7], max_tokens=3))["b"]
        assert found.new_token_ids == expected.new_token_ids


def test_a_full_queue_ends_no_session_that_is_open(model: Path) -> None:
    with core_with(model, max_num_seqs=1) as core:
        object.__setattr__(core.scheduler.config, "max_waiting_requests", 2)
        core.add(opening("a", prompt_of(20), max_tokens=3))
        while core.has_work():
            core.step()
        outputs = []
        for name in ("runs", "waits", "waits too"):
            outputs += core.add(request(name, prompt_of(30, 5), max_tokens=3)) + core.step()
        [refused] = core.add(request("refused", prompt_of(9)))
        assert "waiting" in (refused.error or "")
        again = ExtendPrompt("a", pack_token_ids([9, 8]), num_kept=19)
        outputs += core.extend_prompt(again)
        outputs += core.extend_prompt(part_of("a", [7], is_last=True))
        found = finish(core, outputs, 4)["a"]
        expected = run(core, request("b", [*prompt_of(20)[:19], 9, 8, 7], max_tokens=3))["b"]
        assert found.new_token_ids == expected.new_token_ids


def test_sessions_that_are_aborted_leave_nothing(model: Path) -> None:
    with core_with(model, max_num_batched_tokens=16) as core:
        for num_steps in range(5):
            core.add(opening("a", prompt_of(40)))
            for _ in range(num_steps):
                core.step()
            core.extend_prompt(part_of("a", prompt_of(9), is_last=num_steps % 2 == 0))
            core.abort_requests(["a"])
            while core.has_work():
                assert core.step() == []
            check_nothing_left(core)
        core.add(opening("a", prompt_of(20)))
        while core.has_work():
            core.step()
        core.abort_requests(["a", "nobody"])
        check_nothing_left(core)


@pytest.mark.parametrize(("extras", "wishes", "words"), [
    ({"pooling": "mean"}, {}, "without an embedding"),
    ({"hand_over": True}, {}, "without the fields of a router"),
    ({}, {"prompt_logprobs": 1}, "without prompt_logprobs"),
    ({}, {"stop_token_ids": [VOCAB]}, "must be token ids from 0"),
])  # fmt: skip
def test_what_goes_with_whole_prompts_alone_is_refused(
    model: Path, extras: dict[str, Any], wishes: dict[str, Any], words: str
) -> None:
    with core_with(model) as core:
        asked = request("a", prompt_of(9), **wishes)
        asked.extras = RequestExtras(more_follows=True, **extras)
        [output] = core.add(asked)
        assert output.finish_reason == "error" and words in (output.error or "")
        forked = [opening("a", prompt_of(9)), opening("b", prompt_of(9))]
        share_prompt(forked)
        [output] = core.add(forked[0])
        assert "without n;" in (output.error or "")
        check_nothing_left(core)


def test_parts_that_cannot_be_end_the_session(model: Path) -> None:
    with core_with(model, max_model_len=40) as core:
        for tokens, words in (([VOCAB], "token ids must be"),
                              (prompt_of(20), "the prompt has 40 tokens")):  # fmt: skip
            core.add(opening("a", prompt_of(20)))
            core.step()
            [output] = core.extend_prompt(part_of("a", tokens))
            assert output.finish_reason == "error" and words in (output.error or ""), output
            while core.has_work():
                assert core.step() == []
            check_nothing_left(core)
        core.add(opening("a", prompt_of(20)))
        [output] = core.add(opening("a", prompt_of(20)))
        assert "in use" in (output.error or "")
        [output] = core.add(request("a", prompt_of(20)))
        assert "in use" in (output.error or "")
        core.abort_requests(["a"])
    with core_with(model, max_num_seqs=1) as core:
        object.__setattr__(core._continuations.sessions, "most_sessions", 2)
        for name in "abc":
            outputs = core.add(opening(name, prompt_of(9)))
            while core.has_work():
                core.step()
        assert outputs[0].error_code == "overloaded"


def test_a_prompt_whose_first_token_changes_begins_anew(model: Path) -> None:
    """Nothing of the parts is kept: as where a text's parts join to wholly other tokens."""
    parts, whole = prompt_of(20), prompt_of(33, 5)
    with core_with(model) as core:
        expected = run(core, request("whole", whole))["whole"].new_token_ids
    for steps in (0, 1):
        with core_with(model) as core:
            core.add(opening("a", parts))
            for _ in range(steps):
                core.step()
            last = ExtendPrompt("a", pack_token_ids(whole), is_last=True, num_kept=0)
            assert finish(core, core.extend_prompt(last), 1)["a"].new_token_ids == expected
            check_nothing_left(core)


def test_a_session_that_restarts_keeps_what_is_being_computed(model: Path) -> None:
    """One part has been computed and the next one is under way when ten of its tokens go."""
    prompt = prompt_of(60)
    whole = [*prompt[:50], *prompt_of(9, 7)]
    with core_with(model) as core:
        expected = run(core, request("whole", whole))["whole"].new_token_ids
    with core_with(model) as core:
        core.add(opening("a", prompt[:20]))
        while core.has_work():
            core.step()
        assert core.extend_prompt(part_of("a", prompt[20:])) == []
        last = ExtendPrompt("a", pack_token_ids(whole[50:]), is_last=True, num_kept=50)
        assert finish(core, core.extend_prompt(last), 1)["a"].new_token_ids == expected
        check_nothing_left(core)
