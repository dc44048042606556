# SPDX-License-Identifier: Apache-2.0
"""The network of every family as plain functions over weights, for one flat batch of tokens.

Norms are computed in float32 at least, as transformers does; in float64 they stay in float64, since
rounding them would make results depend on the order of additions again (`elementwise.py`). What
tells the families apart is in the weights: a bias or a norm that is None is not computed. Knows
nothing of requests, blocks or sampling: positions and the attention plan come from outside.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from .checkpoint.checkpoint import CPU
from .checkpoint.weights import DecoderWeights, LayerWeights, load_weights, random_weights
from .layers import Elementwise, Linear
from .rope import rope_tables
from .spec import ModelSpec

PLAIN = Elementwise()
Plan = TypeVar("Plan")
_Plan = TypeVar("_Plan", contravariant=True)


class Attention(Protocol[_Plan]):
    """Attention over a paged pool; how a step is laid down in its plan is its own affair."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: _Plan, /) -> Tensor:
        """Write `k` and `v` `[tokens, kv heads, head_dim]` of a layer to the pool, then attend `q`
        `[tokens, heads, head_dim]`: `[tokens, heads * head_dim]`."""


class _Layer:
    """The matrices and norms of one layer."""

    __slots__ = ("attention_norm", "down", "gate", "head_norms", "mlp_norm", "out", "qkv", "up")

    def __init__(self, weights: LayerWeights) -> None:
        self.attention_norm = weights.attention_norm
        self.qkv = Linear(weights.qkv, weights.qkv_bias)
        self.head_norms = weights.head_norms
        self.out = Linear(weights.out, weights.out_bias)
        self.mlp_norm = weights.mlp_norm
        self.gate = Linear(weights.gate, weights.gate_bias)
        self.up = Linear(weights.up, weights.up_bias)
        self.down = Linear(weights.down, weights.down_bias)


class Decoder:
    """One model in memory. `max_model_len` is the number of positions it keeps tables for.

    Takes over `weights`, and empties its list of layers, so that no layer lies in memory twice for
    longer than it takes to reorder it.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        max_model_len: int,
        dtype: torch.dtype,
        elementwise: Elementwise = PLAIN,
    ) -> None:
        self.spec = spec
        self._ops = elementwise
        self._embedding = weights.embedding
        self._layers: list[_Layer] = []
        while weights.layers:
            self._layers.append(_Layer(weights.layers.pop(0)))
        self._last_norm = weights.norm
        self._head = Linear(weights.head)
        cos, sin = rope_tables(spec.rope, spec.head_dim, max_model_len, spec.max_positions, dtype)
        # Computed on the host, so that every device has the same numbers.
        device = weights.embedding.device
        self._cos, self._sin = cos[:, None].to(device), sin[:, None].to(device)

    @classmethod
    def load(
        cls,
        path: Path,
        spec: ModelSpec,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device = CPU,
        elementwise: Elementwise = PLAIN,
        *,
        is_random: bool = False,
    ) -> Decoder:
        """Read the weights under `path` straight to `device`, or take random ones; raises
        ConfigError where they do not fit `spec`."""
        weights = (
            random_weights(spec, dtype, device)
            if is_random
            else load_weights(path, spec, dtype, device)
        )
        return cls(spec, weights, max_model_len, dtype, elementwise)

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return self._embedding.element_size()

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: Attention[Plan],
        plan: Plan,
        sampled: Tensor | None,
    ) -> Tensor:
        """Hidden states `[len(sampled), hidden]` of the rows `sampled` (int64) of the step, all of
        them where it is None.

        `token_ids` and `positions` are int64 `[tokens]`. K and V of all tokens are written; past
        the last attention only the sampled rows are computed, for nothing else is ever read.
        """
        x = F.embedding(token_ids, self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            mixed = self._mix(x, layer, index, cos, sin, attention, plan)
            if index == last and sampled is not None:
                x, mixed = x[sampled], mixed[sampled]
            x = x + layer.out(mixed)
            x = x + self._mlp(x, layer)
        return self._norm(x, self._last_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[rows, vocab]` of what `forward` returned. Apart from it, so that the logits of a long
        prompt can be computed piece by piece."""
        return self._head(hidden)

    def _mix(
        self,
        x: Tensor,
        layer: _Layer,
        index: int,
        cos: Tensor,
        sin: Tensor,
        attention: Attention[Plan],
        plan: Plan,
    ) -> Tensor:
        """Attention before its output matrix: `[tokens, heads * head_dim]`."""
        spec = self.spec
        qkv = layer.qkv(self._norm(x, layer.attention_norm))
        heads = qkv.view(len(x), -1, spec.head_dim)
        turning = spec.num_heads + spec.num_kv_heads
        turned = heads[:, :turning]
        if layer.head_norms is not None:
            turned = self._norm(turned, layer.head_norms)
        rotated = self._ops.rotate(turned, cos, sin)
        q, k = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        return attention(q, k, heads[:, turning:], index, plan)

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        x = self._norm(x, layer.mlp_norm)
        return layer.down(self._ops.gated(layer.gate(x), layer.up(x)))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Over the last dimension; `weight` may be a vector for each head."""
        return self._ops.norm(x, weight, self.spec.rms_norm_eps)
