# SPDX-License-Identifier: Apache-2.0
"""Do counts follow a distribution? Pearson's test, without scipy."""

from __future__ import annotations

import numpy as np
import torch

# Seeds are fixed, so this is no chance of failure but a bound on how odd a sample may look.
SMALLEST_P = 1e-4


def p_value(counts: np.ndarray, expected: torch.Tensor) -> float:
    """How likely counts as far off as these are where `expected` holds; 0 where something was drawn
    that cannot be. Cells that expect fewer than 5 are put together."""
    probabilities = expected.double().numpy()
    if counts[probabilities == 0].any():
        return 0.0
    wanted = probabilities * counts.sum()
    large = wanted >= 5
    observed = np.append(counts[large], counts[~large].sum())
    wanted = np.append(wanted[large], wanted[~large].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    if len(wanted) == 1:
        return 1.0
    chi = ((observed - wanted) ** 2 / wanted).sum()
    halves = torch.tensor([(len(wanted) - 1) / 2, chi / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(halves[0], halves[1]))


def assert_follows(counts: np.ndarray, expected: torch.Tensor) -> None:
    assert p_value(counts, expected) > SMALLEST_P
