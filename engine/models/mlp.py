# SPDX-License-Identifier: Apache-2.0
"""The part of a layer behind its attention, which looks at each row by itself."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .checkpoint.weights import LayerWeights
from .families import Activation, MlpKind
from .layers import Elementwise, Linear
from .spec import ModelSpec


class Mlp(Protocol):
    """What a layer adds to each row, of the row itself."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """`[rows, hidden]` of normed rows `[rows, hidden]`; `x` is left as it is."""


class DenseMlp:
    """Three matrices for all rows: `down(activation(gate(x)) * up(x))`."""

    __slots__ = ("_down", "_gate", "_gated", "_up")

    def __init__(
        self, weights: LayerWeights, activation: Activation, elementwise: Elementwise
    ) -> None:
        self._gate = Linear(weights.gate, weights.gate_bias)
        self._up = Linear(weights.up, weights.up_bias)
        self._down = Linear(weights.down, weights.down_bias)
        is_silu = activation is Activation.SILU
        self._gated = elementwise.gated if is_silu else elementwise.gelu_gated

    def __call__(self, x: Tensor, /) -> Tensor:
        return self._down(self._gated(self._gate(x), self._up(x)))


_KINDS = {MlpKind.DENSE: DenseMlp}


def make_mlp(spec: ModelSpec, weights: LayerWeights, elementwise: Elementwise) -> Mlp:
    """The one that the model's family has."""
    return _KINDS[spec.family.mlp](weights, spec.family.activation, elementwise)
