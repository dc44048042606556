# SPDX-License-Identifier: Apache-2.0
"""GridEncoder: the encoder of Qwen2.5-VL and Qwen3-VL, a vision transformer over one picture of any
size.

    pixels ─► patches + interpolated positions ─► layers with rotary positions ─► merged ─► columns
                                                    └─► after some layers: merged ─► more columns

Qwen3-VL: a row of the result has the embedding of a token and then what is added to the token after
each of the first layers of the text. Qwen2.5-VL has neither these additions nor learned positions,
and most of its layers attend within squares of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layers import Linear
from .encoder import Pixels
from .encoder_layer import (
    EncoderLayer,
    EncoderLayerWeights,
    NormWeights,
    Turns,
    Windows,
    norm_rows,
)
from .vision_spec import VisionSpec

_THETA = 10000.0


@dataclass(slots=True)
class MergerWeights:
    """The weights of a merger, which joins the patches of a token. Matrices are `[out, in]`."""

    norm: NormWeights  # over a patch, or over all patches of a token
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


@dataclass(slots=True)
class GridWeights:
    """The weights of an encoder of whole pictures."""

    patches: Tensor  # [hidden, 3, frames, patch, patch]
    patches_bias: Tensor | None
    positions: Tensor | None  # [side ** 2, hidden]; None: none are learned
    layers: list[EncoderLayerWeights]
    merger: MergerWeights
    deep_mergers: list[MergerWeights]


class GridEncoder:
    """An encoder in memory; see `VisionEncoder`."""

    def __init__(self, spec: VisionSpec, weights: GridWeights) -> None:
        self._spec = spec
        self._patches = Linear(weights.patches.view(spec.hidden_size, -1), weights.patches_bias)
        self._positions = weights.positions
        self._layers = [EncoderLayer(spec, layer) for layer in weights.layers]
        self._merger = _Merger(spec, weights.merger)
        self._deep = dict(
            zip(
                spec.deep_layers,
                (_Merger(spec, merger) for merger in weights.deep_mergers),
                strict=True,
            )
        )
        self._dtype, self._device = weights.patches.dtype, weights.patches.device
        wide = torch.promote_types(self._dtype, torch.float32)
        self._mean, self._std = (
            torch.tensor(values, dtype=wide, device=self._device)[:, None, None]
            for values in (spec.mean, spec.std)
        )

    def encode_pictures(self, pictures: Sequence[Pixels], /) -> list[Tensor]:
        return [self._encode_picture(each) for each in pictures]

    def _encode_picture(self, pixels: Pixels) -> Tensor:
        spec = self._spec
        rows, columns = (size // spec.patch_size for size in pixels.shape[:2])
        row, column = self._order(rows, columns)
        tokens, windows = self._windows(rows // spec.shuffle, columns // spec.shuffle)
        if windows:
            row, column = (each.view(len(tokens), -1)[tokens].view(-1) for each in (row, column))
        x = self._patches(self._patches_of(pixels, row, column))
        if self._positions is not None:
            x = x + self._positions_at(self._positions, row, column, rows, columns)
        turns = self._turns(row, column)
        deep = []
        for index, layer in enumerate(self._layers):
            x = layer(x, turns, () if index in spec.full_layers else windows)
            if (merger := self._deep.get(index)) is not None:
                deep.append(merger(x))
        found = torch.cat((self._merger(x), *deep), dim=1)
        return found[tokens.argsort()] if windows else found

    def _windows(self, rows: int, columns: int) -> tuple[Tensor, list[Windows]]:
        """Return the tokens of a picture of `rows` x `columns` tokens, square by square, and the
        squares. Squares at the right and lower edges are cut; those of one size stand together."""
        side, by = self._spec.window, self._spec.shuffle
        grid = torch.arange(rows * columns, device=self._device).view(rows, columns)
        if not side:
            return grid.view(-1), []
        found, windows = [], []
        for down, height in _cuts(rows, side):
            for right, width in _cuts(columns, side):
                part = grid[down, right]
                number = part.shape[0] // height, part.shape[1] // width
                squares = part.reshape(number[0], height, number[1], width).transpose(1, 2)
                found.append(squares.reshape(-1))
                windows.append((number[0] * number[1], height * width * by**2))
        return torch.cat(found), windows

    def _order(self, rows: int, columns: int) -> tuple[Tensor, Tensor]:
        """Return row and column of each patch: token by token, the patches of a token together."""
        by, device = self._spec.shuffle, self._device
        grid = torch.stack(
            torch.meshgrid(
                torch.arange(rows, device=device),
                torch.arange(columns, device=device),
                indexing="ij",
            )
        )
        blocks = grid.view(2, rows // by, by, columns // by, by).transpose(2, 3)
        row, column = blocks.reshape(2, -1).unbind()
        return row, column

    def _patches_of(self, pixels: Pixels, row: Tensor, column: Tensor) -> Tensor:
        """Return the scaled pixels of each patch, `[patches, 3 * frames * patch ** 2]`. A picture
        is a film of equal frames."""
        spec, size = self._spec, self._spec.patch_size
        numbers = torch.from_numpy(pixels).to(self._mean.device).permute(2, 0, 1)
        # In float32, as the processor of transformers computes them.
        scaled = (numbers.float() * spec.rescale - self._mean.float()) / self._std.float()
        _, height, width = scaled.shape
        cut = scaled.view(3, height // size, size, width // size, size).permute(1, 3, 0, 2, 4)
        frames = cut[row, column][:, :, None].expand(-1, -1, spec.frames, -1, -1)
        return frames.reshape(len(row), -1).to(self._dtype)

    def _positions_at(
        self, learned: Tensor, row: Tensor, column: Tensor, rows: int, columns: int
    ) -> Tensor:
        """Return the learned positions of the patches, between the four nearest of the square that
        was learned."""
        side = self._spec.image_size // self._spec.patch_size
        total = torch.zeros((), dtype=self._dtype, device=self._device)
        ways = []
        for place, count in ((row, rows), (column, columns)):
            at = place.float() * (side - 1) / max(count - 1, 1)
            low = at.floor()
            near = low.long().clamp(0, side - 1), (low.long() + 1).clamp(0, side - 1)
            ways.append(((near[0], 1 - (at - low)), (near[1], at - low)))
        for down, of_down in ways[0]:
            for right, of_right in ways[1]:
                weight = (of_down * of_right)[:, None].to(self._dtype)
                total = total + learned[down * side + right] * weight
        return total

    def _turns(self, row: Tensor, column: Tensor) -> Turns:
        """Return the rotary positions: half of the pairs turn by the row, half by the column."""
        half = self._spec.hidden_size // self._spec.num_heads // 2
        powers = torch.arange(0, half, 2, dtype=torch.float32, device=row.device) / half
        speeds = 1.0 / _THETA**powers
        angles = torch.cat([place.float()[:, None] * speeds for place in (row, column)], dim=1)
        return angles.cos()[:, None], angles.sin()[:, None]


class _Merger:
    """Joins the patches of a token to one row of the text's size."""

    def __init__(self, spec: VisionSpec, weights: MergerWeights) -> None:
        self._eps, self._norm = spec.eps, weights.norm
        self._joined = spec.hidden_size * spec.shuffle**2
        self._up = Linear(weights.up, weights.up_bias)
        self._down = Linear(weights.down, weights.down_bias)

    def __call__(self, x: Tensor) -> Tensor:
        x = norm_rows(x.reshape(-1, len(self._norm[0])), self._norm, self._eps)
        return self._down(F.gelu(self._up(x.reshape(-1, self._joined))))


def _cuts(size: int, side: int) -> list[tuple[slice, int]]:
    """Return the part of an edge of `size` tokens that whole squares cover, and the rest, each with
    the edge of its squares."""
    whole = size - size % side
    cuts = [(slice(0, whole), side), (slice(whole, size), size - whole)]
    return [(part, edge) for part, edge in cuts if part.start < part.stop]
