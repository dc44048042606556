# SPDX-License-Identifier: Apache-2.0
"""Each change of the logits equals transformers' own, on random logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

from stratakv.engine.sampling.logprob_tensors import raw_logprobs
from stratakv.engine.sampling.processors.base import LogitsProcessor, ProcessorContext
from stratakv.engine.sampling.processors.builtin import BadWords, MinP, MinTokens, Penalties
from stratakv.engine.sampling.truncation import truncate

from .batches import added, position_logprobs, row_of

VOCAB = 400
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def random_logits(dtype: torch.dtype, rows: int = 6) -> torch.Tensor:
    return 4 * torch.randn(rows, VOCAB, dtype=dtype)


def random_texts(rows: int = 6, prompt: int = 20, output: int = 15) -> torch.Tensor:
    """Token ids with many repetitions, from half the vocabulary."""
    return torch.randint(0, VOCAB // 2, (rows, prompt + output))


def ours(
    kind: type[LogitsProcessor],
    wishes: dict[str, Any],
    logits: torch.Tensor,
    texts: torch.Tensor,
    prompt: int = 20,
) -> torch.Tensor:
    processor = kind(ProcessorContext(len(logits), VOCAB, eos_token_ids=(2, 7)))
    rows = [
        row_of(row, wishes, text[:prompt], text[prompt:]) for row, text in enumerate(texts.tolist())
    ]
    processor.update_state(added(*rows))
    return processor.apply(logits.clone(), np.arange(len(logits)))


@DTYPES
@pytest.mark.parametrize("penalty", [1.3, 0.6, 100.0])
def test_repetition_penalty(dtype, penalty):
    logits, texts = random_logits(dtype), random_texts()
    expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(texts, logits.clone())
    result = ours(Penalties, {"repetition_penalty": penalty}, logits, texts)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=0)


@DTYPES
def test_presence_and_frequency_by_their_formula(dtype):
    logits, texts = random_logits(dtype), random_texts()
    counts = torch.stack([text[20:].bincount(minlength=VOCAB) for text in texts]).to(dtype)
    expected = logits - 0.7 * counts - 1.1 * (counts > 0)
    wishes = {"frequency_penalty": 0.7, "presence_penalty": 1.1}
    result = ours(Penalties, wishes, logits, texts)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.9, 1.0])
def test_min_p(dtype, min_p):
    logits, texts = random_logits(dtype), random_texts()
    expected = theirs.MinPLogitsWarper(min_p)(texts, logits.clone())
    assert torch.equal(ours(MinP, {"min_p": min_p}, logits, texts), expected)


@DTYPES
def test_bad_words(dtype, rng):
    logits, texts = random_logits(dtype), random_texts()
    bad = [[rng.randrange(VOCAB)] for _ in range(5)]
    for text in texts.tolist():  # ends of the texts, of all lengths, and some that nearly match
        for length in (1, 2, 5, 20):
            bad.append([*text[-length:], rng.randrange(VOCAB)])
            bad.append([text[-length] + VOCAB // 2, *text[-length:][1:], rng.randrange(VOCAB)])
    expected = theirs.NoBadWordsLogitsProcessor(bad, eos_token_id=None)(texts, logits.clone())
    assert bool((expected == -torch.inf).any(dim=1).all())
    result = ours(BadWords, {"bad_words_token_ids": bad}, logits, texts)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("minimum", [14, 15, 16, 30])
def test_min_tokens(minimum):
    logits, texts = random_logits(torch.float32), random_texts()
    limit = theirs.MinNewTokensLengthLogitsProcessor(20, minimum, [2, 7])
    result = ours(MinTokens, {"min_tokens": minimum}, logits, texts)
    assert torch.equal(result, limit(texts, logits.clone()))


@DTYPES
@pytest.mark.parametrize(("top_k", "top_p"), [(7, 1.0), (VOCAB, 0.8), (50, 0.5), (3, 0.99)])
def test_top_k_and_top_p(dtype, top_k, top_p):
    logits, texts = random_logits(dtype), random_texts()
    expected = theirs.TopKLogitsWarper(top_k)(texts, logits.clone())
    if top_p < 1.0:
        expected = theirs.TopPLogitsWarper(top_p)(texts, expected)
    scaled = logits - logits.amax(-1, keepdim=True)
    many = len(logits)
    assert truncate(scaled, np.full(many, top_k), np.full(many, top_p)) is None
    assert torch.equal(scaled > -torch.inf, expected > -torch.inf)


@DTYPES
def test_logprobs(dtype):
    logits = random_logits(dtype)
    chosen = torch.randint(0, VOCAB, (len(logits),))
    expected = torch.log_softmax(logits, dim=-1)
    entries = position_logprobs(raw_logprobs(logits), chosen, [20] * len(logits))
    for row, entry in enumerate(entries):
        assert entry.token_ids[0] == chosen[row]
        assert entry.logprobs == expected[row, entry.token_ids].tolist()
        best = expected[row].sort(descending=True)
        assert entry.token_ids[1:] == best.indices[:20].tolist()
        assert best.indices[entry.rank - 1] == chosen[row]
