# SPDX-License-Identifier: Apache-2.0
"""ShortConv: a layer whose state is only the last columns of the input of a gated convolution.

in ──► B | C | x        out = C * convolution(B * x)"""

from __future__ import annotations

from torch import Tensor

from ..checkpoint.state_weights import StateWeights
from ..layers import Linear
from ..lora.low_rank import Adaptable, Target
from ..mixers import MixerStep, Plan
from ..model_spec import ModelSpec
from .causal_conv import CausalConv


class ShortConv:
    """The mixer of a layer with a short convolution."""

    __slots__ = ("_conv", "_in", "_layer")

    def __init__(self, spec: ModelSpec, layer: int, weights: StateWeights) -> None:
        del spec
        self._layer = layer
        self._in = Linear(weights.in_proj, weights.in_bias)
        self._conv = CausalConv(weights.conv, weights.conv_bias)

    def adapted_products(self) -> dict[Target, Adaptable]:
        return {Target.STATE_IN: self._in}

    def __call__(self, normed: Tensor, step: MixerStep[Plan], /) -> Tensor:
        assert step.states is not None
        plan, running = step.states
        first, gate, x = self._in(normed).chunk(3, dim=-1)
        out = self._conv(first * x, plan, running.layers[self._layer].conv)
        return gate * out.to(gate.dtype)
