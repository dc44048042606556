# SPDX-License-Identifier: Apache-2.0
"""`GridProcessor`: resizes the pictures of Qwen-VL so that whole tokens cover a picture.

Resizing keeps the ratio of the edges, about, and the pixels within two limits. A picture is one
item, which the encoder cuts into patches. Sizes and filters are as in transformers with Pillow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import cbor2
from PIL import Image

from ...models.vision.vision_spec import VisionSpec, pixel_limit, read_image_processor
from .picture_processor import ProcessedPicture, ProcessedSize, make_item

PLACEHOLDER = "<|image_pad|>"
MOST_RATIO = 200  # limit of the ratio of the longer edge to the shorter edge
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class GridProcessor:
    """The picture processor of one model."""

    side: int  # the edge of a token's square, in pixels
    least_pixels: int
    most_pixels: int
    resample: Image.Resampling
    settings: bytes  # the settings that are part of digests
    placeholder: str = PLACEHOLDER

    def measure_picture(self, width: int, height: int, /) -> ProcessedSize:
        columns, rows = (edge // self.side for edge in self._size_of(width, height))
        return ProcessedSize(columns * rows, columns * rows * self.side**2 * 3)

    def process_picture(self, image: Image.Image, /) -> ProcessedPicture:
        num_tokens = self.measure_picture(*image.size).num_tokens
        sized = image.resize(self._size_of(*image.size), self.resample)
        return ProcessedPicture([make_item(sized, self.settings, num_tokens)], PLACEHOLDER)

    def _size_of(self, width: int, height: int) -> tuple[int, int]:
        """Return a size (width, height) in pixels of whole tokens, within the limits. Raises
        ValueError for edges whose ratio is above MOST_RATIO."""
        if max(width, height) > MOST_RATIO * min(width, height):
            raise ValueError(
                f"its longer edge must be at most {MOST_RATIO} times the shorter one, and it has "
                f"{width} x {height} pixels; crop it"
            )
        side, area = self.side, width * height
        rounded = round(width / side) * side, round(height / side) * side
        if rounded[0] * rounded[1] > self.most_pixels:
            shrink = math.sqrt(area / self.most_pixels)
            return (
                max(math.floor(width / shrink / side), 1) * side,
                max(math.floor(height / shrink / side), 1) * side,
            )
        if rounded[0] * rounded[1] < self.least_pixels:
            growth = math.sqrt(self.least_pixels / area)
            return (
                math.ceil(width * growth / side) * side,
                math.ceil(height * growth / side) * side,
            )
        return rounded


def load_grid_processor(path: Path, spec: VisionSpec) -> GridProcessor:
    """Return the processor for the model at `path`. Raises ConfigError with file and key for an
    unsupported setting."""
    shown = read_image_processor(path)
    assert shown is not None  # `spec` was read from this file
    # The default values are the default values of transformers.
    least, most = pixel_limit(shown, "min_pixels", "shortest_edge", 56 * 56), spec.most_pixels
    if least > most:
        name = "max_pixels" if shown.has("max_pixels") else "size"
        raise shown.fault(name, f"at least {least} pixels, the smaller limit", most)
    settings = [spec.kind, spec.patch_size, spec.shuffle, spec.rescale, *spec.mean, *spec.std]
    return GridProcessor(
        spec.pixels_of_token,
        least,
        most,
        Image.Resampling(shown.integer("resample", _BICUBIC, minimum=0, maximum=5)),
        cbor2.dumps(settings, canonical=True),
    )
