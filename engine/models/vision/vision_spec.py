# SPDX-License-Identifier: Apache-2.0
"""VisionSpec: the shape of a model's encoder of pictures, an immutable value.

`parse_vision` reads a VisionSpec from config.json and the image processor's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....tiers.settings.values import ConfigError
from ..checkpoint.files import is_there
from ..checkpoint.json_fields import JsonFields, read_json

# Since transformers 5, processor_config.json has the image processor under `image_processor`.
PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
MAX_SIDE = 4096  # largest side of a picture or a tile, in pixels
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
# Classes of image processors, with transformers' defaults for fields that the file lacks.
_TILED = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_WHOLE = ("Qwen2VLImageProcessor",)
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The encoder of a model. Idefics3 and SmolVLM cut pictures into tiles; Qwen3-VL encodes whole
    pictures of any size."""

    kind: str  # `tiles` or `grid`
    token_id: int  # the placeholder token of pictures in a prompt
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # side of a patch, in pixels
    image_size: int  # side of the square of learned positions, in pixels
    eps: float
    is_tanh: bool  # whether GELU is approximated by tanh instead of erf
    shuffle: int  # side, in patches, of the square that becomes one token
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int = 1  # equal pictures that a patch covers
    deep_layers: tuple[int, ...] = ()  # layers whose results the first text layers add

    @property
    def pixels_of_token(self) -> int:
        """The side of the square of pixels that becomes one token."""
        return self.patch_size * self.shuffle


def read_image_processor(path: Path) -> JsonFields | None:
    """Read the image processor's settings of the model under `path`; None if it has no settings."""
    if is_there(path / PROCESSOR):
        whole = read_json(path / PROCESSOR)
        if whole.has("image_processor"):
            return whole.inner("image_processor")
    return read_json(path / PREPROCESSOR) if is_there(path / PREPROCESSOR) else None


def parse_vision(path: Path, whole: JsonFields) -> VisionSpec | None:
    """Read the `VisionSpec` of the model under `path`; None for a model without a supported
    encoder. Raises ConfigError with file and key for values that are not supported."""
    names = whole.values.get("architectures")
    parse = _PARSERS.get(names[0]) if isinstance(names, list) and names else None
    shown = None if parse is None else read_image_processor(path)
    if parse is None or shown is None:
        return None
    spec = parse(whole, whole.inner("vision_config"), shown)
    if spec.hidden_size % spec.num_heads or spec.image_size % spec.patch_size:
        raise ConfigError(
            f"{whole.where}: vision_config: hidden_size must be a multiple of the number of heads, "
            "and image_size a multiple of patch_size; correct config.json"
        )
    return spec


def _parse_tiles(whole: JsonFields, vision: JsonFields, shown: JsonFields) -> VisionSpec:
    _check_processor(shown, _TILED)
    return VisionSpec(
        kind="tiles",
        token_id=whole.integer("image_token_id", minimum=0),
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 3072),
        num_layers=vision.integer("num_hidden_layers", 12),
        num_heads=vision.integer("num_attention_heads", 16),
        patch_size=vision.integer("patch_size", 32, maximum=MAX_SIDE),
        image_size=vision.integer("image_size", 224, maximum=MAX_SIDE),
        eps=vision.number("layer_norm_eps", 1e-6),
        is_tanh=_is_tanh(vision, "num_channels"),
        shuffle=whole.integer("scale_factor", 2),
        rescale=shown.number("rescale_factor", 1 / 255),
        mean=_three(shown, "image_mean", _HALF),
        std=_three(shown, "image_std", _HALF),
    )


def _parse_grid(whole: JsonFields, vision: JsonFields, shown: JsonFields) -> VisionSpec:
    _check_processor(shown, _WHOLE)
    num_layers = vision.integer("depth", 27)
    patch = vision.integer("patch_size", 16, maximum=MAX_SIDE)
    places = vision.integer("num_position_embeddings", 2304)
    side = math.isqrt(places)
    if side**2 != places:
        raise vision.fault("num_position_embeddings", "a square", places)
    deep = vision.values.get("deepstack_visual_indexes", [8, 16, 24])
    layers = deep if isinstance(deep, list) else [-1]
    if layers != [n for n in range(num_layers) if n in layers]:
        expected = f"a rising list of layers below {num_layers}"
        raise vision.fault("deepstack_visual_indexes", expected, deep)
    merge = vision.integer("spatial_merge_size", 2)
    for name, value in (("patch_size", patch), ("merge_size", merge)):
        if shown.integer(name, value) != value:
            raise shown.fault(name, f"{value}, as in config.json", shown.values[name])
    return VisionSpec(
        kind="grid",
        token_id=whole.integer("image_token_id", 151655, minimum=0),
        hidden_size=vision.integer("hidden_size", 1152),
        intermediate_size=vision.integer("intermediate_size", 4304),
        num_layers=num_layers,
        num_heads=vision.integer("num_heads", 16),
        patch_size=patch,
        image_size=side * patch,
        eps=1e-6,
        is_tanh=_is_tanh(vision, "in_channels"),
        shuffle=merge,
        rescale=shown.number("rescale_factor", 1 / 255),
        mean=_three(shown, "image_mean", _CLIP_MEAN),
        std=_three(shown, "image_std", _CLIP_STD),
        frames=vision.integer("temporal_patch_size", 2),
        deep_layers=tuple(layers),
    )


_PARSERS: Mapping[str, Callable[[JsonFields, JsonFields, JsonFields], VisionSpec]] = {
    "Idefics3ForConditionalGeneration": _parse_tiles,
    "SmolVLMForConditionalGeneration": _parse_tiles,
    "Qwen3VLForConditionalGeneration": _parse_grid,
}


def _check_processor(shown: JsonFields, known: Sequence[str]) -> None:
    """Raise ConfigError unless the image processor is in `known` and has no step disabled."""
    kind = shown.text("image_processor_type").removesuffix("Fast").removesuffix("Pil")
    if kind not in known:
        raise shown.fault("image_processor_type", " or ".join(known), kind)
    for name in ("do_resize", "do_rescale", "do_normalize"):
        if not shown.boolean(name, True):
            raise shown.fault(name, "true", False)


def _is_tanh(vision: JsonFields, channels: str) -> bool:
    activation = vision.text("hidden_act", "gelu_pytorch_tanh")
    if activation not in _ACTIVATIONS:
        raise vision.fault("hidden_act", " or ".join(_ACTIVATIONS), activation)
    if vision.integer(channels, 3) != 3:
        raise vision.fault(channels, "3", vision.values[channels])
    return activation == "gelu_pytorch_tanh"


def _three(fields: JsonFields, name: str, default: tuple[float, float, float]) -> tuple[float, ...]:
    return fields.numbers(name, 3) if fields.has(name) else default
