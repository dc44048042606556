# SPDX-License-Identifier: Apache-2.0
"""`load_processor`: loads the picture processor that a model needs."""

from __future__ import annotations

from pathlib import Path

from ...models.vision.vision_spec import VisionSpec
from .grid_processor import load_grid_processor
from .picture_processor import PictureProcessor
from .tile_processor import load_tile_processor


def load_processor(path: Path, spec: VisionSpec) -> PictureProcessor:
    """Return the processor for the model at `path`. Raises ConfigError with file and key for an
    unsupported setting."""
    load = load_tile_processor if spec.kind == "tiles" else load_grid_processor
    return load(path, spec)
