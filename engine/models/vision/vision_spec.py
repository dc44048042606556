# SPDX-License-Identifier: Apache-2.0
"""VisionSpec: the shape of a model's encoder of pictures, an immutable value.

`parse_vision` reads it from config.json and the image processor's settings. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ....tiers.settings.values import ConfigError
from ..checkpoint.files import is_there
from ..checkpoint.json_fields import JsonFields, read_json

# Since transformers 5 the first file has the settings of the second under `image_processor`.
PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
MAX_SIDE = 4096  # pixels of a picture or a tile
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
# Classes of processors, with what transformers takes if the file leaves a field out.
_TILED = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_OF_TILES = ("Idefics3ForConditionalGeneration", "SmolVLMForConditionalGeneration")
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The encoder of a model that cuts pictures into tiles (Idefics3, SmolVLM)."""

    kind: str  # tiles
    token_id: int  # the placeholder of a picture's tokens
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels a side
    image_size: int  # pixels a side of the learned positions
    eps: float
    is_tanh: bool  # the activation is GELU by tanh, else by erf
    shuffle: int  # patches a side that become one token
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def pixels_of_token(self) -> int:
        """The side of the square of pixels that becomes one token."""
        return self.patch_size * self.shuffle


def read_image_processor(path: Path) -> JsonFields | None:
    """Read the settings of the image processor of the model under `path`; None if it has none."""
    if is_there(path / PROCESSOR):
        whole = read_json(path / PROCESSOR)
        if whole.has("image_processor"):
            return whole.inner("image_processor")
    return read_json(path / PREPROCESSOR) if is_there(path / PREPROCESSOR) else None


def parse_vision(path: Path, whole: JsonFields) -> VisionSpec | None:
    """Read the encoder of the model under `path`; None for a model whose pictures are not read
    here. Raises ConfigError with file and key for values that are not supported."""
    names = whole.values.get("architectures")
    has_tiles = isinstance(names, list) and bool(names) and names[0] in _OF_TILES
    shown = read_image_processor(path) if has_tiles else None
    if shown is None:
        return None
    vision = whole.inner("vision_config")
    kind = shown.text("image_processor_type").removesuffix("Fast").removesuffix("Pil")
    if kind not in _TILED:
        raise shown.fault("image_processor_type", " or ".join(_TILED), kind)
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not shown.boolean(name, True):
            raise shown.fault(name, "true", False)
    activation = vision.text("hidden_act", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise vision.fault("hidden_act", " or ".join(_ACTIVATIONS), activation)
    if vision.integer("num_channels", 3) != 3:
        raise vision.fault("num_channels", "3", vision.values["num_channels"])
    spec = VisionSpec(
        kind="tiles",
        token_id=whole.integer("image_token_id", minimum=0),
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=vision.integer("num_hidden_layers", 12),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=vision.integer("patch_size", 32, maximum=MAX_SIDE),
        image_size=vision.integer("image_size", 224, maximum=MAX_SIDE),
        eps=vision.number("layer_norm_eps", 1e-6),
        is_tanh=activation == "gelu_pytorch_tanh",
        shuffle=whole.integer("scale_factor", 2),
        rescale=shown.number("rescale_factor", 1 / 255),
        mean=_three(shown, "image_mean"),
        std=_three(shown, "image_std"),
    )
    if spec.hidden_size % spec.num_heads or spec.image_size % spec.patch_size:
        raise ConfigError(
            f"{vision.where}: hidden_size must be a multiple of num_attention_heads and image_size "
            "one of patch_size; correct config.json"
        )
    return spec


def _three(fields: JsonFields, name: str) -> tuple[float, ...]:
    return fields.numbers(name, 3) if fields.has(name) else _HALF
