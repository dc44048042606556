# SPDX-License-Identifier: Apache-2.0
"""The part of a layer behind its attention, which looks at each row by itself."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from ...kernels.cpu.matrix import GELU_TANH, SILU, PackedMatrix, reason_against_matrices
from .checkpoint.weights import LayerWeights
from .families import Activation, MlpKind
from .layers import Elementwise, Linear
from .spec import ModelSpec


class Mlp(Protocol):
    """What a layer adds to each row, of the row itself."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """`[rows, hidden]` of normed rows `[rows, hidden]`; `x` is left as it is."""

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add what it makes of `x` to `out`, in place. Asked of those with kernels only."""


class DenseMlp:
    """Three matrices for all rows: `down(activation(gate(x)) * up(x))`. Two of them are one where
    the library of `kernels/cpu/` multiplies, `gate_up`, with the activation in it, and where the
    weights have them as one, `_both`."""

    __slots__ = ("_both", "_gate", "_gated", "_up", "activation", "down", "gate_up")

    def __init__(
        self, weights: LayerWeights, activation: Activation, elementwise: Elementwise
    ) -> None:
        is_silu = activation is Activation.SILU
        self.down = Linear(weights.down, weights.down_bias)
        self.activation = SILU if is_silu else GELU_TANH
        self.gate_up: PackedMatrix | None = None
        gate, up = weights.gate, weights.up
        if elementwise.is_plain and reason_against_matrices(gate.dtype, gate.device) is None:
            biases = (weights.gate_bias, weights.up_bias)
            self.gate_up = PackedMatrix((gate, up), biases, self.activation)
            return
        self._both: Linear | None = None
        if weights.gate_up is not None:
            self._both = Linear(weights.gate_up, weights.gate_up_bias)
        else:
            self._gate, self._up = Linear(gate, weights.gate_bias), Linear(up, weights.up_bias)
        self._gated = elementwise.gated if is_silu else elementwise.gelu_gated

    def __call__(self, x: Tensor, /) -> Tensor:
        if self.gate_up is not None:
            return self.down(self.gate_up(x))
        return self.down(self._inner(x))

    def add_to(self, out: Tensor, x: Tensor) -> None:
        self.down.add_to(out, self._inner(x))

    def _inner(self, x: Tensor) -> Tensor:
        """The gated rows, which the last matrix multiplies."""
        if self._both is not None:
            gate, up = self._both(x).chunk(2, dim=-1)
            return self._gated(gate, up)
        return self._gated(self._gate(x), self._up(x))


_KINDS = {MlpKind.DENSE: DenseMlp}


def make_mlp(spec: ModelSpec, weights: LayerWeights, elementwise: Elementwise) -> Mlp:
    """The one that the model's family has."""
    return _KINDS[spec.family.mlp](weights, spec.family.activation, elementwise)
