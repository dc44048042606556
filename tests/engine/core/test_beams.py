# SPDX-License-Identifier: Apache-2.0
"""Beam search: the beams of transformers, tokens and scores, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from stratakv.engine.core.continued.beam_search import BeamSearch
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.beam_params import BeamSearchParams
from stratakv.engine.request.core_messages import AddRequest, TokenOutput, share_prompt

from ...tiny_models import load_reference, make_llama
from .conftest import VOCAB, config_of, finish, prompt_of, request, run

ENDS = list(range(6, VOCAB, 20))  # so that many answers end before their most tokens
MOST = 14
PENALTIES = (1.0, 0.0, -0.5, 2.0)
Answers = list[tuple[list[int], float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    return make_llama(path, vocab_size=VOCAB, eos_token_id=ENDS)


def search(name: str, prompt: Sequence[int], params: BeamSearchParams, **fields: Any) -> AddRequest:
    """The message that asks for it; `fields` are of each answer's request."""
    wishes = {"max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos, **fields}
    asked = [request(f"{name}{i}", prompt, **wishes) for i in range(params.beam_width)]
    share_prompt(asked, params)
    return asked[0]


def answers_of(outputs: dict[str, TokenOutput], params: BeamSearchParams, name: str) -> Answers:
    found = []
    for index in range(params.beam_width):
        output = outputs[f"{name}{index}"]
        assert output.error is None
        tokens = output.new_token_ids
        ended = "stop" if tokens[-1] in ENDS and not params.ignore_eos else "length"
        assert output.finish_reason == ended
        assert output.logprobs is not None
        assert [position.token_ids for position in output.logprobs] == [[each] for each in tokens]
        total = sum(position.logprobs[0] for position in output.logprobs)
        found.append((tokens, total / len(tokens) ** params.length_penalty))
    return found


def told(core: EngineCore, *asked: AddRequest, count: int) -> dict[str, TokenOutput]:
    """The outputs of so many answers, which come whole."""
    outputs = [output for each in asked for output in core.add(each)]
    found: dict[str, TokenOutput] = {}
    while len(found) < count:
        found |= {output.request_id: output for output in outputs if output.finish_reason}
        outputs = core.step()
    return found


@torch.inference_mode()
def reference(model: Path, prompt: Sequence[int], params: BeamSearchParams) -> Answers:
    out: Any = load_reference(model).generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=params.beam_width, num_return_sequences=params.beam_width, do_sample=False,
        max_new_tokens=params.max_tokens, length_penalty=params.length_penalty,
        early_stopping=params.early_stopping, eos_token_id=None if params.ignore_eos else ENDS,
        pad_token_id=0, output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    found = []
    for row, score in zip(
        out.sequences[:, len(prompt) :].tolist(), out.sequences_scores, strict=True
    ):
        ends = [] if params.ignore_eos else [i for i, token in enumerate(row) if token in ENDS]
        found.append((row[: ends[0] + 1] if ends else row, float(score)))
    return found


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("early", [False, True, "never"])
def test_beams_are_those_of_transformers(model: Path, width: int, early: Any, scale: str) -> None:
    core = EngineCore(config_of(model))
    num_ended = 0
    # With seed 197 two continuations differ by 1e-7, too little for the float32 of transformers.
    for seed in range(4 if scale == "ci" else 197):
        params = BeamSearchParams(
            beam_width=width, max_tokens=1 + (5 * seed + 12) % MOST, early_stopping=early,
            length_penalty=PENALTIES[seed % 4], ignore_eos=seed % 7 == 6,
        )  # fmt: skip
        prompt = prompt_of(9 + seed % 23, seed)
        if width == 1:  # transformers makes one beam by another way
            ours = told(core, search("a", prompt, params), count=1)
            wishes = {"max_tokens": params.max_tokens, "ignore_eos": params.ignore_eos}
            plain = run(core, request("g", prompt, **wishes))
            assert ours["a0"].new_token_ids == plain["g"].new_token_ids or early is not True
            continue
        ours = answers_of(told(core, search("a", prompt, params), count=width), params, "a")
        theirs = reference(model, prompt, params)
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        assert [score for _, score in ours] == pytest.approx([s for _, s in theirs], abs=1e-4)
        num_ended += sum(tokens[-1] in ENDS for tokens, _ in ours)
    assert core.scheduler.manager.pool.is_idle
    assert not core._continuations.beams._families
    assert width == 1 or num_ended > 2
    core.shutdown(5.0)


@pytest.mark.parametrize("options", [
    {"max_steps_in_flight": 2, "async_scheduling": True}, {"enable_prefix_caching": False},
    {"num_blocks": 9, "max_model_len": 64, "preempt_above": 1.0, "admit_below": 1.0},
    {"max_num_seqs": 3}, {"max_num_batched_tokens": 8}, {"reserve": "full", "num_blocks": 30},
    {"speculative_method": "ngram"}, {"scheduling_policy": "priority"},
    {"distributed_executor_backend": "mp"},
], ids="-".join)  # fmt: skip
def test_beams_beside_others_are_the_same(model: Path, options: dict[str, Any]) -> None:
    """Two searches and two requests at once, in pools that are too small for all of them."""
    params = BeamSearchParams(beam_width=4, max_tokens=12)
    prompts = [prompt_of(19, 1), prompt_of(24, 2)]
    alone = EngineCore(config_of(model))
    expected = [
        told(alone, search(name, prompt, params), count=4)
        for name, prompt in zip("ab", prompts, strict=True)
    ]
    others = [request(str(i), prompt_of(20 + i, 3), max_tokens=20) for i in range(2)]
    plain = run(alone, *others)
    alone.shutdown(5.0)
    options = dict(options)
    depth = options.pop("max_steps_in_flight", 1)
    core = EngineCore(config_of(model, **options), max_steps_in_flight=depth)
    asked = [search(name, prompt, params) for name, prompt in zip("ab", prompts, strict=True)]
    outputs = [output for each in (*asked, *others) for output in core.add(each)]
    whole = finish(core, outputs, 2 * 4 + 2)
    for answers in expected:
        for name, output in answers.items():
            assert whole[name].new_token_ids == output.new_token_ids
    for name, output in plain.items():
        assert whole[name].new_token_ids == output.new_token_ids
    assert core.scheduler.manager.pool.is_idle
    assert not core._continuations.beams._families
    assert not core.scheduler._states.kept
    core.shutdown(5.0)


def test_beams_go_on_in_the_blocks_of_those_that_they_continue(model: Path) -> None:
    """The prompt is computed once, and a token for each beam and round behind the first."""
    core = EngineCore(config_of(model, enable_prefix_caching=False))
    params = BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True)
    told(core, search("a", prompt_of(37), params), count=4)
    assert core.scheduler.counts["scheduled_tokens"] == 37 + 4 * 8
    assert core.scheduler.counts["copied_blocks"] > 0
    assert core.scheduler.counts["prompt_tokens"] == 37
    core.shutdown(5.0)


