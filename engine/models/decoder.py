# SPDX-License-Identifier: Apache-2.0
"""The network of every family as plain functions over weights, for one flat batch of tokens.

Norms are computed in float32 at least, as transformers does; in float64 they stay in float64, since
rounding them would make results depend on the order of additions again.
What tells the families apart is in the weights: a bias or a norm that is None is not computed.
Knows nothing of requests, blocks or sampling: positions and the attention plan come from outside.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import AttentionPlan, PagedAttention
from .linear import Linear
from .rope import rope_tables, rotate
from .spec import ModelSpec
from .weights import DecoderWeights, LayerWeights, load_weights

_WIDE_TYPES = (torch.float32, torch.float64)


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
        self, spec: ModelSpec, weights: DecoderWeights, max_model_len: int, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self._embedding = weights.embedding
        self._layers: list[_Layer] = []
        while weights.layers:
            self._layers.append(_Layer(weights.layers.pop(0)))
        self._last_norm = weights.norm
        self._head = Linear(weights.head)
        cos, sin = rope_tables(spec.rope, spec.head_dim, max_model_len, spec.max_positions, dtype)
        self._cos, self._sin = cos[:, None], sin[:, None]

    @classmethod
    def load(cls, path: Path, spec: ModelSpec, max_model_len: int, dtype: torch.dtype) -> Decoder:
        """Read the weights under `path`; raises ConfigError where they do not fit `spec`."""
        return cls(spec, load_weights(path, spec, dtype), max_model_len, dtype)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        attention: PagedAttention,
        plan: AttentionPlan,
        sampled: Tensor,
    ) -> Tensor:
        """Hidden states `[len(sampled), hidden]` of the rows `sampled` (int64) of the step.

        `token_ids` and `positions` are int64 `[tokens]`. K and V of all tokens are written; past
        the last attention only the sampled rows are computed, for nothing else is ever read.
        """
        x = F.embedding(token_ids, self._embedding)
        cos, sin = self._cos[positions], self._sin[positions]
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            mixed = self._mix(x, layer, index, cos, sin, attention, plan)
            if index == last:
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
        attention: PagedAttention,
        plan: AttentionPlan,
    ) -> Tensor:
        """Attention before its output matrix: `[tokens, heads * head_dim]`."""
        spec = self.spec
        qkv = layer.qkv(self._norm(x, layer.attention_norm))
        heads = qkv.view(len(x), -1, spec.head_dim)
        turning = spec.num_heads + spec.num_kv_heads
        turned = heads[:, :turning]
        if layer.head_norms is not None:
            turned = self._norm(turned, layer.head_norms)
        rotated = rotate(turned, cos, sin)
        q, k = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        return attention(q, k, heads[:, turning:], index, plan)

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        x = self._norm(x, layer.mlp_norm)
        gate = F.silu(layer.gate(x), inplace=True)
        gate *= layer.up(x)
        return layer.down(gate)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Over the last dimension; `weight` may be a vector for each head."""
        size, eps = weight.shape[-1:], self.spec.rms_norm_eps
        if x.dtype not in _WIDE_TYPES:
            return weight * F.rms_norm(x.float(), size, None, eps).to(x.dtype)
        if weight.dim() > 1:
            return F.rms_norm(x, size, None, eps) * weight
        return F.rms_norm(x, size, weight, eps)
