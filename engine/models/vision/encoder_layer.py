# SPDX-License-Identifier: Apache-2.0
"""EncoderLayer: a layer of an encoder of pictures, attention over all patches of a picture and an
MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import Linear, norm
from .vision_spec import VisionSpec

Turns = tuple[Tensor, Tensor]  # cosines and sines, float32 [patches, 1, half a head]
# Weight and bias, both [hidden]; the norm is an RMS norm if it has no bias.
NormWeights = tuple[Tensor, Tensor | None]
# Windows of equal size that follow each other: their number, and the patches of each.
Windows = tuple[int, int]


@dataclass(slots=True)
class EncoderLayerWeights:
    """The weights of a layer. Matrices are `[out, in]`."""

    first_norm: NormWeights
    qkv: Tensor  # [3 * hidden, hidden]
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    second_norm: NormWeights
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor
    gate: Tensor | None = None  # None: the MLP is GELU without a gate
    gate_bias: Tensor | None = None


class EncoderLayer:
    """A layer in memory."""

    def __init__(self, spec: VisionSpec, weights: EncoderLayerWeights) -> None:
        self._spec, self._weights = spec, weights
        self._qkv = Linear(weights.qkv, weights.qkv_bias)
        self._out = Linear(weights.out, weights.out_bias)
        self._up = Linear(weights.up, weights.up_bias)
        self._gate = None if weights.gate is None else Linear(weights.gate, weights.gate_bias)
        self._down = Linear(weights.down, weights.down_bias)

    def __call__(
        self, x: Tensor, turns: Turns | None = None, windows: Sequence[Windows] = ()
    ) -> Tensor:
        """Apply the layer to the patch embeddings `[patches, hidden]` of one picture. With `turns`,
        queries and keys have rotary positions. With `windows`, a patch attends to the patches of
        its window only."""
        spec = self._spec
        normed = norm_rows(x, self._weights.first_norm, spec.eps)
        heads = self._qkv(normed).view(len(x), 3, spec.num_heads, -1)
        q, k, v = heads.unbind(1)
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        x = x + self._out(_attend(q, k, v, windows or [(1, len(x))]))
        normed = norm_rows(x, self._weights.second_norm, spec.eps)
        if self._gate is not None:
            return x + self._down(F.silu(self._gate(normed)) * self._up(normed))
        approximate = "tanh" if spec.is_tanh else "none"
        return x + self._down(F.gelu(self._up(normed), approximate=approximate))


def norm_rows(x: Tensor, weights: NormWeights, eps: float) -> Tensor:
    """Return the norm of each row of `x`, whose columns are those of the weights."""
    weight, bias = weights
    if bias is not None:
        return F.layer_norm(x, (len(weight),), weight, bias, eps)
    return norm(x, weight, eps)


def _attend(q: Tensor, k: Tensor, v: Tensor, windows: Sequence[Windows]) -> Tensor:
    """Return the attention `[patches, hidden]` of heads `[patches, heads, head]`."""
    found, first = [], 0
    for number, size in windows:
        rows = slice(first, first + number * size)
        shape = (number, size, *q.shape[1:])
        queries, keys, values = (each[rows].view(shape).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(queries, keys, values)
        found.append(mixed.transpose(1, 2).reshape(number * size, -1))
        first = rows.stop
    return found[0] if len(found) == 1 else torch.cat(found)


def _turned(heads: Tensor, turns: Turns) -> Tensor:
    """Rotate heads `[patches, heads, head]`, in float32 whatever their dtype, as transformers
    does."""
    cos, sin = turns
    left, right = heads.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(heads.dtype)
