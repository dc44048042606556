# SPDX-License-Identifier: Apache-2.0
"""StateWeights: the weights of a mixer that carries a state (Mamba-2, gated delta rule, short
convolution).

A vector that the layer's kind of recurrence does not use is None. All input matrices of a layer are
joined to one matrix; the mixer splits the matrix's output in the order of the rows. Vectors of a
recurrence are float32 or wider, like the computation of the recurrence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..spec.multipliers import Multipliers
from ..spec.state_layers import Projections, StateFamily
from ..states.state_spec import OutputNorm, StateKind, StateSpec
from .tensor_shapes import (
    STATE_CONV,
    STATE_CONV_BIAS,
    STATE_DECAY,
    STATE_IN,
    STATE_IN_BIAS,
    STATE_IN_PARTS,
    STATE_NORM,
    STATE_SKIP,
    STATE_TIME_BIAS,
)


@dataclass(slots=True)
class StateWeights:
    """The weights of a state mixer. Matrices are `[out, in]`; a bias may be None."""

    in_proj: Tensor  # [in_size, hidden]
    in_bias: Tensor | None
    conv: Tensor  # [channels, 1, width]
    conv_bias: Tensor | None
    # For a layer with a recurrence: the bias of time steps, the decay `-exp(A_log)`, both [heads],
    # and the weights of the output's norm.
    dt_bias: Tensor | None = None
    decay: Tensor | None = None
    norm: Tensor | None = None
    skip: Tensor | None = None  # [heads]: D of Mamba-2
    # For Mamba-2: factors of the gate, of time steps, and of the output of a layer without a norm.
    gate_factor: float = 1.0
    time_factor: float = 1.0
    output_factor: float = 1.0

    def multiply(self, factors: Multipliers, spec: StateSpec) -> None:
        """Multiply the weights of Mamba-2 by the constant factors of the model family. The weights
        of convolution and norm may become float32 or wider, since convolution and norm are computed
        in float32 or wider."""
        gate, x, b, c, self.time_factor = factors.state_inputs
        self.gate_factor = gate
        shared = spec.num_groups * spec.state_size
        sizes = torch.tensor([spec.inner_size, shared, shared], device=self.conv.device)
        wide = torch.promote_types(self.conv.dtype, torch.float32)
        channels = torch.tensor([x, b, c], dtype=wide, device=self.conv.device)
        self.conv = self.conv * channels.repeat_interleave(sizes)[:, None, None]
        if self.in_bias is not None:
            self.in_bias = self.in_bias / factors.state_in
        if self.norm is None:
            self.output_factor = factors.state_output
        else:
            self.norm = self.norm * factors.state_output


def read_state_weights(
    read: Callable[[str], Tensor],
    read_wide: Callable[[str], Tensor],
    spec: StateSpec,
    family: StateFamily,
) -> StateWeights:
    """Make the weights of one layer from its tensors. `read` and `read_wide` read a tensor by its
    name within the layer; `read_wide` returns float32 or wider."""
    weights = StateWeights(
        in_proj=read_state_in(read, spec, family),
        in_bias=read(STATE_IN_BIAS) if spec.has_bias else None,
        conv=read(STATE_CONV),
        conv_bias=read(STATE_CONV_BIAS) if spec.has_conv_bias else None,
    )
    if spec.kind is not StateKind.SHORT_CONV:
        weights.dt_bias = read_wide(STATE_TIME_BIAS)
        weights.decay = -read_wide(STATE_DECAY).exp()
        if spec.output_norm is not OutputNorm.NONE:
            weights.norm = read_wide(STATE_NORM)
    if spec.kind is StateKind.MAMBA2:
        weights.skip = read_wide(STATE_SKIP)
    return weights


def read_state_in(read: Callable[[str], Tensor], spec: StateSpec, family: StateFamily) -> Tensor:
    """Read the input matrix of a layer. For a gated delta rule, its rows are queries, keys, values,
    gate, beta and time steps, in this order."""
    if family.projections is Projections.ONE:
        return read(STATE_IN)
    parts = [read(name) for name in STATE_IN_PARTS[family.projections]]
    if family.projections is Projections.BY_GROUP:
        parts = _ungroup(parts[0], parts[1], spec)
    return torch.cat(parts)


def _ungroup(matrix: Tensor, scalars: Tensor, spec: StateSpec) -> list[Tensor]:
    """Split matrices in which all rows of a key head are stored together. Return one matrix for
    each part (queries, keys and so on), with the rows of all heads."""
    heads = spec.num_heads // spec.num_groups
    values = heads * spec.head_dim
    by_group = matrix.view(spec.num_groups, -1, matrix.shape[1])
    parts = by_group.split_with_sizes((spec.state_size, spec.state_size, values, values), 1)
    both = scalars.view(spec.num_groups, 2 * heads, -1).chunk(2, 1)
    return [part.flatten(0, 1) for part in (*parts, *both)]