def test_a_search_that_has_begun_goes_on_whatever_waits(model: Path) -> None:
    """Its beams are no new requests, also where it has more than may wait."""
    core = EngineCore(config_of(model, max_num_seqs=2))
    params = BeamSearchParams(beam_width=8, max_tokens=6, ignore_eos=True)
    expected = told(core, search("a", prompt_of(20), params), count=8)
    object.__setattr__(core.scheduler.config, "max_waiting_requests", 3)
    outputs = core.add(search("b", prompt_of(20), params))
    for number in range(5):
        outputs += core.add(request(f"r{number}", prompt_of(9, number)))
    assert [output.error is not None for output in outputs] == [True] * 3
    whole = finish(core, outputs, 8 + 5)
    for index in range(8):
        assert whole[f"b{index}"].new_token_ids == expected[f"a{index}"].new_token_ids
    assert core.scheduler.manager.pool.is_idle
    core.shutdown(5.0)


def test_a_search_under_priorities_keeps_its_turn(model: Path) -> None:
    core = EngineCore(config_of(model, scheduling_policy="priority", max_num_seqs=2))
    params = BeamSearchParams(beam_width=2, max_tokens=8, ignore_eos=True)
    outputs = core.add(search("a", prompt_of(20), params))
    for number in range(9):
        outputs += core.add(request(f"r{number}", prompt_of(9, number), max_tokens=8))
    ended: list[str] = []
    while len(ended) < 2 + 9:
        ended += [output.request_id for output in outputs if output.finish_reason]
        outputs = core.step()
    # Beside its first beam there is a seat, which the first of the others has until it ends.
    assert set(ended[:3]) == {"a0", "a1", "r0"}
    core.shutdown(5.0)


def test_what_is_counted_of_a_search(model: Path) -> None:
    core = EngineCore(config_of(model, enable_prefix_caching=False))
    params = BeamSearchParams(beam_width=4, max_tokens=9, ignore_eos=True)
    answers = told(core, search("a", prompt_of(37), params), count=4)
    assert core.scheduler.counts["reused_tokens_pool"] == 0
    timings = answers["a0"].timings or {}
    assert timings["total_seconds"] > timings["first_token_seconds"] > 0
    assert timings["decode_seconds"] == pytest.approx(
        timings["total_seconds"] - timings["first_token_seconds"]
    )
    core.shutdown(5.0)
    skipping = EngineCore(config_of(model))
    for name in "ab":
        asked = search(name, prompt_of(37), params)
        asked.sampling_params = msgspec.structs.replace(
            asked.sampling_params, skip_reading_prefix_cache=True
        )
        assert told(skipping, asked, count=4)[f"{name}0"].num_cached_tokens == 0
    skipping.shutdown(5.0)


