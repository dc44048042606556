# SPDX-License-Identifier: Apache-2.0
"""Products whose rows have adapters, in the compiled library, against torch in float64: any mixture
of adapters and ranks, and a row's bits whatever rows it shares with."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from stratakv.kernels.cpu.matrix import SILU, PackedMatrix

from .cpu_variants import DTYPES, NEAR, draw, threads, variant

__all__ = ["threads", "variant"]  # fixtures

pytestmark = pytest.mark.usefixtures("variant")
INS, OUTS, RANKS = 71, 100, (16, 3, 9)
SLOTS = 5  # one is empty


class Adapted(NamedTuple):
    """A packed matrix or pair with adapters in its slots, and the same numbers in float64."""

    matrix: PackedMatrix
    weights: list[Tensor]
    adapters: list[tuple[Tensor, list[Tensor]]]

    def expected(self, x: Tensor, slots: Tensor) -> Tensor:
        rows = []
        for row, slot in zip(x.double(), slots.tolist(), strict=True):
            sums = [F.linear(row, weight) for weight in self.weights]
            if 0 <= slot < len(self.adapters):
                ins, outs = self.adapters[slot]
                sums = [each + F.linear(F.linear(row, ins), of)
                        for each, of in zip(sums, outs, strict=True)]  # fmt: skip
            rows.append(sums[0] if len(sums) == 1 else F.silu(sums[0]) * sums[1])
        return torch.stack(rows)


def adapted(dtype: torch.dtype, *, is_pair: bool) -> Adapted:
    weights = [draw(OUTS, INS, dtype=dtype, seed=i, spread=0.1) for i in range(1 + is_pair)]
    matrix = PackedMatrix(
        (weights[0], weights[1]) if is_pair else (weights[0],), (None, None), SILU
    )
    matrix.allow_adapters(SLOTS)
    made = []
    for slot, rank in enumerate(RANKS):
        ins = draw(rank, INS, dtype=dtype, seed=10 + slot, spread=0.1)
        outs = [draw(OUTS, rank, dtype=dtype, seed=20 + slot + i, spread=0.2)
                for i in range(len(weights))]  # fmt: skip
        outs[0][:40, : rank // 2] = 0  # whole panels that some ranks do not reach
        matrix.put_adapter(slot, matrix.pack_adapter(ins, outs))
        made.append((ins.double(), [each.double() for each in outs]))
    return Adapted(matrix, [each.double() for each in weights], made)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_pair", [False, True])
def test_rows_of_any_adapters_go_through_one_product(
    dtype: torch.dtype, is_pair: bool, threads: None
) -> None:
    case = adapted(dtype, is_pair=is_pair)
    for rows in (1, 2, 3, 15, 40, 110):
        x = draw(rows, INS, dtype=dtype, seed=rows)
        slots = torch.randint(
            -1, SLOTS, (rows,), dtype=torch.int32, generator=torch.Generator().manual_seed(rows)
        )
        found = case.matrix(x, slots=slots)
        torch.testing.assert_close(
            found.double(), case.expected(x, slots), rtol=NEAR[dtype], atol=NEAR[dtype]
        )
        # Alone, and among rows that all have its adapter.
        row = rows // 2
        alone = case.matrix(x[row : row + 1], slots=slots[row : row + 1])
        alike = case.matrix(x, slots=slots[row].repeat(rows))
        assert torch.equal(alone[0], found[row]) and torch.equal(alike[row], found[row])
        without = slots < 0
        assert torch.equal(case.matrix(x)[without], found[without])
