# SPDX-License-Identifier: Apache-2.0
"""StateWeights: the weights of the mixer of a layer that carries a state.

What tells the recurrences apart is in the weights: a vector that a kind has none of is None. All
matrices into a layer are one, whose rows lie in the order in which the mixer splits them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ..states.state_spec import StateSpec
from .tensor_shapes import STATE_CONV, STATE_CONV_BIAS, STATE_IN, STATE_IN_BIAS


@dataclass(slots=True)
class StateWeights:
    """Matrices are `[out, in]`; a bias may be None."""

    in_proj: Tensor  # [in_size, hidden]
    in_bias: Tensor | None
    conv: Tensor  # [channels, 1, width]
    conv_bias: Tensor | None


def read_state_weights(read: Callable[[str], Tensor], spec: StateSpec) -> StateWeights:
    """Make the weights of one layer of tensors that `read` reads by their names in the layer."""
    return StateWeights(
        in_proj=read(STATE_IN),
        in_bias=read(STATE_IN_BIAS) if spec.has_bias else None,
        conv=read(STATE_CONV),
        conv_bias=read(STATE_CONV_BIAS) if spec.has_conv_bias else None,
    )
