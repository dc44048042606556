# SPDX-License-Identifier: Apache-2.0
"""GridProcessor: pixels and sizes of transformers' processor of Qwen-VL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.pictures.processors.grid_processor import GridProcessor, load_grid_processor
from stratakv.tiers.settings.values import ConfigError

from ..picture_model import draw_picture, make_picture_model
from ..qwen_pictures import MERGE, PATCH, PLACEHOLDER, PROCESSOR, write_processor

SIZES = [(1, 1), (1, 200), (200, 1), (90, 140), (64, 64), (65, 33), (33, 65), (500, 100), (31, 32),
         (1456, 364), (8, 24), (24, 8)]  # fmt: skip
LIMITS = [(1024, 4096), (256, 256), (1, 1 << 20), (3136, 1003520)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"), "qwen3_vl")


def load(path: Path, **changes: Any) -> GridProcessor:
    try:
        write_processor(path, **changes)
        spec = load_model_spec(path)
        assert spec.vision is not None
        return load_grid_processor(path, spec.vision)
    finally:
        write_processor(path)


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("resample", [2, 3])
def test_pixels_are_those_of_transformers(
    path: Path, limits: tuple[int, int], resample: int
) -> None:
    size = dict(zip(("shortest_edge", "longest_edge"), limits, strict=True))
    ours = load(path, size=size, resample=resample)
    theirs = Qwen2VLImageProcessorPil(**(PROCESSOR | {"size": size, "resample": resample}))
    mean, std = (np.asarray(PROCESSOR[name], np.float32) for name in ("image_mean", "image_std"))
    for width, height in SIZES:
        image = draw_picture(height, width, height * width)
        wanted = theirs([image], return_tensors="np")
        [item], text = ours.process_picture(image)
        rows, columns = item.height // PATCH, item.width // PATCH
        num_bytes = item.height * item.width * 3
        assert ours.measure_picture(width, height) == (item.num_tokens, num_bytes)
        assert [1, rows, columns] == wanted["image_grid_thw"][0].tolist(), (width, height)
        assert item.num_tokens == rows * columns // MERGE**2
        assert text == PLACEHOLDER
        pixels = np.frombuffer(item.pixels, np.uint8).reshape(item.height, item.width, 3)
        scaled = (pixels.astype(np.float32) * np.float32(1 / 255) - mean) / std
        patches = scaled.reshape(rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH, 3)
        ordered = patches.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns, 3, 1, -1)
        frames = np.broadcast_to(ordered, (rows * columns, 3, 2, PATCH**2))
        found = frames.reshape(rows * columns, -1)
        assert np.abs(found - wanted["pixel_values"]).max() < 1e-5, (width, height)


def test_older_keys_are_read(path: Path) -> None:
    older = load(path, min_pixels=512, max_pixels=2048, size={"shortest_edge": 1})
    assert (older.least_pixels, older.most_pixels) == (512, 2048)


def test_digests_cover_pixels_sizes_and_settings(path: Path) -> None:
    image = draw_picture(64, 64)
    [item], _ = load(path).process_picture(image)
    [again], _ = load(path).process_picture(image.copy())
    assert again.digest == item.digest
    [scaled], _ = load(path, image_std=[0.5, 0.5, 0.5]).process_picture(image)
    assert scaled.digest != item.digest
    wide, tall = Image.new("RGB", (128, 32)), Image.new("RGB", (32, 128))
    digests = {load(path).process_picture(each).items[0].digest for each in (wide, tall)}
    assert len(digests) == 2, "equal bytes in another shape"


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (5, 4000)])
def test_slivers_are_refused(path: Path, size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at most 200 times the shorter one"):
        load(path).process_picture(Image.new("RGB", size))
    with pytest.raises(ValueError, match="at most 200 times the shorter one"):
        load(path).measure_picture(*size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"patch_size": 16}, "patch_size"),
        ({"merge_size": 3}, "merge_size"),
        ({"size": {"shortest_edge": 4096, "longest_edge": 1024}}, "at least 4096 pixels"),
        ({"size": {"shortest_edge": 4096}}, "longest_edge"),
        ({"max_pixels": 1 << 40}, "max_pixels"),
        ({"resample": 9}, "resample"),
        ({"do_rescale": False}, "do_rescale"),
        ({"image_processor_type": "SmolVLMImageProcessor"}, "image_processor_type"),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(path, **changes)


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("vision_config", "deepstack_visual_indexes", [2, 0]),
        ("vision_config", "deepstack_visual_indexes", [0, 4]),
        ("vision_config", "deepstack_visual_indexes", [0, 1, 2]),
        ("vision_config", "num_position_embeddings", 35),
        ("text_config", "mrope_section", [4, 2]),
        ("text_config", "mrope_section", [4, 2, 20]),
    ],
)
def test_configurations_that_are_not_supported_are_refused(
    path: Path, tmp_path: Path, part: str, field: str, value: object
) -> None:
    config = json.loads((path / "config.json").read_text())
    fields = config[part]
    (fields["rope_parameters"] if field == "mrope_section" else fields)[field] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_processor(tmp_path)
    with pytest.raises(ConfigError, match=field):
        load_model_spec(tmp_path)
