# SPDX-License-Identifier: Apache-2.0
"""The encoder of pictures: the embeddings of transformers in float64, picture by picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from stratakv.engine.models.spec.spec_parser import load_model_spec
from stratakv.engine.models.vision.encoder import Pixels, VisionEncoder
from stratakv.engine.models.vision.vision_loading import load_vision_encoder
from stratakv.tiers.settings.values import ConfigError

from ..picture_model import PictureModel, make_picture_model
from ..qwen_pictures import PROCESSOR as QWEN
from ..smolvlm_pictures import PROCESSOR, TILE, TOKENS_OF_TILE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def grid_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_picture_model(tmp_path_factory.mktemp("pictures"), request.param)


def load(path: Path, dtype: torch.dtype = torch.float64) -> VisionEncoder:
    spec = load_model_spec(path)
    assert spec.vision is not None
    return load_vision_encoder(path, spec.vision, spec.hidden_size, dtype)


def picture(seed: int, height: int = TILE, width: int = TILE) -> Pixels:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def theirs(path: Path, pixels: Pixels) -> torch.Tensor:
    mean, std = (
        torch.tensor(PROCESSOR[name])[:, None, None] for name in ("image_mean", "image_std")
    )
    scaled = (torch.from_numpy(pixels).permute(2, 0, 1).float() * (1 / 255) - mean) / std
    model = PictureModel(path).reference.model
    with torch.inference_mode():
        found: torch.Tensor = model.get_image_features(scaled.double()[None, None]).pooler_output
    return found[0]


def test_embeddings_are_those_of_transformers(path: Path) -> None:
    encoder = load(path)
    for seed in range(3):
        one = picture(seed)
        [found] = encoder.encode_pictures([one])
        assert found.shape == (TOKENS_OF_TILE, load_model_spec(path).hidden_size)
        assert (found - theirs(path, one)).abs().max() < 1e-12


@pytest.mark.parametrize(
    "size", [(32, 32), (16, 64), (64, 16), (48, 80), (16, 16), (96, 96), (112, 80)]
)
def test_embeddings_of_whole_pictures_are_those_of_transformers(
    grid_path: Path, size: tuple[int, int]
) -> None:
    """Rotary positions are turned in float32 on both sides, so the sums agree to about 1e-6."""
    pixels = picture(7, *size)
    [found] = load(grid_path).encode_pictures([pixels])
    made = Qwen2VLImageProcessorPil(**(QWEN | {"do_resize": False}))(
        [Image.fromarray(pixels)], return_tensors="pt"
    )
    model = PictureModel(grid_path).reference.model
    with torch.inference_mode():
        wanted = model.get_image_features(made["pixel_values"].double(), made["image_grid_thw"])
    columns = [wanted.pooler_output, *getattr(wanted, "deepstack_features", ())]
    whole = torch.cat([torch.cat(list(each)) for each in columns], dim=1)
    hidden = load_model_spec(grid_path).hidden_size
    assert found.shape == (size[0] * size[1] // 256, len(columns) * hidden)
    assert (found - whole).abs().max() < 1e-5


def test_pictures_do_not_depend_on_those_beside_them(path: Path) -> None:
    encoder = load(path)
    some = [picture(1), picture(2, 16, 32), picture(3), picture(4, 64, 32)]
    together = encoder.encode_pictures(some)
    for one, found in zip(some, together, strict=True):
        assert torch.allclose(encoder.encode_pictures([one])[0], found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown activation", "heads"])
def test_files_that_do_not_fit_are_refused(path: Path, tmp_path: Path, fault: str) -> None:
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((path / name).read_text())
    weights = load_file(path / "model.safetensors")
    name = "model.vision_model.encoder.layers.1.mlp.fc1.weight"
    config = json.loads((path / "config.json").read_text())
    if fault == "missing":
        del weights[name]
    elif fault == "shape":
        weights[name] = weights[name][:-1].contiguous()
    elif fault == "heads":
        config["vision_config"]["num_attention_heads"] = 5
    else:
        config["vision_config"]["hidden_act"] = "tanhshrink"
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(weights, tmp_path / "model.safetensors")
    words = {"heads": "number of heads", "unknown activation": "hidden_act"}
    with pytest.raises(ConfigError, match=words.get(fault, "fc1")):
        load(tmp_path)


@pytest.fixture
def windowed(tmp_path: Path) -> Path:
    return make_picture_model(tmp_path, "qwen2_5_vl")


def test_older_files_have_the_text_part_beside_the_whole(windowed: Path) -> None:
    nested = load_model_spec(windowed)
    config = json.loads((windowed / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    kept = {name: value for name, value in text.items() if name != "model_type"}
    older = {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    config["vision_config"]["in_chans"] = config["vision_config"].pop("in_channels")
    (windowed / "config.json").write_text(json.dumps(kept | config | older))
    assert load_model_spec(windowed) == nested


@pytest.mark.parametrize(
    ("part", "field", "value", "words"),
    [
        ("vision_config", "window_size", 15, "window_size must be at least 16 pixels, one token"),
        (
            "vision_config",
            "fullatt_block_indexes",
            [3, 1],
            "fullatt_block_indexes must be a rising",
        ),
        ("vision_config", "fullatt_block_indexes", [4], "a rising list of layers below 4"),
        ("vision_config", "hidden_act", "gelu", "hidden_act must be silu"),
        ("vision_config", "in_channels", 4, "in_channels must be 3"),
        ("vision_config", "hidden_size", 24, "heads must have a multiple of 4 elements"),
        ("text_config", "rope_parameters", {"mrope_section": [4, 2, 1]}, "with the sum 8"),
    ],
)
def test_shapes_of_windowed_encoders_are_checked(
    windowed: Path, part: str, field: str, value: object, words: str
) -> None:
    config = json.loads((windowed / "config.json").read_text())
    config[part][field] = value
    (windowed / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=words):
        load_model_spec(windowed)
