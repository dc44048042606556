# SPDX-License-Identifier: Apache-2.0
"""Top-k and top-p on logits with many ties and bans, against a definition in plain Python."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from stratakv.engine.sampling import truncation
from stratakv.engine.sampling.truncation import (
    MOST_FEW,
    draw_among_few,
    exp_,
    leaves_few,
    truncate,
)

VOCAB = 40


def kept(logits: Sequence[float], top_k: int, top_p: float) -> set[int]:
    """The tokens that stay, of one row; ties with the last one stay too."""
    order = sorted(logits, reverse=True)
    there = [x for x in logits if x >= order[top_k - 1]]
    total, before = sum(math.exp(x) for x in there), 0.0
    least = -math.inf
    for x in sorted(there, reverse=True):
        if before >= top_p * total:
            break
        least, before = x, before + math.exp(x)
    least = max(least, order[top_k - 1]) if top_p < 1.0 else order[top_k - 1]
    return {i for i, x in enumerate(logits) if x >= least and x > -math.inf}


@pytest.mark.parametrize("first", [3, 256])
def test_ties_and_bans(first, rng: random.Random, scale, monkeypatch):
    """Rows of all kinds in one batch: with top-k, top-p, both and neither."""
    monkeypatch.setattr(truncation, "FIRST_CANDIDATES", first)
    for _ in range(150 if scale == "ci" else 20_000):
        rows = []
        for _ in range(rng.randint(1, 5)):
            values = [
                -rng.choice([0.0, 0.25, 1.0, 2.5, 3.0, 120.0, math.inf]) for _ in range(VOCAB)
            ]
            values[rng.randrange(VOCAB)] = 0.0
            # No share that falls on a boundary between two tokens, where rounding decides.
            rows.append((values, rng.choice([1, 2, 7, 30, VOCAB]), rng.choice([0.317, 0.83, 1.0])))
        scaled = torch.tensor([values for values, _, _ in rows], dtype=torch.float64)
        top_k, top_p = (np.array([row[i] for row in rows]) for i in (1, 2))
        assert truncate(scaled, top_k, top_p) is None
        for values, row in zip(rows, scaled.tolist(), strict=True):
            there = {i for i, x in enumerate(row) if x > -math.inf}
            if values[1] == VOCAB and values[2] == 1.0:
                continue
            assert there == kept(*values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_of_e(dtype):
    logits = torch.cat([-torch.logspace(-6, 3, 200, dtype=dtype), torch.tensor([0.0, -torch.inf])])
    expected = logits.double().exp()
    result = exp_(logits.to(dtype).clone())
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=1e-7)
    assert result[-2:].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_draw_among_few_is_that_of_the_whole_row(rng: random.Random, scale: str, dtype) -> None:
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for _ in range(1000 if scale == "long" else 60):
        rows, vocab = rng.randint(1, 7), rng.choice([3, 40, 2000])
        logits = torch.randn(rows, vocab, generator=generator, dtype=dtype) * rng.choice([0.1, 4])
        if rng.random() < 0.5:  # many that are equal, more than top-k says among them
            logits = logits.round()
        logits[torch.rand(rows, vocab, generator=generator) < rng.choice([0.0, 0.5])] = -torch.inf
        logits -= logits.amax(dim=-1, keepdim=True)
        top_k = np.array([rng.randint(1, min(vocab - 1, MOST_FEW)) for _ in range(rows)])
        top_p = np.array([rng.choice([1.0, rng.uniform(0.05, 1.0)]) for _ in range(rows)])
        numbers = np.array([rng.choice([0.0, 1 - 2**-53, rng.random()]) for _ in range(rows)])
        assert leaves_few(top_k, vocab, logits.device)
        whole = logits.clone()
        assert truncate(whole, top_k, top_p) is None
        shares = exp_(whole.clone()).double()
        tokens = draw_among_few(logits.clone(), top_k, top_p, numbers)
        for row, token in enumerate(tokens):
            if not torch.isfinite(logits[row]).any():  # no choice, and told elsewhere
                assert 0 <= token < vocab
                continue
            assert whole[row, token] > -torch.inf
            target = numbers[row] * float(shares[row].sum())
            before = float(shares[row, :token].sum())
            slack = 1e-6 * float(shares[row].sum())  # of vectorised powers
            assert before <= target + slack and before + shares[row, token] >= target - slack


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    logits = torch.zeros(3, 50)
    logits[0, 7] = torch.nan
    logits[1] = -torch.inf
    logits[2, :-1] = -9.0
    top_k, top_p = np.array([5, 5, 1]), np.array([0.9, 1.0, 0.5])
    tokens = draw_among_few(logits, top_k, top_p, np.array([0.5, 0.5, 0.5]))
    assert tokens[2] == 49 and all(0 <= token < 50 for token in tokens)
    assert not leaves_few(np.array([5, MOST_FEW + 1]), 10_000, logits.device)
    assert not leaves_few(np.array([5, 50]), 50, logits.device)  # the second leaves all
    assert not leaves_few(top_k, 50, torch.device("meta"))
