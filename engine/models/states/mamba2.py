# SPDX-License-Identifier: Apache-2.0
"""Mamba2: a layer whose state is a matrix for each head, to which each token adds an outer product.

    S = exp(decay) * S + x B        out = S C + D * x

x is the head's part of the token, multiplied by the head's time step; B and C are the same for all
heads of a group. `take_row` updates S for one row. `scan_rows` updates S for chunks of rows: one
product with a triangular matrix gives the effect of a chunk's rows on later rows of the chunk, and
S is read once per chunk."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.state_weights import StateWeights
from ..layers import Linear
from ..lora.low_rank import Adaptable, Target
from ..mixers import MixerStep, Plan
from ..model_spec import ModelSpec
from .causal_conv import CausalConv
from .recurrence import run_recurrence, split_chunks
from .state_spec import OutputNorm

CHUNK_ROWS = 64


class Mamba2:
    """The mixer of a Mamba-2 layer."""

    __slots__ = (
        "_conv", "_decay", "_dt_bias", "_eps", "_gate_factor", "_in", "_layer", "_norm",
        "_output_factor", "_rule", "_skip", "_state", "_time_factor",
    )  # fmt: skip

    def __init__(self, spec: ModelSpec, layer: int, weights: StateWeights) -> None:
        assert spec.state is not None
        assert weights.dt_bias is not None and weights.decay is not None
        assert weights.skip is not None
        self._state, self._layer, self._eps = spec.state, layer, spec.rms_norm_eps
        self._in = Linear(weights.in_proj, weights.in_bias)
        self._conv = CausalConv(weights.conv, weights.conv_bias)
        self._decay, self._dt_bias = weights.decay, weights.dt_bias
        self._skip, self._norm = weights.skip[:, None], weights.norm
        self._gate_factor, self._time_factor = weights.gate_factor, weights.time_factor
        self._output_factor = weights.output_factor
        self._rule = OuterProducts()

    def adapted_products(self) -> dict[Target, Adaptable]:
        return {Target.STATE_IN: self._in}

    def __call__(self, normed: Tensor, step: MixerStep[Plan], /) -> Tensor:
        assert step.states is not None
        plan, running = step.states
        state, own = self._state, running.layers[self._layer]
        assert own.recurrent is not None
        count, inner = len(normed), state.inner_size
        sizes = (inner, state.conv_channels, state.num_heads)
        gate, mixed, time = self._in(normed).split_with_sizes(sizes, -1)
        mixed = F.silu(self._conv(mixed, plan, own.conv), inplace=True)
        wide = mixed.dtype
        time = F.softplus(torch.add(self._dt_bias, time.to(wide), alpha=self._time_factor))
        if state.time_steps is not None:
            time = time.clamp(*state.time_steps)
        shared = state.num_groups * state.state_size
        x, *others = mixed.split_with_sizes((inner, shared, shared), -1)
        x = x.reshape(count, state.num_heads, state.head_dim)
        b, c = (each.reshape(count, state.num_groups, state.state_size) for each in others)
        rows = (x * time[..., None], time * self._decay, b, c)
        shape = (state.num_heads, state.head_dim)
        out = run_recurrence(self._rule, rows, plan, own.recurrent, shape)
        out = out.addcmul_(x, self._skip).view(count, inner)
        gate = F.silu(gate.to(wide) * self._gate_factor)
        if self._norm is None:
            return (out * gate).mul_(self._output_factor).to(normed.dtype)
        if state.output_norm is OutputNorm.BEFORE_GATE:
            return self._norm_groups(out, self._norm).mul_(gate).to(normed.dtype)
        return self._norm_groups(out * gate, self._norm).to(normed.dtype)

    def _norm_groups(self, out: Tensor, weight: Tensor) -> Tensor:
        """Apply the RMS norm to `[rows, inner]`, to each group of a row separately."""
        groups = out.view(len(out), self._state.num_groups, -1)
        return F.rms_norm(groups, groups.shape[-1:], None, self._eps).flatten(1) * weight


class OuterProducts:
    """The recurrence of Mamba-2. The inputs (`rows`) of the rule are x `[rows, heads, head_dim]`,
    the logarithm of the decay `[rows, heads]`, and B and C, both `[rows, groups, state_size]`. A
    state is `[heads, head_dim, state_size]`."""

    def take_row(self, state: Tensor, rows: Sequence[Tensor], /) -> Tensor:
        x, decay, b, c = rows
        state.mul_(decay.exp()[..., None, None])
        # The heads of a group are joined to one matrix.
        groups = state.view(len(state), b.shape[1], -1, b.shape[2])
        groups += x.reshape(*groups.shape[:3], 1) * b[:, :, None]
        return (groups @ c[..., None]).view(x.shape)

    def scan_rows(self, state: Tensor, rows: Sequence[Tensor], /) -> tuple[Tensor, Tensor]:
        count, heads, size = rows[0].shape
        length = min(CHUNK_ROWS, count)
        # Missing rows of the last chunk are zeros: they cause no decay and add zero.
        x, b, c = (split_chunks(each, length) for each in (rows[0], *rows[2:]))
        decay = split_chunks(rows[1][..., None], length)[..., 0].cumsum(-1)
        num_groups, repeats = len(b), heads // len(b)
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu_(1)
        between = decay[..., :, None] - decay[..., None, :]
        between = between.masked_fill_(later, -torch.inf).exp_()
        out = between.mul_((c @ b.mT).repeat_interleave(repeats, 0)) @ x
        grown = decay.exp()[..., None]
        x.mul_((decay[..., -1:] - decay).exp_()[..., None])
        left = grown[..., -1:, :]
        # The heads of a group are joined to one matrix: [groups, heads of a group * size, ...].
        x = x.view(num_groups, repeats, *x.shape[1:]).permute(0, 2, 1, 4, 3).flatten(2, 3)
        for chunk in range(out.shape[1]):
            known = state.view(num_groups, -1, state.shape[-1])
            read = (c[:, chunk] @ known.mT).view(num_groups, length, repeats, size)
            read = read.transpose(1, 2).reshape(heads, length, size)
            out[:, chunk].addcmul_(read, grown[:, chunk])
            added = (x[:, chunk] @ b[:, chunk]).view(state.shape)
            state = torch.addcmul(added, state, left[:, chunk])
        return out.flatten(1, 2)[:, :count].transpose(0, 1), state
