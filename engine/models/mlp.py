# SPDX-License-Identifier: Apache-2.0
"""The part of a layer behind its attention, which looks at each row by itself."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .checkpoint.weights import LayerWeights
from .families import MlpKind
from .layers import Elementwise, Linear
from .spec import ModelSpec


class Mlp(Protocol):
    """What a layer adds to each row, of the row itself."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """`[rows, hidden]` of normed rows `[rows, hidden]`; `x` is left as it is."""


class DenseMlp:
    """Three matrices for all rows: `down(silu(gate(x)) * up(x))`."""

    __slots__ = ("_down", "_gate", "_ops", "_up")

    def __init__(self, weights: LayerWeights, elementwise: Elementwise) -> None:
        self._gate = Linear(weights.gate, weights.gate_bias)
        self._up = Linear(weights.up, weights.up_bias)
        self._down = Linear(weights.down, weights.down_bias)
        self._ops = elementwise

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._down(self._ops.gated(self._gate(x), self._up(x)))


_KINDS = {MlpKind.DENSE: DenseMlp}


def make_mlp(spec: ModelSpec, weights: LayerWeights, elementwise: Elementwise) -> Mlp:
    """The one that the model's family has."""
    return _KINDS[spec.family.mlp](weights, elementwise)
