# SPDX-License-Identifier: Apache-2.0
"""GatedDelta: a layer whose state is one matrix per head, which each token corrects.

The matrix S of a head maps keys to values. At each token, S decays. Then the layer compares the
token's value with the value that S gives for the token's key, and corrects S by the difference:

    S = exp(decay) * S
    S = S + key (beta * (value - key S))        out = query S

`take_row` updates S for one row. `scan_rows` updates S for chunks of rows: the corrections within a
chunk are the solution of one triangular system, which is linear in the state before the chunk."""

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
from .state_spec import StateSpec

CHUNK_ROWS = 64
# Added to the sum of squares of a query or key; the sum's root then divides the vector.
_NORM_EPS = 1e-6


class GatedDelta:
    """The mixer of a layer with a gated delta rule."""

    __slots__ = ("_conv", "_decay", "_dt_bias", "_eps", "_in", "_layer", "_norm", "_rule", "_state")

    def __init__(self, spec: ModelSpec, layer: int, weights: StateWeights) -> None:
        assert spec.state is not None
        assert weights.dt_bias is not None and weights.decay is not None
        self._state, self._layer, self._eps = spec.state, layer, spec.rms_norm_eps
        self._in = Linear(weights.in_proj, weights.in_bias)
        self._conv = CausalConv(weights.conv, weights.conv_bias)
        self._decay, self._dt_bias, self._norm = weights.decay, weights.dt_bias, weights.norm
        self._rule = DeltaRule()

    def adapted_products(self) -> dict[Target, Adaptable]:
        return {Target.STATE_IN: self._in}

    def __call__(self, normed: Tensor, step: MixerStep[Plan], /) -> Tensor:
        assert step.states is not None
        plan, running = step.states
        state, own = self._state, running.layers[self._layer]
        assert own.recurrent is not None
        sizes = (state.conv_channels, state.inner_size, state.num_heads, state.num_heads)
        mixed, gate, beta, time = self._in(normed).split_with_sizes(sizes, -1)
        mixed = F.silu(self._conv(mixed, plan, own.conv), inplace=True)
        wide = mixed.dtype
        rows = (
            *split_heads(mixed, state),
            self._decay * F.softplus(time.to(wide) + self._dt_bias),
            beta.to(wide).sigmoid(),
        )
        shape = (state.num_heads, state.head_dim)
        out = run_recurrence(self._rule, rows, plan, own.recurrent, shape)
        out = F.rms_norm(out, out.shape[-1:], self._norm, self._eps).flatten(1)
        return (out * F.silu(gate.to(wide))).to(normed.dtype)


def split_heads(mixed: Tensor, state: StateSpec) -> tuple[Tensor, Tensor, Tensor]:
    """Split `mixed` `[rows, channels]` into normed queries and keys `[rows, groups, state_size]`
    and values `[rows, heads, head_dim]`. The memory of `mixed` is overwritten."""
    keys = state.num_groups * state.state_size
    q, k, v = mixed.split_with_sizes((keys, keys, state.inner_size), -1)
    heads = (len(mixed), state.num_groups, state.state_size)
    q, k = (
        each.mul_(torch.rsqrt(each.square().sum(-1, keepdim=True) + _NORM_EPS))
        for each in (q.view(heads), k.view(heads))
    )
    return q.mul_(state.state_size**-0.5), k, v.view(len(mixed), state.num_heads, state.head_dim)


class DeltaRule:
    """The recurrence of a gated delta rule. The inputs (`rows`) of the rule are queries and keys
    `[rows, groups, state_size]`, values `[rows, heads, head_dim]`, and the logarithm of the decay
    and beta, both `[rows, heads]`. A state is `[heads, state_size, head_dim]`."""

    def take_row(self, state: Tensor, rows: Sequence[Tensor], /) -> Tensor:
        q, k, v, decay, beta = rows
        q, k = (each.repeat_interleave(v.shape[1] // each.shape[1], 1) for each in (q, k))
        state.mul_(decay.exp()[..., None, None])
        correction = (v - (k[:, :, None] @ state)[:, :, 0]) * beta[..., None]
        state.addcmul_(k[..., None], correction[:, :, None])
        return (q[:, :, None] @ state)[:, :, 0]

    def scan_rows(self, state: Tensor, rows: Sequence[Tensor], /) -> tuple[Tensor, Tensor]:
        count, (heads, size) = len(rows[0]), rows[2].shape[1:]
        length = min(CHUNK_ROWS, count)
        # Missing rows of the last chunk are zeros: no decay and no correction.
        q, k, v = (split_chunks(each, length) for each in rows[:3])
        decay, beta = (split_chunks(each[..., None], length)[..., 0] for each in rows[3:])
        repeats = heads // len(k)
        decay = decay.cumsum(-1)  # summed from the first row of the chunk on
        grown = decay.exp()[..., None]
        later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu_(1)
        between = decay[..., :, None] - decay[..., None, :]
        between = between.masked_fill_(later, -torch.inf).exp_()
        seen = (q @ k.mT).repeat_interleave(repeats, 0).mul_(between)
        system = (k @ k.mT).repeat_interleave(repeats, 0).mul_(between).mul_(beta[..., None])
        q, k = (each.repeat_interleave(repeats, 0) for each in (q, k))
        wanted = torch.cat((v, k * grown), -1).mul_(beta[..., None])
        solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        corrections, reads = solved.split_with_sizes((size, k.shape[-1]), -1)
        q.mul_(grown)
        k.mul_((decay[..., -1:] - decay).exp_()[..., None])
        left = grown[..., -1:, :]
        out = torch.empty_like(v)
        for chunk in range(v.shape[1]):
            written = corrections[:, chunk] - reads[:, chunk] @ state
            out[:, chunk] = q[:, chunk] @ state + seen[:, chunk] @ written
            state = state * left[:, chunk] + k[:, chunk].mT @ written
        return out.flatten(1, 2)[:, :count].transpose(0, 1), state
