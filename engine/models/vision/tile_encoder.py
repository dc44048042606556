# SPDX-License-Identifier: Apache-2.0
"""TileEncoder: the encoder of Idefics3 and SmolVLM, a vision transformer over one tile.

    pixels ─► patches + learned positions ─► layers ─► norm ─► neighbours joined ─► projection

Each tile is computed alone, so its embeddings depend on no other tile or picture of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import Linear
from .encoder import Pixels
from .encoder_layer import EncoderLayer, EncoderLayerWeights
from .vision_spec import VisionSpec


@dataclass(slots=True)
class EncoderWeights:
    """The weights of an encoder of tiles."""

    patches: Tensor  # [hidden, 3, patch, patch]
    patches_bias: Tensor
    positions: Tensor  # [places, hidden]
    layers: list[EncoderLayerWeights]
    last_norm: tuple[Tensor, Tensor]
    projection: Tensor  # [hidden of the text, hidden * shuffle ** 2]


class TileEncoder:
    """An encoder in memory; see `VisionEncoder`."""

    def __init__(self, spec: VisionSpec, weights: EncoderWeights) -> None:
        self._spec = spec
        hidden = spec.hidden_size
        self._patches = Linear(weights.patches.view(hidden, -1), weights.patches_bias)
        self._positions = weights.positions
        self._layers = [EncoderLayer(spec, layer) for layer in weights.layers]
        self._last_norm = weights.last_norm
        self._projection = Linear(weights.projection)
        wide = torch.promote_types(weights.positions.dtype, torch.float32)
        device = weights.positions.device
        self._mean, self._std = (
            torch.tensor(values, dtype=wide, device=device)[:, None, None]
            for values in (spec.mean, spec.std)
        )

    def encode_pictures(self, pictures: Sequence[Pixels], /) -> list[Tensor]:
        return [self._encode_tile(each) for each in pictures]

    def _encode_tile(self, pixels: Pixels) -> Tensor:
        spec = self._spec
        rows, columns = (size // spec.patch_size for size in pixels.shape[:2])
        x = self._patches(self._patches_of(pixels, rows, columns))
        x = x + self._positions[self._places(rows, columns)]
        for layer in self._layers:
            x = layer(x)
        x = F.layer_norm(x, (spec.hidden_size,), *self._last_norm, spec.eps)
        return self._projection(self._join_neighbours(x, rows, columns))

    def _patches_of(self, pixels: Pixels, rows: int, columns: int) -> Tensor:
        """Return the scaled pixels of each patch, `[rows * columns, 3 * patch * patch]`."""
        spec, size = self._spec, self._spec.patch_size
        numbers = (
            torch.from_numpy(pixels).to(self._mean.device).permute(2, 0, 1).to(self._mean.dtype)
        )
        # Pixels are scaled in float32, as in the processor of transformers.
        scaled = (numbers.float() * spec.rescale - self._mean.float()) / self._std.float()
        cut = scaled[:, : rows * size, : columns * size].to(self._positions.dtype)
        by_patch = cut.view(3, rows, size, columns, size).permute(1, 3, 0, 2, 4)
        return by_patch.reshape(rows * columns, -1)

    def _places(self, rows: int, columns: int) -> Tensor:
        """Return the index of each patch's learned position, by its place within the tile."""
        side = self._spec.image_size // self._spec.patch_size
        borders = torch.arange(1 / side, 1.0, 1 / side)
        along = []
        for count in (rows, columns):
            places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
            along.append(torch.bucketize(places.clamp(max=1.0 - 1e-6), borders, right=True))
        places = (along[0][:, None] * side + along[1]).view(-1)
        return places.to(self._positions.device)

    def _join_neighbours(self, x: Tensor, rows: int, columns: int) -> Tensor:
        """Join squares of `shuffle` x `shuffle` patches to one row each."""
        by = self._spec.shuffle
        squares = x.view(rows // by, by, columns // by, by, -1).transpose(1, 2)
        return squares.reshape(rows * columns // by**2, -1)