def test_a_search_that_goes_wrong_ends_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(config_of(model))
    params = BeamSearchParams(beam_width=2, max_tokens=9)
    outputs = core.add(search("a", prompt_of(20), params)) + core.add(request("r", prompt_of(9)))
    monkeypatch.setattr(BeamSearch, "advance", lambda *_: 1 / 0)
    whole = finish(core, outputs, 3)
    assert "the beam search failed (ZeroDivisionError" in (whole["a0"].error or "")
    assert whole["a1"].finish_reason == "error"
    assert len(whole["r"].new_token_ids) == 6
    assert core.scheduler.manager.pool.is_idle
    core.shutdown(5.0)


def test_a_search_ends_with_the_last_of_its_clients(model: Path) -> None:
    core = EngineCore(config_of(model))
    params = BeamSearchParams(beam_width=2, max_tokens=40, ignore_eos=True)
    core.add(search("a", prompt_of(20), params))
    for _ in range(3):
        core.step()
    core.abort_requests(["a0"])
    core.step()
    core.abort_requests(["a1"])
    assert not core.scheduler.requests
    assert core.scheduler.manager.pool.is_idle
    other = told(core, search("b", prompt_of(20), params), count=2)
    core.add(search("c", prompt_of(20), params))
    core.step()
    core.abort_requests(["c1"])
    outputs: dict[str, TokenOutput] = {}
    while core.has_work():
        outputs |= {output.request_id: output for output in core.step()}
    assert outputs.keys() == {"c0"}
    assert outputs["c0"].new_token_ids == other["b0"].new_token_ids
    core.shutdown(5.0)


def test_a_step_that_fails_ends_the_search(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(config_of(model))
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    core.add(search("a", prompt_of(20), params))
    core.step()
    monkeypatch.setattr(
        core.executor.runner,
        "launch_step",
        lambda _: (_ for _ in ()).throw(MemoryError("no more")),  # type: ignore[attr-defined]
    )
    outputs = {output.request_id: output for output in core.step()}
    monkeypatch.undo()
    assert outputs.keys() == {"a0", "a1", "a2"}
    assert all(each.finish_reason == "error" for each in outputs.values())
    assert all("no more" in (each.error or "") for each in outputs.values())
    assert core.scheduler.manager.pool.is_idle
    assert not core._continuations.beams._families
    core.shutdown(5.0)


@pytest.mark.parametrize(("fields", "words"), [
    ({"repetition_penalty": 1.2}, "repetition_penalty has no effect on a beam search"),
    ({"logprobs": 2}, "logprobs has no effect"), ({"min_tokens": 1}, "min_tokens"),
    ({"stop_token_ids": (3,)}, "stop_token_ids"),
])  # fmt: skip
def test_wishes_that_no_beam_follows(model: Path, fields: dict[str, Any], words: str) -> None:
    core = EngineCore(config_of(model))
    asked = search("a", prompt_of(5), BeamSearchParams(beam_width=2, max_tokens=4), **fields)
    first, second = core.add(asked)
    assert [first.request_id, second.request_id] == ["a0", "a1"]
    assert words in (first.error or "") and first.error == second.error
    assert not core.has_work()
    core.shutdown(5.0)


def test_a_width_without_enough_continuations_or_ids(model: Path) -> None:
    core = EngineCore(config_of(model))
    outputs = core.add(search("a", [3], BeamSearchParams(beam_width=64, max_tokens=4)))
    assert len(outputs) == 64
    assert all("the vocabulary has 257 tokens; take fewer" in (o.error or "") for o in outputs)
    few = search("b", [3], BeamSearchParams(beam_width=3, max_tokens=4))
    assert few.extras is not None
    few.extras = msgspec.structs.replace(few.extras, forks=few.extras.forks[:1])
    first, _ = core.add(few)
    assert "ids of 2 were given" in (first.error or "")
    core.shutdown(5.0)


@pytest.mark.parametrize(("fields", "words"), [
    ({"beam_width": 0}, "beam_width must be a whole number from 1 to 64, got 0"),
    ({"beam_width": 65}, "got 65"), ({"beam_width": True}, "beam_width"),
    ({"max_tokens": 0}, "max_tokens"), ({"length_penalty": float("nan")}, "length_penalty"),
    ({"length_penalty": 1e3}, "length_penalty must be a number from -16 to 16, got 1000.0"),
    ({"temperature": -1.0}, "temperature must be a number from 0 to 100"),
    ({"early_stopping": "always"}, 'early_stopping must be True, False or "never"'),
    ({"ignore_eos": 1}, "ignore_eos must be True or False"),
])  # fmt: skip
def test_parameters_out_of_bounds(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, **fields})
