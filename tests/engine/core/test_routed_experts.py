# SPDX-License-Identifier: Apache-2.0
"""The experts that are told with an answer are those that transformers' router chooses."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.request.routed_rows import RoutedRows
from stratakv.engine.text.expert_rows import join_routed_rows
from stratakv.tiers.settings.values import ConfigError

from ...tiny_models import VOCAB, load_reference, make_llama, make_model

LAYERS, EXPERTS, CHOSEN, BLOCK = 3, 6, 2, 8
OPTIONS = {
    "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": 24,
    "num_hidden_layers": LAYERS, "norm_topk_prob": True,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
Experts = npt.NDArray[Any]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layer in the middle is dense."""
    return make_model(
        tmp_path_factory.mktemp("experts"), "qwen3_moe", seed=4, **OPTIONS, mlp_only_layers=[1]
    )


def engine(model: Path, **options: Any) -> LLM:
    options = {"dtype": "float64", "num_blocks": 120, "num_threads": 1} | options
    return LLM(
        model, block_size=BLOCK, max_num_batched_tokens=24, max_num_seqs=4,
        enable_return_routed_experts=True, **options,
    )  # fmt: skip


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=length)


@torch.inference_mode()
def by_transformers(model: Path, tokens: list[int]) -> Experts:
    """`[tokens, sparse layers, CHOSEN]`, the best first."""
    reference = load_reference(model)
    logits = reference(torch.tensor([tokens]), output_router_logits=True).router_logits
    return torch.stack([each.topk(CHOSEN).indices for each in logits], 1).numpy()


def check(model: Path, tokens: list[int], answer: Any, start: int = 0) -> None:
    found, whole = answer.outputs[0].routed_experts, [*tokens, *answer.token_ids]
    assert found.dtype == np.uint8 and found.shape == (len(whole) - 1 - start, 2, CHOSEN)
    assert np.array_equal(found, by_transformers(model, whole[:-1])[start:])


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with engine(model) as llm:
        yield llm


def test_experts_are_those_of_transformers_in_chunks_and_among_others(llm, model):
    prompts = [prompt(seed, length) for seed, length in ((1, 5), (2, 61), (3, 100))]
    for tokens, answer in zip(prompts, llm.generate(prompts, GREEDY), strict=True):
        check(model, tokens, answer)


def test_a_prompt_that_is_cached_is_computed_for_its_experts(llm, model):
    tokens = prompt(4, 50)
    llm.generate([tokens], GREEDY)
    [again] = llm.generate([tokens], GREEDY)
    assert again.outputs[0].num_cached_tokens == 0
    check(model, tokens, again)


def test_what_stands_before_the_first_token_asked_for_may_be_cached(llm, model):
    tokens = prompt(5, 50)
    llm.generate([tokens], GREEDY)
    for start, cached in ((37, 32), (50, 48), (16, 16), (7, 0)):
        params = SamplingParams(
            max_tokens=12, temperature=0.0, ignore_eos=True, routed_experts_prompt_start=start
        )
        [answer] = llm.generate([tokens], params)
        assert answer.outputs[0].num_cached_tokens == cached
        check(model, tokens, answer, start)


def test_preempted_requests_tell_each_token_once(model):
    prompts = [prompt(seed, 40) for seed in range(4)]
    longer = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    with engine(model, num_blocks=26) as llm:
        answers = llm.generate(prompts, longer)
    assert sum(answer.outputs[0].timings["num_preemptions"] for answer in answers) > 0
    for tokens, answer in zip(prompts, answers, strict=True):
        check(model, tokens, answer)


def test_drafts_that_are_not_accepted_leave_nothing(model):
    tokens = prompt(6, 9) * 5
    longer = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    with engine(model, speculative_method="ngram", num_speculative_tokens=3) as llm:
        [answer] = llm.generate([tokens], longer)
    check(model, tokens, answer)


def test_each_of_several_answers_has_its_own(llm, model):
    tokens = prompt(7, 20)
    params = SamplingParams(n=3, max_tokens=6, temperature=1.0, seed=3, ignore_eos=True)
    [answer] = llm.generate([tokens], params)
    for choice in answer.outputs:
        whole = [*tokens, *choice.token_ids]
        assert np.array_equal(choice.routed_experts, by_transformers(model, whole[:-1]))


def test_layer_by_layer_and_in_two_steps_in_flight(model, monkeypatch):
    from stratakv.engine.models.layer import Layer

    monkeypatch.setattr(Layer, "in_library", lambda *_: None)
    tokens = prompt(8, 30)
    with engine(model, async_scheduling=True) as llm:
        [answer] = llm.generate([tokens], GREEDY)
    check(model, tokens, answer)


def test_engines_that_tell_nothing_refuse_the_question(model):
    params = SamplingParams(routed_experts_prompt_start=0)
    with (
        LLM(model, dtype="float64", num_blocks=40, num_threads=1) as llm,
        pytest.raises(ValueError, match="start it with --enable-return-routed-experts"),
    ):
        llm.generate([prompt(1, 5)], params)


def test_models_without_experts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"is for mixtures of experts, and .* has none"):
        engine(make_llama(tmp_path))


def test_parts_may_overlap_and_the_last_counts():
    def rows(start: int, *numbers: int) -> RoutedRows:
        return RoutedRows(start, (len(numbers), 1, 1), bytes(numbers))

    joined = join_routed_rows([rows(4, 1, 2, 3), rows(6, 9, 8), rows(8)], 8)
    assert joined[:, 0, 0].tolist() == [1, 2, 9, 8]
    assert join_routed_rows([rows(4, 1, 2, 3)], 6)[:, 0, 0].tolist() == [1, 2]
    assert join_routed_rows([rows(4, 1)], 3).shape == (0, 1, 1)


def decode(text: str) -> Experts:
    found: Experts = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return found
