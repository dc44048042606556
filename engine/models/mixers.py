# SPDX-License-Identifier: Apache-2.0
"""Mixers: the part of a layer in which a token reads earlier tokens.

Most layers have an `AttentionMixer`, which reads the K and V of earlier tokens. Other layers have a
mixer that carries a state (`states/state_mixer.py`), and some layers have attention and a state. A
mixer takes the normed rows of a step and returns the input of the layer's output matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ...kernels.layer.rotate_write import Rotary
from .checkpoint.weights import AttentionWeights
from .families import HeadNorms
from .layers import Elementwise, Linear
from .lora.low_rank import Adaptable, Target
from .model_spec import ModelSpec
from .states.state_plan import StateStep

Plan = TypeVar("Plan")
_Plan = TypeVar("_Plan", contravariant=True)


class Attention(Protocol[_Plan]):
    """The attention of a model over a paged KV pool. Each implementation takes its own type of
    plan. An implementation that can also rotate queries and keys has a `QkvAttention` in its
    attribute `of_qkv`."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: _Plan, /) -> Tensor:
        """Write `k` and `v` `[tokens, kv heads, head_dim]` of a layer to the pool, then compute
        attention for `q` `[tokens, heads, head_dim]`. Return the result `[tokens, heads *
        head_dim]`. `layer` is the layer's number in the model."""


class QkvAttention(Protocol[_Plan]):
    """Attention that also computes the norms and the rotation of queries and keys."""

    def __call__(self, qkv: Tensor, rotary: Rotary, layer: int, plan: _Plan, /) -> Tensor:
        """Compute attention for `qkv` `[tokens, heads + 2 kv heads, head_dim]`. Queries and keys in
        `qkv` are neither normed nor rotated yet. `qkv` may be overwritten. Return the result
        `[tokens, heads * head_dim]`."""


@dataclass(slots=True)
class MixerStep(Generic[Plan]):
    """The inputs of a step that all mixers of a model share."""

    attention: Attention[Plan]
    plan: Plan
    # For each kind of rotary positions: cosines and sines `[tokens, 1, head_dim // 2]`, or the
    # tables of all positions if the attention's `of_qkv` rotates.
    turns: list[tuple[Tensor, Tensor]]
    rotaries: list[Rotary]
    of_qkv: QkvAttention[Plan] | None
    growth: Tensor | None  # [tokens, 1, 1]: factor of the queries
    states: StateStep | None  # None: no layer carries a state


class Mixer(Protocol):
    """The part of a layer before its output matrix: attention, a state mixer, or both."""

    def __call__(self, normed: Tensor, step: MixerStep[Plan], /) -> Tensor:
        """Return `[tokens, inner]` from the normed rows `[tokens, hidden]`, which are not
        changed."""

    def adapted_products(self) -> dict[Target, Adaptable]:
        """Return the matrix products that LoRA adapters can change."""


class ParallelMixer:
    """An attention and a state mixer side by side. Both mixers read the same rows, and one output
    matrix multiplies their joined results."""

    __slots__ = ("_attention", "_factor", "_state")

    def __init__(self, attention: AttentionMixer, state: Mixer, factor: float) -> None:
        """`factor` multiplies the attention's output; the state mixer applies its own factor."""
        self._attention, self._state, self._factor = attention, state, factor

    def __call__(self, normed: Tensor, step: MixerStep[Plan], /) -> Tensor:
        attended = self._attention(normed, step)
        if self._factor != 1.0:
            attended = attended * self._factor
        return torch.cat((attended, self._state(normed, step)), 1)

    def adapted_products(self) -> dict[Target, Adaptable]:
        return self._attention.adapted_products() | self._state.adapted_products()


class AttentionMixer:
    """The projections to queries, keys and values of one layer, and its attention."""

    __slots__ = ("_gate", "_ops", "_rope", "_spec", "head_norms", "layer", "qkv")

    def __init__(
        self, spec: ModelSpec, layer: int, weights: AttentionWeights, elementwise: Elementwise
    ) -> None:
        self._spec, self._ops, self.layer = spec, elementwise, layer
        self._rope = spec.rope_of_layers[layer]
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.head_norms = weights.head_norms
        gate = weights.gate
        self._gate = None if gate is None else Linear(gate, weights.gate_bias)

    @property
    def is_gated(self) -> bool:
        """Whether the attention's result is multiplied by a gate, which is computed from the
        layer's input."""
        return self._gate is not None

    def __call__(self, normed: Tensor, step: MixerStep[Plan], /) -> Tensor:
        qkv = self.qkv(normed)
        heads = qkv.view(len(normed), -1, self._spec.head_dim)
        if step.of_qkv is None:
            mixed = self._attend(heads, step)
        else:
            rotary = step.rotaries[self._rope]
            if self.head_norms is not None:
                eps = self._spec.rms_norm_eps
                rotary = rotary._replace(head_norms=self.head_norms, eps=eps)
            mixed = step.of_qkv(heads, rotary, self.layer, step.plan)
        return mixed if self._gate is None else mixed * self._gate(normed).sigmoid_()

    def adapted_products(self) -> dict[Target, Adaptable]:
        gate = {} if self._gate is None else {Target.ATTENTION_GATE: self._gate}
        return {Target.QKV: self.qkv, **gate}

    def _attend(self, heads: Tensor, step: MixerStep[Plan]) -> Tensor:
        """Rotate the queries and keys of `heads` `[tokens, heads + 2 kv heads, head_dim]`, and
        compute attention."""
        spec = self._spec
        turning = spec.num_heads + spec.num_kv_heads
        turned = self._norm_heads(heads[:, :turning])
        rotated = self._ops.rotate(turned, *step.turns[self._rope])
        q, k = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        if step.growth is not None:
            q = q * step.growth
        return step.attention(q, k, heads[:, turning:], self.layer, step.plan)

    def _norm_heads(self, turned: Tensor) -> Tensor:
        """Return queries and keys `[tokens, heads + kv heads, head_dim]`, normed if the model norms
        its heads."""
        weight, spec = self.head_norms, self._spec
        if weight is None:
            return turned
        if spec.family.head_norms is HeadNorms.EACH:
            return self._ops.norm(turned, weight, spec.rms_norm_eps)
        parts = []
        for heads in (slice(spec.num_heads), slice(spec.num_heads, None)):
            part = turned[:, heads]
            normed = self._ops.norm(part.flatten(1), weight[heads].flatten(), spec.rms_norm_eps)
            parts.append(normed.view(part.shape))
        return torch.cat(parts, 1)
