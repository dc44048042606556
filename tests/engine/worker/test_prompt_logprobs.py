# SPDX-License-Identifier: Apache-2.0
"""Prompts' log-probabilities, whole and once: chunks, slices, preemptions at any moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stratakv.engine.request.logprobs import PositionLogprobs, PromptLogprobs
from stratakv.engine.scheduler.output import ModelRunnerOutput
from stratakv.engine.worker import prompt_logprobs

COUNT = 3
LENGTH = 70


@pytest.fixture
def expected(checkpoint: Callable[..., Path]) -> Callable[[Sequence[int]], torch.Tensor]:
    """`expected(prompt)`: transformers' log-probabilities `[tokens, vocab]` in float64."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(checkpoint(), dtype=torch.float64)

    @torch.inference_mode()
    def compute(prompt: Sequence[int]) -> torch.Tensor:
        return model(torch.tensor([list(prompt)])).logits[0].log_softmax(dim=-1)

    return compute


def check(
    entries: PromptLogprobs, prompt: Sequence[int], expected: torch.Tensor, count: int = COUNT
) -> None:
    assert len(entries) == len(prompt)
    assert entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        assert isinstance(entry, PositionLogprobs)
        row = expected[position - 1]
        assert entry.token_ids == [prompt[position], *row.topk(count).indices.tolist()]
        assert entry.logprobs == pytest.approx(row[entry.token_ids].tolist(), abs=1e-4)


def steps_until(drive: Any, name: str, chunk: int) -> list[ModelRunnerOutput]:
    """Steps until the request has a token."""
    results = [drive.step(chunk)]
    while not results[-1].sampled_token_ids[name]:
        results.append(drive.step(chunk))
    return results


@pytest.mark.parametrize("chunk", [1, 7, 16, 69, 70, 1000])
def test_they_come_with_the_first_token(chunk, checkpoint, driver, prompt_of, expected):
    prompt = prompt_of(LENGTH)
    drive = driver(checkpoint())
    drive.add("a", prompt, prompt_logprobs=COUNT)
    *before, last = steps_until(drive, "a", chunk)
    assert len(before) == -(-LENGTH // chunk) - 1
    assert all(not result.prompt_logprobs for result in before)
    check(last.prompt_logprobs["a"], prompt, expected(prompt))
    assert not any(drive.step().prompt_logprobs for _ in range(3))


def test_logits_are_made_in_slices(checkpoint, driver, prompt_of, expected, monkeypatch):
    monkeypatch.setattr(prompt_logprobs, "LOGITS_ROWS", 16)
    made: list[int] = []
    compute = prompt_logprobs.prompt_logprobs

    def noted(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> list[PositionLogprobs]:
        made.append(len(logits))
        return compute(logits, token_ids, count)

    monkeypatch.setattr(prompt_logprobs, "prompt_logprobs", noted)
    prompt = prompt_of(LENGTH)
    drive = driver(checkpoint())
    drive.add("a", prompt, prompt_logprobs=COUNT)
    check(drive.step().prompt_logprobs["a"], prompt, expected(prompt))
    assert made == [16, 16, 16, 16, 5]


def test_a_prompt_of_one_token_has_one_empty_entry(checkpoint, driver):
    drive = driver(checkpoint())
    drive.add("a", [5], prompt_logprobs=COUNT)
    assert drive.step().prompt_logprobs == {"a": [None]}


def test_company_with_other_wishes(checkpoint, driver, prompt_of, expected):
    """Rows move when others end; each gets its own, and those who do not ask get nothing."""
    wishes = {"a": 0, "b": None, "c": 5, "d": 2, "e": None}
    prompts = {name: prompt_of(20 + 13 * i, i) for i, name in enumerate(wishes)}
    drive = driver(checkpoint())
    delivered: dict[str, PromptLogprobs] = {}
    for name, count in wishes.items():
        drive.add(name, prompts[name], prompt_logprobs=count)
        result = drive.step(chunk=6)
        delivered |= result.prompt_logprobs
        if name == "d":
            drive.finish("b")
    for _ in range(12):
        result = drive.step(chunk=6)
        assert not delivered.keys() & result.prompt_logprobs.keys()
        delivered |= result.prompt_logprobs
    assert delivered.keys() == {"a", "c", "d"}
    for name, entries in delivered.items():
        check(entries, prompts[name], expected(prompts[name]), wishes[name] or 0)


@pytest.mark.parametrize("forget", [False, True])
def test_preempted_at_any_moment(forget, checkpoint, driver, prompt_of, expected, seed):
    """Before the first token nothing is lost, after it nothing comes twice."""
    rng = random.Random(seed)
    for turn in range(8):
        prompt = prompt_of(LENGTH, turn)
        drive = driver(checkpoint())
        drive.add("a", prompt, prompt_logprobs=COUNT)
        drive.add("b", prompt_of(9))
        delivered: list[PromptLogprobs] = []
        for _ in range(rng.randrange(1, 14)):
            delivered += drive.step(chunk=8).prompt_logprobs.values()
        drive.preempt("a", forget=forget)
        for _ in range(rng.randrange(3)):
            delivered += drive.step(names=["b"]).prompt_logprobs.values()
        for _ in range(14):
            delivered += drive.step(chunk=rng.choice([5, 8, 20])).prompt_logprobs.values()
        [entries] = delivered
        check(entries, prompt, expected(prompt))


def test_a_request_that_ends_before_its_first_token_leaves_nothing(checkpoint, driver, prompt_of):
    drive = driver(checkpoint())
    drive.add("a", prompt_of(LENGTH), prompt_logprobs=COUNT)
    drive.step(chunk=16)
    drive.finish("a")
    drive.add("a", prompt_of(9), prompt_logprobs=None)
    assert drive.step().prompt_logprobs == {}
    assert not drive.runner._prompt_logprobs.is_active


def test_who_does_not_ask_pays_nothing(checkpoint, driver, prompt_of):
    """No more rows leave the model, and nothing is planned."""
    drive = driver(checkpoint())
    rows: list[int] = []
    forward = drive.runner.model.forward

    def noted(*args: Any, **options: Any) -> torch.Tensor:
        rows.append(len(args[-1]))
        return forward(*args, **options)

    drive.runner.model.forward = noted
    drive.add("a", prompt_of(LENGTH))
    drive.add("b", prompt_of(20), logprobs=2)
    result = drive.step(chunk=30)
    assert not drive.runner._prompt_logprobs.is_active
    assert rows == [1]
    assert result.prompt_logprobs == {}
    assert result.logprobs.keys() == {"b"}
    [entry] = result.logprobs["b"]
    assert entry.token_ids[0] == result.sampled_token_ids["b"][0] == entry.token_ids[1]
    assert (len(entry.token_ids), entry.rank) == (3, 1)
