# SPDX-License-Identifier: Apache-2.0
"""EncoderLayer: a layer of a picture encoder: attention over all patches of a picture, and an
MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import Linear
from .vision_spec import VisionSpec

Turns = tuple[Tensor, Tensor]  # cosines and sines, float32 [patches, 1, half a head]


@dataclass(slots=True)
class EncoderLayerWeights:
    """The weights of an encoder layer. Matrices are `[out, in]`; norms have a weight and a bias."""

    first_norm: tuple[Tensor, Tensor]
    qkv: Tensor  # [3 * hidden, hidden]
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    second_norm: tuple[Tensor, Tensor]
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class EncoderLayer:
    """An encoder layer in memory."""

    def __init__(self, spec: VisionSpec, weights: EncoderLayerWeights) -> None:
        self._spec, self._weights = spec, weights
        self._qkv = Linear(weights.qkv, weights.qkv_bias)
        self._out = Linear(weights.out, weights.out_bias)
        self._up = Linear(weights.up, weights.up_bias)
        self._down = Linear(weights.down, weights.down_bias)

    def __call__(self, x: Tensor, turns: Turns | None = None) -> Tensor:
        """Return the layer's output for the patches `x` `[patches, hidden]` of one picture. With
        `turns`, queries and keys have rotary positions."""
        spec, size = self._spec, (self._spec.hidden_size,)
        normed = F.layer_norm(x, size, *self._weights.first_norm, spec.eps)
        heads = self._qkv(normed).view(len(x), 3, spec.num_heads, -1)
        q, k, v = heads.unbind(1)
        if turns is not None:
            q, k = _turned(q, turns), _turned(k, turns)
        q, k, v = (each.transpose(0, 1) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(0, 1)
        x = x + self._out(mixed.reshape(len(x), -1))
        normed = F.layer_norm(x, size, *self._weights.second_norm, spec.eps)
        approximate = "tanh" if spec.is_tanh else "none"
        return x + self._down(F.gelu(self._up(normed), approximate=approximate))


def _turned(heads: Tensor, turns: Turns) -> Tensor:
    """Rotate `heads` `[patches, heads, head]` in float32, for any dtype, as transformers does."""
    cos, sin = turns
    left, right = heads.float().chunk(2, dim=-1)
    turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.to(heads.dtype)
