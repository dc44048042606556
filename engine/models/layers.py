# SPDX-License-Identifier: Apache-2.0
"""The parts of a layer that work element by element: norms, the rotation, the gate.

Between matrix products they are several passes over the same numbers; torch.compile makes one of
each. It is asked for by name (`--compilation elementwise`), for it takes seconds at the start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .rope import rotate

# The number of rows the blocks are chosen for; any other number works too.
_USUAL_ROWS = 16


class Linear:
    """`x @ weight.T + bias` for x `[rows, in]`; `weight` is `[out, in]`, `bias` `[out]` or None.

    On the CPU a float32 matrix is reordered once into the blocks that oneDNN multiplies from, and
    no reference to `weight` is kept. Measured against `F.linear` on an AMD EPYC with one thread,
    matrices of 256 to 5632: 2.3 times as fast for 64 rows and more, 1.2 to 3 times for 16, slower
    only for one row of a matrix below a megabyte. A number of rows that was not seen before costs a
    fraction of a millisecond once. Other types are left to torch, float64 because oneDNN has none.
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


_WIDE_TYPES = (torch.float32, torch.float64)
Compile = Callable[[Callable[..., Tensor]], Any]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square over the last dimension; `weight` may be a vector for each head. Computed in
    float32 at least: what comes out is rounded to x's type before it is multiplied by a weight of
    that type, and after it is multiplied by a wider one."""
    size = weight.shape[-1:]
    if x.dtype not in _WIDE_TYPES:
        normed = F.rms_norm(x.float(), size, None, eps)
        if weight.dtype in _WIDE_TYPES:
            return (normed * weight).to(x.dtype)
        return weight * normed.to(x.dtype)
    if weight.dim() > 1:
        return F.rms_norm(x, size, None, eps) * weight
    return F.rms_norm(x, size, weight, eps)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`; overwrites `gate`."""
    gate = F.silu(gate, inplace=True)
    gate *= up
    return gate


def gelu_gated(gate: Tensor, up: Tensor) -> Tensor:
    """`gelu(gate) * up`, by the approximation with tanh."""
    gate = F.gelu(gate, approximate="tanh")
    gate *= up
    return gate


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The functions as a decoder calls them."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    gated: Callable[[Tensor, Tensor], Tensor] = gated
    gelu_gated: Callable[[Tensor, Tensor], Tensor] = gelu_gated

    @classmethod
    def compiled(cls, compile_one: Compile | None = None) -> Elementwise:
        """Each compiled when it is first called, for any number of rows."""

        def by_torch(function: Callable[..., Tensor]) -> Any:
            return torch.compile(function, dynamic=True)

        one = compile_one or by_torch
        return cls(one(norm), one(rotate), one(gated), one(gelu_gated))
