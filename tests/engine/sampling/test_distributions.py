# SPDX-License-Identifier: Apache-2.0
"""Draws follow the distribution that the parameters describe: each alone and together, with seeds
and without, next to greedy rows in one batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.sampling import row_states
from stratakv.engine.sampling.sampler import Sampler
from stratakv.engine.sampling.truncation import FIRST_CANDIDATES

from .batches import VOCAB, added, row_of
from .chi_square import SMALLEST_P, assert_follows, p_value

LOGITS = torch.tensor([0.3, -1.0, 2.0, 0.0, 1.0, 1.5, -0.5, 0.8, -2.0, 0.1, 1.2, 0.6])
PROMPT, OUTPUT = (5, 6), (10, 10, 0)

TOGETHER: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.15},
    {"temperature": 2.0, "min_p": 0.4},  # of probabilities after the temperature
    {"logit_bias": {2: -3.0, 8: 4.0}},
    {"logit_bias": {2: -100.0, 8: 100.0}, "temperature": 50.0},
    {"logit_bias": {8: 4.0, 5: -1.0}, "top_k": 5, "top_p": 0.9},
    {"frequency_penalty": 1.0, "presence_penalty": -0.5, "min_p": 0.05},
    {
        "temperature": 1.4,
        "repetition_penalty": 1.5,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {6: 2.0, 10: 1.0},
        "bad_words_token_ids": ((7,), (10, 0, 4), (6, 3)),
        "min_tokens": 5,
        "min_p": 0.03,
        "top_k": 9,
        "top_p": 0.95,
    },
]


def wanted(
    temperature: float = 1.0,
    top_k: int = VOCAB,
    top_p: float = 1.0,
    min_p: float = 0.0,
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    bad_words_token_ids: tuple[tuple[int, ...], ...] = (),
    min_tokens: int = 0,
) -> torch.Tensor:
    """The distribution, step by step and token by token, in plain float64."""
    logits = LOGITS.double()
    if len(OUTPUT) < min_tokens:
        logits[2] = -torch.inf
    text = PROMPT + OUTPUT
    for *before, last in bad_words_token_ids:
        if text[len(text) - len(before) :] == tuple(before):
            logits[last] = -torch.inf
    for token, value in (logit_bias or {}).items():
        logits[token] += value
    for token in set(text):
        high = logits[token] > 0
        logits[token] *= 1 / repetition_penalty if high else repetition_penalty
    for token in set(OUTPUT):
        logits[token] -= OUTPUT.count(token) * frequency_penalty + presence_penalty
    probabilities = torch.softmax(logits / temperature, -1)
    probabilities[probabilities < min_p * probabilities.max()] = 0.0
    ranked = probabilities.sort(descending=True)
    probabilities[ranked.indices[top_k:]] = 0.0
    probabilities /= probabilities.sum()
    before_it = probabilities[ranked.indices].cumsum(0) - probabilities[ranked.indices]
    probabilities[ranked.indices[before_it >= top_p]] = 0.0
    return probabilities / probabilities.sum()


def test_all_parameters_in_one_batch_with_seeds_and_without(rng, scale):
    """For each set of parameters: rows with a seed each, rows without, greedy rows."""
    copies = 1500 if scale == "ci" else 40_000
    kinds = [
        (case, seeded, wishes | ({"seed": rng.randrange(2**40)} if seeded else {}))
        for case, wishes in enumerate(TOGETHER)
        for seeded in [True, False] * copies
    ]
    kinds += [(len(TOGETHER), False, {"temperature": 0.0})] * 50
    rng.shuffle(kinds)
    sampler = Sampler(len(kinds), VOCAB, (2,), seed=rng.randrange(2**40))
    rows = [row_of(row, kind[2], PROMPT, OUTPUT) for row, kind in enumerate(kinds)]
    sampler.apply_batch_update(added(*rows))
    sampled = sampler.sample(LOGITS.repeat(len(kinds), 1), np.arange(len(kinds)))
    assert all(sampled.is_finite)
    counts = np.zeros((len(TOGETHER) + 1, 2, VOCAB))
    for (case, seeded, _), token in zip(kinds, sampled.token_ids, strict=True):
        counts[case, int(seeded), token] += 1
    for case, wishes in enumerate(TOGETHER):
        for measured in counts[case]:
            assert measured.sum() == copies
            assert_follows(measured, wanted(**wishes))
    assert counts[-1, 0, 2] == 50


def test_the_cases_differ_from_the_plain_distribution():
    """So that none would pass where its parameters are ignored."""
    for wishes in TOGETHER:
        plain = np.round(1500 * wanted(**wishes).numpy())
        assert p_value(plain, torch.softmax(LOGITS, -1)) < SMALLEST_P


def test_seeds_draw_afresh_at_each_position(rng):
    sampler = Sampler(40, VOCAB, (2,))
    rows = [row_of(row, {"seed": rng.randrange(2**40), "top_k": 6}) for row in range(40)]
    sampler.apply_batch_update(added(*rows))
    counts = np.zeros(VOCAB)
    for _ in range(100):
        tokens = sampler.sample(LOGITS.repeat(40, 1), np.arange(40)).token_ids
        np.add.at(counts, tokens, 1)
        for row, token in zip(rows, tokens, strict=True):
            row.output_token_ids.append(token)
    assert_follows(counts, wanted(top_k=6))


@pytest.mark.parametrize("wishes", [{}, {"seed": 7}, {"top_k": 300}, {"top_p": 0.9, "min_p": 1e-3}])
def test_a_large_vocabulary(wishes, rng, monkeypatch):
    """Draws stay right where the work is cut into several parts, and where top-p sorts it all."""
    vocab, copies = 1000, 500
    monkeypatch.setattr(row_states, "LOGITS_CHUNK_CPU", 120 * vocab)
    logits = torch.sort(torch.randn(vocab), descending=True).values
    sampler = Sampler(copies, vocab, seed=11)
    tokens: list[int] = []
    for _ in range(4):
        seeds = [{"seed": rng.randrange(2**40)} if "seed" in wishes else {} for _ in range(copies)]
        sampler.apply_batch_update(
            added(*(row_of(row, wishes | seeds[row]) for row in range(copies)))
        )
        tokens += sampler.sample(logits.repeat(copies, 1), np.arange(copies)).token_ids
    probabilities = torch.softmax(logits.double(), -1)
    if "top_k" in wishes:
        probabilities[300:] = 0.0
    if "top_p" in wishes:
        probabilities[probabilities < 1e-3 * probabilities[0]] = 0.0
        probabilities /= probabilities.sum()
        probabilities[probabilities.cumsum(0) - probabilities >= 0.9] = 0.0
        assert int((probabilities > 0).sum()) > FIRST_CANDIDATES
    probabilities /= probabilities.sum()
    assert_follows(np.bincount(tokens, minlength=vocab), probabilities)


def test_the_chi_square_function_itself(rng):
    """Known values of its tail, and p-values of true samples that are uniform."""
    # 14 observed where 10 are expected, of 20 in two cells: chi-square 3.2 with one degree.
    assert p_value(np.array([14, 6]), torch.tensor([0.5, 0.5])) == pytest.approx(0.0736, abs=1e-4)
    # 40, 30, 30 where 100/3 each: 2.0 with two degrees, whose tail is exp(-1).
    third = torch.full((3,), 1 / 3, dtype=torch.float64)
    assert p_value(np.array([40, 30, 30]), third) == pytest.approx(np.exp(-1.0))
    assert p_value(np.array([1, 99]), torch.tensor([0.0, 1.0])) == 0.0
    generator = np.random.default_rng(rng.randrange(2**32))
    values = [p_value(generator.multinomial(500, [1 / 3] * 3), third) for _ in range(400)]
    tenths = np.histogram(values, bins=10, range=(0, 1))[0]
    assert np.abs(tenths - 40).max() < 30
