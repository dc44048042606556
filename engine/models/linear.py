# SPDX-License-Identifier: Apache-2.0
"""A matrix of a model with its bias, laid out for the processor that multiplies by it.

On the CPU a float32 matrix is reordered once into the blocks that oneDNN multiplies from. Measured
against `F.linear` on an AMD EPYC with one thread, matrices of 256 to 5632: 2.3 times as fast for 64
rows and more, 1.2 to 3 times for 16, slower only for one row of a matrix below a megabyte. A number
of rows that was not seen before costs a fraction of a millisecond once. Other types are left to
torch, float64 because oneDNN has none.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# What the blocks are chosen for; any other number of rows works with them as well.
_USUAL_ROWS = 16


class Linear:
    """`x @ weight.T + bias` for x `[rows, in]`; `weight` is `[out, in]`, `bias` `[out]` or None.

    Keeps no reference to `weight` where it has been reordered.
    """

    __slots__ = ("_bias", "_is_packed", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._bias = bias
        self._is_packed = _can_pack(weight)
        self._weight = (
            torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _USUAL_ROWS)
            if self._is_packed
            else weight
        )

    def __call__(self, x: Tensor) -> Tensor:
        """`[rows, out]`."""
        if self._is_packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return product
        return F.linear(x, self._weight, self._bias)


def _can_pack(weight: Tensor) -> bool:
    """Whether this torch can reorder the matrix; the operators are those of its own compiler."""
    return (
        weight.dtype is torch.float32
        and weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )
