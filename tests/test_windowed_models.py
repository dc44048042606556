# SPDX-License-Identifier: Apache-2.0
"""Whole engines on models whose layers see windows, beyond three of them: the greedy tokens of
transformers in float64, and no more memory than a window and a step take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.cache.group_spec import plan_groups
from stratakv.engine.config.engine_config import CacheConfig
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.request.core_messages import AddRequest
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.worker.pool_demand import PoolDemand
from stratakv.tiers.settings.values import ConfigError

from .leftovers import check_nothing_left
from .stepping import step_outputs
from .test_exactness import OUTPUT_TOKENS, ask, prompt, running_core
from .tiny_models import greedy_reference, make_model

BLOCK, WINDOW, BUDGET = 8, 29, 13  # the first and the last are in tokens of `running_core`
MODELS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "gemma3_text": {
        "rope_parameters": None,
        "head_dim": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "num_hidden_layers": 5,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 24,
        "pad_token_id": 0,
    },
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return make_model(tmp_path_factory.mktemp("model"), kind, seed=3, **MODELS[kind])


@pytest.fixture(scope="module")
def texts(model: Path) -> list[tuple[list[int], list[int]]]:
    """Prompts of three windows and more, two with a common beginning, and what is answered."""
    root = prompt(1, 4 * WINDOW)
    prompts = [root[:100] + prompt(2, 9), root, prompt(3, 3 * WINDOW), prompt(4, 7)]
    return [(text, greedy_reference(model, text, OUTPUT_TOKENS)) for text in prompts]


def check_exact(core: EngineCore, texts: list[tuple[list[int], list[int]]], tag: str) -> list[Any]:
    answers = ask(core, [text for text, _ in texts], tag=tag)
    assert [answer.token_ids for answer in answers] == [expected for _, expected in texts]
    return answers


@pytest.mark.parametrize("backend", ["gather", "kernels"])
def test_in_odd_chunks_and_again_from_the_pool(
    model: Path, texts: list[tuple[list[int], list[int]]], backend: str
) -> None:
    with running_core(
        model,
        scheduler={"max_num_batched_tokens": BUDGET},
        model_options={"attention_backend": backend},
    ) as core:
        check_exact(core, texts, "first")
        again = check_exact(core, texts, "again")
        whole = [(len(text) - 1) // BLOCK * BLOCK for text, _ in texts]
        assert [answer.cached["pool"] for answer in again] == whole


def small_pool(model: Path) -> dict[str, Any]:
    """Settings for a pool that holds one request of the longest text and little more."""
    spec, longest = load_model_spec(model), 4 * WINDOW + OUTPUT_TOKENS
    groups = plan_groups(spec.layout(BLOCK, "float64"), 1, spec.layer_attention)
    return {
        "cache": {"num_blocks": PoolDemand(groups, BUDGET).blocks(longest) + 1},
        "model_options": {"max_model_len": longest},
        "scheduler": {"max_num_batched_tokens": BUDGET},
    }


def test_among_preemptions(model: Path, texts: list[tuple[list[int], list[int]]]) -> None:
    short = [prompt(20 + number, 18) for number in range(4)]
    growing = [(text, greedy_reference(model, text, OUTPUT_TOKENS)) for text in short]
    with running_core(model, **small_pool(model)) as core:
        answers = check_exact(core, [*growing, texts[1]], "few")
        preempted = [(answer.last.timings or {})["num_preemptions"] for answer in answers]
        assert sum(preempted) > 0, "the pool was meant to be too small"
        core.step()  # tells the worker who has ended
        check_nothing_left(core)


def test_with_blocks_from_the_cpu_tier(
    model: Path, texts: list[tuple[list[int], list[int]]]
) -> None:
    offload = {"tiers": ("cpu",), "cpu_bytes": 64 * 2**20, "load": "always"}
    with running_core(model, offload=offload, **small_pool(model)) as core:
        for turn in range(2):
            for index, text in enumerate(texts):
                [answer] = check_exact(core, [text], f"{turn}-{index}-")
                if turn and len(text[0]) > WINDOW:
                    assert answer.cached.get("cpu", 0) > 2 * WINDOW


def test_a_group_with_a_window_holds_the_window_and_a_step(
    model: Path, texts: list[tuple[list[int], list[int]]]
) -> None:
    text, expected = texts[1]
    most = (WINDOW + BUDGET - 1 + BLOCK - 1) // BLOCK + 1
    answer: list[int] = []
    with running_core(model, scheduler={"max_num_batched_tokens": BUDGET}) as core:
        kinds = core._groups.attention
        params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
        core.add(AddRequest("long", np.asarray(text, "<i4").tobytes(), params))
        longest = 0
        for outputs in step_outputs(core):
            for output in outputs:
                answer += output.new_token_ids
            if len(answer) == OUTPUT_TOKENS:
                break
            tables = core.scheduler.manager.get_block_ids("long")
            for kind, table in zip(kinds, tables, strict=True):
                held = sum(block > 0 for block in table)
                assert held == len(table) if kind.is_full else held <= most
                longest = max(longest, len(table))
    assert answer == expected
    assert longest > 2 * most, "the request was meant to outgrow its window"


def test_a_pool_need_not_hold_the_whole_context_of_layers_with_windows(tmp_path: Path) -> None:
    options = {"sliding_window": WINDOW, "max_position_embeddings": 4096}
    directory = make_model(tmp_path, "mistral", seed=3, **options)
    scheduler = {"max_num_batched_tokens": BUDGET}
    length = {"max_model_len": 4096}
    with running_core(
        directory, cache={"num_blocks": 8}, scheduler=scheduler, model_options=length
    ) as core:
        assert core.max_model_len == 4096
        text = prompt(9, 5 * WINDOW)
        [answer] = ask(core, [text])
        assert answer.token_ids == greedy_reference(
            directory, text, OUTPUT_TOKENS, guess=answer.token_ids
        )
    with (
        pytest.raises(ConfigError, match="cannot hold one request of 4096 tokens, which takes 7"),
        running_core(directory, cache={"num_blocks": 6}, scheduler=scheduler, model_options=length),
    ):
        raise AssertionError("it started")


def test_attention_may_read_smaller_blocks_than_are_handed_out(
    model: Path, texts: list[tuple[list[int], list[int]]]
) -> None:
    roots = []
    for size in (None, 8, 4):
        with running_core(model, cache={"block_size": 8, "kernel_block_size": size}) as core:
            check_exact(core, texts, "split")
            assert core._page_order() == ("\nkernel blocks of 4" if size == 4 else "")
            asked = AddRequest("name", np.asarray(texts[0][0], "<i4").tobytes(), SamplingParams())
            roots.append(core._request_builder.make_request(asked).block_hashes[0])
    assert roots[0] == roots[1] != roots[2], "another order of bytes has other names"
    with pytest.raises(ConfigError, match=r"a divisor of --block-size 8, not of 3 tokens"):
        CacheConfig(block_size=8, kernel_block_size=3)
