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
from stratakv.engine.sampling.truncation import exp_, truncate

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
