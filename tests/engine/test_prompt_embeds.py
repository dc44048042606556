# SPDX-License-Identifier: Apache-2.0
"""Prompts of numbers through the Python API: the answers of the tokens that they stand for, and
caches that tell them apart."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save

from stratakv.engine import LLM, SamplingParams
from stratakv.engine.request.prompt_embeds import read_embeds, write_embeds

OPTIONS: dict[str, Any] = {"dtype": "float64", "num_blocks": 100, "max_num_batched_tokens": 32,
                           "max_num_seqs": 8, "num_threads": 1, "block_size": 8}  # fmt: skip
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def table(tiny_model: Path) -> np.ndarray:
    """The model's own embedding of each token."""
    (path,) = tiny_model.glob("*.safetensors")
    return load_file(path)["model.embed_tokens.weight"].astype(np.float64)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, **OPTIONS) as llm:
        yield llm


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=length)


def test_they_say_what_their_tokens_would(llm: LLM, table: np.ndarray) -> None:
    for seed, length in enumerate((1, 7, 8, 45, 100)):
        ids = prompt_of(seed, length)
        llm.reset_prefix_cache()
        [by_tokens, by_numbers] = llm.generate([ids, table[ids]], GREEDY)
        assert by_numbers.token_ids == by_tokens.token_ids
        assert by_numbers.num_cached_tokens == 0, "names of tokens are not names of numbers"


def test_a_second_time_comes_from_the_pool(llm: LLM, table: np.ndarray) -> None:
    llm.reset_prefix_cache()
    embeds = table[prompt_of(9, 50)]
    first, again = (llm.generate([embeds], GREEDY)[0] for _ in range(2))
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 48)
    assert again.token_ids == first.token_ids
    other = embeds.copy()
    other[20] += 1e-9
    [changed] = llm.generate([other], GREEDY)
    assert changed.num_cached_tokens == 16, "two blocks are the same, and the third is not"
    [as_float32] = llm.generate([embeds.astype(np.float32)], GREEDY)
    assert as_float32.num_cached_tokens == 0
    [salted] = llm.generate([embeds], GREEDY, cache_salt="other")
    assert salted.num_cached_tokens == 0


def test_they_come_through_the_tiers_and_survive_preemption(
    tiny_model: Path, table: np.ndarray, llm: LLM
) -> None:
    prompts = [table[prompt_of(20 + i, 60)] for i in range(6)]
    expected = [output.token_ids for output in llm.generate(prompts, GREEDY)]
    options = OPTIONS | {"num_blocks": 26, "admit_below": 1.0, "preempt_above": 1.0}
    with LLM(
        tiny_model,
        **options,
        kv_offload="cpu",
        kv_offload_cpu_bytes="4MiB",
        kv_offload_load="always",
    ) as small:
        for _ in range(3):
            outputs = small.generate(prompts, GREEDY)
            assert [output.token_ids for output in outputs] == expected
        assert any(output.cached_tokens_by_tier["cpu"] for output in outputs)
        assert small.stats()["scheduler"]["preemptions"] > 0


@pytest.mark.parametrize("in_process", [True, False])
@pytest.mark.slow
def test_in_other_processes_too(tiny_model: Path, table: np.ndarray, in_process: bool) -> None:
    ids = prompt_of(3, 30)
    options = OPTIONS | ({"distributed_executor_backend": "mp"} if in_process else {})
    with LLM(tiny_model, in_process=in_process, **options) as llm:
        [by_tokens, by_numbers] = llm.generate([ids, table[ids]], GREEDY)
        assert by_numbers.token_ids == by_tokens.token_ids


def test_what_is_written_is_what_others_write(table: np.ndarray) -> None:
    for dtype in (np.float16, np.float32, np.float64):
        values = table[:5].astype(dtype)
        ours, theirs = write_embeds(values), save({"prompt_embeds": values})
        for data in (ours, theirs):
            read = read_embeds(data, values.shape[1], 9)
            assert (read.astype(dtype) == values).all()


@pytest.mark.parametrize(
    ("change", "params", "words"),
    [
        (lambda t: t[:4, None], GREEDY, r"not \[4, 1, \d+\]"),
        (lambda t: t[4], GREEDY, r"the shape \[tokens, (\d+)\], not \[\1\]"),
        (lambda t: np.array(t[4, 4]), GREEDY, r"the shape \[tokens, \d+\], not \[1\]"),
        (lambda t: t[:4, :-1], GREEDY, "prompt 0: prompt embeddings of this model have the shape"),
        (lambda t: t[:4].astype(int), GREEDY, "are float16, float32 or float64, not int64"),
        (lambda t: t[:0], GREEDY, "of 1 to 255 tokens, and these of 0"),
        (lambda t: np.repeat(t, 2, 0), GREEDY, "of 1 to 255 tokens, and these of 514"),
        (lambda t: t[:4] * np.inf, GREEDY, "finite numbers"),
        (lambda t: t[:4], SamplingParams(prompt_logprobs=1), "have no tokens whose log"),
        (lambda t: t[:4], SamplingParams(repetition_penalty=1.1), "repetition_penalty counts"),
    ],
)
def test_what_cannot_be_used(
    llm: LLM, table: np.ndarray, change: Any, params: SamplingParams, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        llm.generate([change(table)], params)
