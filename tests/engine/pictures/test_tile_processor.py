# SPDX-License-Identifier: Apache-2.0
"""TileProcessor: pixels and texts of transformers' processors; placeholders and their places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.pictures.processors.picture_processor import (
    PictureItem,
    ProcessedPicture,
    expand_placeholders,
    place_items,
)
from stratakv.engine.pictures.processors.tile_processor import TileProcessor, load_tile_processor
from stratakv.tiers.settings.values import ConfigError

from ..picture_model import draw_picture, make_picture_model
from ..smolvlm_pictures import PROCESSOR

SIZES = [(1, 1), (1, 300), (300, 1), (90, 140), (64, 64), (65, 33), (33, 65), (500, 100), (31, 32),
         (1456, 364)]  # fmt: skip
CLASSES: dict[str, Any] = {
    "SmolVLMImageProcessor": SmolVLMImageProcessorPil,
    "Idefics3ImageProcessor": Idefics3ImageProcessorPil,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"))


def load(path: Path, kind: str = "SmolVLMImageProcessor", **changes: Any) -> TileProcessor:
    fields = {"image_processor_type": kind, **PROCESSOR, **changes}
    file = path / "preprocessor_config.json"
    before = file.read_text()
    try:
        file.write_text(json.dumps(fields))
        spec = load_model_spec(path)
        assert spec.vision is not None
        return load_tile_processor(path, spec.vision)
    finally:
        file.write_text(before)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize(("longest", "tile"), [(64, 32), (96, 32), (200, 48)])
def test_pixels_and_texts_are_those_of_transformers(
    path: Path, kind: str, splits: bool, longest: int, tile: int
) -> None:
    changes = {
        "size": {"longest_edge": longest},
        "max_image_size": {"longest_edge": tile},
        "do_image_splitting": splits,
    }
    ours = load(path, kind, **changes)
    theirs = CLASSES[kind](**(PROCESSOR | changes))
    mean, std = (np.asarray(PROCESSOR[name], np.float32) for name in ("image_mean", "image_std"))
    for width, height in SIZES:
        image = draw_picture(height, width, height * width)
        wanted = theirs([[image]], return_tensors="np", return_row_col_info=True)
        made = ours.process_picture(image)
        joined = b"".join(item.pixels for item in made.items)
        pixels = np.frombuffer(joined, np.uint8).reshape(-1, tile, tile, 3).astype(np.float32)
        num_tokens = len(made.items) * ours.tokens_of_tile
        assert ours.measure_picture(width, height) == (num_tokens, len(joined))
        scaled = ((pixels * np.float32(1 / 255) - mean) / std).transpose(0, 3, 1, 2)
        assert scaled.shape == wanted["pixel_values"][0].shape, (width, height)
        assert np.abs(scaled - wanted["pixel_values"][0]).max() < 1e-6, (width, height)
        whole = made.text.replace("<image>", "<image>" * ours.tokens_of_tile)
        assert whole == get_image_prompt_string(
            wanted["rows"][0][0], wanted["cols"][0][0], ours.tokens_of_tile,
            "<fake_token_around_image>", "<image>", "<global-img>",
        )  # fmt: skip


def test_digests_cover_pixels_and_settings(path: Path) -> None:
    image = draw_picture(40, 40)
    digests = [item.digest for item in load(path).process_picture(image).items]
    assert [item.digest for item in load(path).process_picture(image.copy()).items] == digests
    changed = image.copy()
    changed.putpixel((0, 0), (1, 2, 3))
    others = [item.digest for item in load(path).process_picture(changed).items]
    assert others[0] != digests[0] and others[-1] != digests[-1]
    scaled = load(path, image_mean=[0.5, 0.5, 0.25]).process_picture(image)
    assert not {item.digest for item in scaled.items} & set(digests)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_image_size": {"longest_edge": 40}}, "multiple of 16"),
        ({"max_image_size": {"longest_edge": 1 << 20}}, "longest_edge"),
        ({"size": {"longest_edge": 0}}, "longest_edge"),
        ({"resample": 9}, "resample"),
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"image_mean": [0.5]}, "image_mean"),
        ({"image_processor_type": "OtherImageProcessor"}, "image_processor_type"),
    ],
)
def test_settings_that_are_not_supported_are_refused(
    path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load(path, **changes)


def test_settings_in_the_processors_file_come_first(path: Path) -> None:
    """Transformers 5 saves that file."""
    file = path / "processor_config.json"
    image = {"image_processor_type": "SmolVLMImageProcessorPil", **PROCESSOR}
    try:
        file.write_text(json.dumps({"image_processor": image | {"do_image_splitting": False}}))
        assert len(load(path).process_picture(draw_picture(40, 90)).items) == 1
        file.write_text(json.dumps({"image_processor": image | {"size": {}}}))
        with pytest.raises(ConfigError, match=r"image_processor: size: .*longest_edge"):
            load(path)
    finally:
        file.unlink()


def test_another_number_of_tokens_in_the_processors_file_is_refused(path: Path) -> None:
    file = path / "processor_config.json"
    try:
        file.write_text(json.dumps({"image_seq_len": 5}))
        with pytest.raises(ConfigError, match="image_seq_len is 5"):
            load(path)
    finally:
        file.unlink()


def processed(name: str, *num_tokens: int) -> ProcessedPicture:
    items = [PictureItem(bytes(3), 1, 1, name.encode().ljust(32), n) for n in num_tokens]
    return ProcessedPicture(items, name + "#|" * len(items))


def test_texts_take_the_places_of_placeholders() -> None:
    first, second = processed("a", 2, 1), processed("b", 3)
    assert expand_placeholders("x#y#z", [first, second], "#") == "xa#|#|yb#|z"
    for text in ("x#y", "x#y#z#", "none"):
        with pytest.raises(ValueError, match="2 pictures came"):
            expand_placeholders(text, [first, second], "#")


def test_placeholders_become_the_tokens_of_items() -> None:
    pictures = [processed("a", 2, 1), processed("b", 3)]
    prompt, found = place_items(np.asarray([1, 9, 2, 9, 9, 4], np.int32), pictures, 9)
    assert prompt.tolist() == [1, 9, 9, 2, 9, 9, 9, 9, 4] and prompt.dtype == np.int32
    assert [(each.start, each.num_tokens) for each in found] == [(1, 2), (4, 1), (5, 3)]
    assert [each.digest[:1] for each in found] == [b"a", b"a", b"b"]
    for tokens in ([9, 9], [9, 9, 9, 9], [1]):
        with pytest.raises(ValueError, match="tokens that stand for pictures"):
            place_items(np.asarray(tokens, np.int32), pictures, 9)


def test_any_proportions_are_processed(path: Path) -> None:
    processor = load(path, size={"longest_edge": 4096})
    for size in ((1, 4000), (4000, 1)):
        made = processor.process_picture(Image.new("RGB", size))
        assert all((item.height, item.width) == (32, 32) for item in made.items)
        num_tokens = len(made.items) * processor.tokens_of_tile
        assert processor.measure_picture(*size) == (num_tokens, len(made.items) * 32 * 32 * 3)
