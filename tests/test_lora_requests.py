# SPDX-License-Identifier: Apache-2.0
"""Requests of every kind with adapters, by the Python API: each computes what PEFT computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from stratakv.engine.llm import LLM
from stratakv.engine.offline.outputs import RequestOutput
from stratakv.engine.offline.prompt_runner import CheckedPrompt
from stratakv.engine.request.beam_params import BeamSearchParams
from stratakv.engine.request.sampling_params import SamplingParams

from .peft_adapters import (
    ADAPTERS,
    AdapterFolders,
    adapters_of,
    check_greedy,
    load_adapted,
    peft_logits,
)
from .test_exactness import prompt

NUM_TOKENS = 8
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
BASES = list(dict.fromkeys(made.base for made in ADAPTERS.values()))


def open_llm(folders: AdapterFolders, base: str, dtype: str) -> LLM:
    modules = folders.of_base(base)
    return LLM(
        folders.base(base), dtype=dtype, lora_modules=modules, max_loras=8, block_size=8,
        num_blocks=600, max_num_seqs=8, max_num_batched_tokens=48, num_threads=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def llm(peft_folders: AdapterFolders) -> Iterator[LLM]:
    with open_llm(peft_folders, "qwen3", "float64") as llm:
        yield llm


def answers_of(
    folders: AdapterFolders, base: str, dtype: str
) -> tuple[list[int], dict[str, RequestOutput]]:
    """A prompt, and the answers of all adapters of a base, and of the base, in one batch."""
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=20, prompt_logprobs=20)
    text, names = prompt(3, 37), ["", *adapters_of(base)]
    with open_llm(folders, base, dtype) as llm:
        requests = [llm.make_request(text, params, "", adapter=name) for name in names]
        answers = llm.run_checked([CheckedPrompt(each, None) for each in requests])
    return text, dict(zip(names, answers, strict=True))


def check_logprobs(
    folders: AdapterFolders,
    base: str,
    adapter: Path | None,
    text: list[int],
    answer: RequestOutput,
    dtype: torch.dtype,
) -> None:
    """Check the log-probabilities at all places of a prompt and of its answer."""
    assert answer.prompt_logprobs is not None
    found = [*answer.prompt_logprobs[1:], *answer.logprobs]
    logits = peft_logits(folders.base(base), adapter, [*text, *answer.token_ids[:-1]], dtype)
    assert len(found) == len(logits)
    for entry, expected in zip(found, logits.double().log_softmax(-1), strict=True):
        np.testing.assert_allclose(
            entry.logprobs, expected[entry.token_ids].numpy(), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("base", BASES)
def test_log_probabilities_in_one_batch(
    base: str, dtype: str, peft_folders: AdapterFolders
) -> None:
    text, answers = answers_of(peft_folders, base, dtype)
    for name, answer in answers.items():
        adapter = peft_folders.adapter(name) if name else None
        check_logprobs(peft_folders, base, adapter, text, answer, getattr(torch, dtype))


def test_prompts_in_parts(llm: LLM, peft_folders: AdapterFolders) -> None:
    text = prompt(12, 70)
    for name in ("plain", "", "patterns"):
        with llm.open_session(GREEDY, adapter=name) as session:
            for start in range(0, 60, 20):
                session.feed(text[start : start + 20])
            answer = session.answer(text[60:])
        adapter = peft_folders.adapter(name) if name else None
        check_greedy(peft_folders.base("qwen3"), adapter, text, answer.token_ids)


def test_choices_of_one_prompt(llm: LLM, peft_folders: AdapterFolders) -> None:
    text = prompt(11, 45)
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=7, n=2, ignore_eos=True, logprobs=0
    )
    [both] = llm.generate([text], params, adapter="plain")
    assert both.outputs[0].token_ids != both.outputs[1].token_ids
    base, adapter = peft_folders.base("qwen3"), peft_folders.adapter("plain")
    for choice in both.outputs:
        logits = peft_logits(base, adapter, [*text, *choice.token_ids[:-1]])[len(text) - 1 :]
        expected = logits.log_softmax(-1)[range(NUM_TOKENS), choice.token_ids]
        told = [entry.logprobs[0] for entry in choice.position_logprobs]
        np.testing.assert_allclose(told, expected.numpy(), atol=1e-6)


def test_beams(llm: LLM, peft_folders: AdapterFolders) -> None:
    text = prompt(13, 30)
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    [found] = llm.beam_search([text], params, adapter="all_linear")
    base, adapter = peft_folders.base("qwen3"), peft_folders.adapter("all_linear")
    assert len(found.sequences) == 3
    for beam in found.sequences:
        tokens = beam.tokens[len(text) :]
        logits = peft_logits(base, adapter, beam.tokens[:-1])[len(text) - 1 :]
        chosen = logits.log_softmax(-1)[range(len(tokens)), tokens]
        assert float(chosen.sum()) == pytest.approx(beam.cum_logprob, abs=1e-6)


def test_embeddings(llm: LLM, peft_folders: AdapterFolders) -> None:
    text, found = prompt(14, 30), {}
    for name in ("plain", "", "bfloat16"):
        [answer] = llm.embed([text], normalize=False, adapter=name)
        adapter = peft_folders.adapter(name) if name else None
        model = load_adapted(peft_folders.base("qwen3"), adapter, torch.float64).model
        with torch.inference_mode():
            expected = model(torch.tensor([text]), use_cache=False).last_hidden_state[0, -1]
        found[name] = answer.outputs.embedding
        # transformers rounds norms to float32.
        np.testing.assert_allclose(found[name], expected.numpy(), rtol=1e-4, atol=1e-4)
    assert max(map(abs, np.subtract(found["plain"], found[""]))) > 0.1
