# SPDX-License-Identifier: Apache-2.0
"""Several answers to one prompt: each is what it is alone, and the prompt is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, TokenOutput, share_prompt

from ...tiny_models import make_llama
from .conftest import VOCAB, config_of, finish, prompt_of, request, run

BLOCK = 16
END = VOCAB - 1
WISHES: list[dict[str, Any]] = [
    {}, {"temperature": 0.9, "seed": 1}, {"temperature": 1.4, "seed": 2, "logprobs": 2},
    {"repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"logit_bias": {7: 3.0}, "bad_words_token_ids": ((7, 7),), "presence_penalty": 1.0},
    {"logit_bias": {END: 9.0}, "min_tokens": 4, "ignore_eos": False},
    {"max_tokens": 1}, {"prompt_logprobs": 1, "temperature": 0.7, "seed": 3},
]  # fmt: skip


def answers_of(prompt: list[int]) -> list[AddRequest]:
    return [request(str(i), prompt, **{"max_tokens": 20, **w}) for i, w in enumerate(WISHES)]


def told(outputs: dict[str, TokenOutput]) -> dict[str, Any]:
    return {
        name: (each.new_token_ids, each.finish_reason, each.error) for name, each in outputs.items()
    }


@pytest.fixture(scope="module", params=[32, 37])
def alone(model: Path, request: pytest.FixtureRequest) -> tuple[list[int], dict[str, Any]]:
    """A prompt, and what is answered by requests that share nothing."""
    prompt = prompt_of(request.param)
    core = EngineCore(config_of(model, enable_prefix_caching=False))
    try:
        return prompt, told(run(core, *answers_of(prompt)))
    finally:
        core.shutdown(5.0)


@pytest.mark.parametrize("options", [
    {"max_steps_in_flight": 2}, {"max_steps_in_flight": 2, "async_scheduling": True},
    {"num_blocks": 16, "max_model_len": 96}, {"max_num_batched_tokens": 10},
    {"enable_prefix_caching": False}, {"max_num_seqs": 3},
    {"speculative_method": "ngram", "prompt_lookup_min": 1},
], ids="-".join)  # fmt: skip
def test_each_answer_is_what_it_is_alone(
    model: Path, alone: tuple[list[int], dict[str, Any]], options: dict[str, Any]
) -> None:
    prompt, expected = alone
    options = dict(options)
    depth = options.pop("max_steps_in_flight", 1)
    core = EngineCore(config_of(model, **options), max_steps_in_flight=depth)
    try:
        asked = answers_of(prompt)
        share_prompt(asked)
        assert told(finish(core, core.add(asked[0]), len(asked))) == expected
        assert core.scheduler.counts["forks"] > 0
        assert core.scheduler.manager.pool.is_idle
    finally:
        core.shutdown(5.0)


def test_a_long_prompt_is_computed_once_and_takes_few_more_blocks(tmp_path: Path) -> None:
    """Eight answers of up to 16 tokens to 2,000."""
    model = make_llama(tmp_path, vocab_size=VOCAB, max_position_embeddings=2_100)
    core = EngineCore(config_of(model, num_blocks=400, max_model_len=2_100, block_size=BLOCK))
    asked = [
        request(str(i), prompt_of(2_000), max_tokens=16, temperature=1.0, seed=i) for i in range(8)
    ]
    share_prompt(asked)
    core.add(asked[0])
    most, said = 0, 0
    while core.has_work():
        said += sum(len(output.new_token_ids) for output in core.step())
        most = max(most, core.scheduler.manager.pool.num_held)
    assert said == 8 * 16
    assert core.scheduler.counts["scheduled_tokens"] == 2_000 + 8 * 15
    assert most <= 1.1 * 2_000 / BLOCK
    core.shutdown(5.0)
