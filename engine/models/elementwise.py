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

_WIDE_TYPES = (torch.float32, torch.float64)
Compile = Callable[[Callable[..., Tensor]], Any]


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square over the last dimension; `weight` may be a vector for each head. Computed in
    float32 at least."""
    size = weight.shape[-1:]
    if x.dtype not in _WIDE_TYPES:
        return weight * F.rms_norm(x.float(), size, None, eps).to(x.dtype)
    if weight.dim() > 1:
        return F.rms_norm(x, size, None, eps) * weight
    return F.rms_norm(x, size, weight, eps)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`; overwrites `gate`."""
    gate = F.silu(gate, inplace=True)
    gate *= up
    return gate


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The three functions as a decoder calls them."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    gated: Callable[[Tensor, Tensor], Tensor] = gated

    @classmethod
    def compiled(cls, compile_one: Compile | None = None) -> Elementwise:
        """Each compiled when it is first called, for any number of rows."""

        def by_torch(function: Callable[..., Tensor]) -> Any:
            return torch.compile(function, dynamic=True)

        one = compile_one or by_torch
        return cls(one(norm), one(rotate), one(gated))
