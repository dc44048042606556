# SPDX-License-Identifier: Apache-2.0
"""`TileProcessor`: cuts the pictures of Idefics3 and SmolVLM into square tiles.

    resize so that the longest edge has a given length ─► round up to whole tiles ─► tiles, row by
    row, and the whole picture once more as one tile

Sizes and filters, and so the pixels, are equal to transformers' processors on Pillow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import cbor2
from PIL import Image

from ....tiers.settings.values import ConfigError
from ...models.checkpoint.files import is_there
from ...models.checkpoint.json_fields import read_json
from ...models.vision.vision_spec import (
    MAX_SIDE,
    PROCESSOR,
    VisionSpec,
    read_image_processor,
    tile_side,
)
from .picture_processor import PictureItem, ProcessedPicture, ProcessedSize, make_item

PLACEHOLDER = "<image>"
_AROUND, _WHOLE = "<fake_token_around_image>", "<global-img>"
_LANCZOS = 1
_LONGEST = 4 * 364  # transformers' default of the longest edge


@dataclass(frozen=True, slots=True)
class TileProcessor:
    """The picture processor of one model."""

    longest_edge: int  # the longest edge of a resized picture, in pixels
    tile: int  # the edge of a tile, in pixels
    splits: bool
    resample: Image.Resampling
    tokens_of_tile: int
    settings: bytes  # the settings that are part of digests
    placeholder: str = PLACEHOLDER

    def measure_picture(self, width: int, height: int, /) -> ProcessedSize:
        num_items = 1
        if self.splits:
            columns, rows = self._count_tiles(_longest((width, height), self.longest_edge))
            num_items = columns * rows + 1 if columns > 1 or rows > 1 else 1
        return ProcessedSize(num_items * self.tokens_of_tile, num_items * self.tile**2 * 3)

    def process_picture(self, image: Image.Image, /) -> ProcessedPicture:
        sized = image.resize(_longest(image.size, self.longest_edge), self.resample)
        if not self.splits:
            return ProcessedPicture([self._item(self._as_tile(sized))], self._one_text())
        columns, rows = self._count_tiles(sized.size)
        rounded = sized.resize((columns * self.tile, rows * self.tile), self.resample)
        if columns <= 1 and rows <= 1:
            return ProcessedPicture([self._item(rounded)], self._one_text())
        tiles = [
            rounded.crop((x, y, x + self.tile, y + self.tile))
            for y in range(0, rounded.height, self.tile)
            for x in range(0, rounded.width, self.tile)
        ]
        items = [self._item(each) for each in (*tiles, self._as_tile(rounded))]
        return ProcessedPicture(items, self._split_text(rows, columns))

    def _as_tile(self, image: Image.Image) -> Image.Image:
        return image.resize((self.tile, self.tile), self.resample)

    def _count_tiles(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return columns and rows: round the longer edge up, then derive the shorter edge."""
        width, height = size
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            return columns, math.ceil(int(columns * self.tile / ratio) / self.tile)
        rows = math.ceil(height / self.tile)
        return math.ceil(int(rows * self.tile * ratio) / self.tile), rows

    def _item(self, image: Image.Image) -> PictureItem:
        return make_item(image, self.settings, self.tokens_of_tile)

    def _one_text(self) -> str:
        return f"{_AROUND}{_WHOLE}{PLACEHOLDER}{_AROUND}"

    def _split_text(self, rows: int, columns: int) -> str:
        lines = [
            "".join(
                f"{_AROUND}<row_{row}_col_{column}>{PLACEHOLDER}"
                for column in range(1, columns + 1)
            )
            for row in range(1, rows + 1)
        ]
        return "".join(f"{line}\n" for line in lines) + "\n" + self._one_text()


def load_tile_processor(path: Path, spec: VisionSpec) -> TileProcessor:
    """Return the processor for the model at `path`. Raises ConfigError with file and key for an
    unsupported setting."""
    shown = read_image_processor(path)
    assert shown is not None  # `spec` was read from this file
    tile, longest = tile_side(shown), _LONGEST
    if shown.has("size"):
        longest = shown.inner("size").integer("longest_edge", maximum=MAX_SIDE)
    filter_number = shown.integer("resample", _LANCZOS, minimum=0, maximum=5)
    if tile % spec.pixels_of_token:
        raise shown.fault(
            "max_image_size", f"a multiple of {spec.pixels_of_token} pixels, one token", tile
        )
    tokens = (tile // spec.pixels_of_token) ** 2
    told = tokens
    if is_there(path / PROCESSOR):
        told = read_json(path / PROCESSOR).integer("image_seq_len", tokens)
    if told != tokens:
        raise ConfigError(
            f"{path / PROCESSOR}: image_seq_len is {told}, and a tile of {tile} pixels has "
            f"{tokens} tokens; correct one of the files"
        )
    settings = [spec.kind, spec.patch_size, spec.shuffle, spec.rescale, *spec.mean, *spec.std]
    return TileProcessor(
        longest,
        tile,
        shown.boolean("do_image_splitting", True),
        Image.Resampling(filter_number),
        tokens,
        cbor2.dumps(settings, canonical=True),
    )


def _longest(size: tuple[int, int], longest: int) -> tuple[int, int]:
    """Return the size with the longest edge `longest` and an even other edge, within MAX_SIDE."""
    width, height = size
    ratio = width / height
    if width >= height:
        width = longest
        height = int(width / ratio)
        height += height % 2
    else:
        height = longest
        width = int(height * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width = MAX_SIDE
        height = int(width / ratio)
    elif height > width and height > MAX_SIDE:
        height = MAX_SIDE
        width = int(height * ratio)
    return max(width, 1), max(height, 1)
