# SPDX-License-Identifier: Apache-2.0
"""VisionSpec: the shape of a model's encoder of pictures, an immutable value.

`parse_vision` reads it from config.json and the image processor's settings. It needs no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ....tiers.settings.values import ConfigError
from ..checkpoint.files import is_there
from ..checkpoint.json_fields import JsonFields, read_json

# Since transformers 5 the first file has the settings of the second under `image_processor`.
PROCESSOR = "processor_config.json"
PREPROCESSOR = "preprocessor_config.json"
MAX_SIDE = 4096  # pixels of a picture or a tile
_MOST_OF_ALL = 1 << 26  # pixels of a picture
_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu")
# Classes of processors, with what transformers takes if the file leaves a field out.
_TILED = ("Idefics3ImageProcessor", "SmolVLMImageProcessor")
_WHOLE = ("Qwen2VLImageProcessor", "Qwen2_5_VLImageProcessor")
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The encoder of a model. Idefics3 and SmolVLM cut pictures into tiles; Qwen2.5-VL and Qwen3-VL
    encode whole pictures of any size."""

    kind: str  # `tiles`; `grid`, of Qwen3-VL; or `windows`, of Qwen2.5-VL
    token_id: int  # the placeholder of a picture's tokens
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_size: int  # pixels a side
    image_size: int  # pixels a side of the learned positions; 0: there are none
    eps: float
    is_tanh: bool  # the activation is GELU by tanh, else by erf; SiLU with a gate in `windows`
    shuffle: int  # patches a side that become one token
    rescale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    frames: int = 1  # equal pictures that a patch covers
    deep_layers: tuple[int, ...] = ()  # whose results are added after the first layers of the text
    window: int = 0  # tokens a side of the squares within which layers attend; 0: no squares
    full_layers: tuple[int, ...] = ()  # that attend to the whole picture although there are squares
    most_pixels: int = MAX_SIDE**2  # of the largest picture or tile

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


def tile_side(shown: JsonFields) -> int:
    """Read the side of a tile, in pixels."""
    if not shown.has("max_image_size"):
        return 364  # what transformers takes
    return shown.inner("max_image_size").integer("longest_edge", maximum=MAX_SIDE)


def pixel_limit(shown: JsonFields, name: str, edge: str, default: int) -> int:
    """Read a limit of a picture's pixels from its older key, or from `size`."""
    if shown.has(name):
        return shown.integer(name, maximum=_MOST_OF_ALL)
    if shown.has("size"):
        return shown.inner("size").integer(edge, maximum=_MOST_OF_ALL)
    return default


def parse_vision(path: Path, whole: JsonFields) -> VisionSpec | None:
    """Read the encoder of the model under `path`; None for a model whose pictures are not read
    here. Raises ConfigError with file and key for values that are not supported."""
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
    if spec.kind != "tiles" and spec.hidden_size // spec.num_heads % 4:
        raise ConfigError(
            f"{whole.where}: vision_config: heads must have a multiple of 4 elements, for their "
            "rotary positions have two axes; correct hidden_size or num_heads"
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
        most_pixels=tile_side(shown) ** 2,
    )


def _parse_grid(whole: JsonFields, vision: JsonFields, shown: JsonFields) -> VisionSpec:
    _check_processor(shown, _WHOLE)
    num_layers = vision.integer("depth", 27)
    patch = vision.integer("patch_size", 16, maximum=MAX_SIDE)
    places = vision.integer("num_position_embeddings", 2304)
    side = math.isqrt(places)
    if side**2 != places:
        raise vision.fault("num_position_embeddings", "a square", places)
    merge = _merge_size(vision, shown, patch)
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
        deep_layers=_layers(vision, "deepstack_visual_indexes", (8, 16, 24), num_layers),
        most_pixels=pixel_limit(shown, "max_pixels", "longest_edge", 28 * 28 * 1280),
    )


def _parse_windows(whole: JsonFields, vision: JsonFields, shown: JsonFields) -> VisionSpec:
    _check_processor(shown, _WHOLE)
    num_layers = vision.integer("depth", 32)
    patch = vision.integer("patch_size", 14, maximum=MAX_SIDE)
    merge = _merge_size(vision, shown, patch)
    window, token = vision.integer("window_size", 112, maximum=MAX_SIDE), patch * merge
    if window < token:
        raise vision.fault("window_size", f"at least {token} pixels, one token", window)
    if vision.text("hidden_act", "silu") != "silu":
        raise vision.fault("hidden_act", "silu", vision.values["hidden_act"])
    for name in ("in_channels", "in_chans"):
        if vision.integer(name, 3) != 3:
            raise vision.fault(name, "3", vision.values[name])
    return VisionSpec(
        kind="windows",
        token_id=whole.integer("image_token_id", 151655, minimum=0),
        hidden_size=vision.integer("hidden_size", 3584),
        intermediate_size=vision.integer("intermediate_size", 3420),
        num_layers=num_layers,
        num_heads=vision.integer("num_heads", 16),
        patch_size=patch,
        image_size=0,
        eps=1e-6,
        is_tanh=False,
        shuffle=merge,
        rescale=shown.number("rescale_factor", 1 / 255),
        mean=_three(shown, "image_mean", _CLIP_MEAN),
        std=_three(shown, "image_std", _CLIP_STD),
        frames=vision.integer("temporal_patch_size", 2),
        window=window // token,
        full_layers=_layers(vision, "fullatt_block_indexes", (7, 15, 23, 31), num_layers),
        most_pixels=pixel_limit(shown, "max_pixels", "longest_edge", 28 * 28 * 1280),
    )


def _merge_size(vision: JsonFields, shown: JsonFields, patch: int) -> int:
    """Read how many patches a side become one token. Raises ConfigError if the processor has other
    sizes than the encoder."""
    merge = vision.integer("spatial_merge_size", 2)
    for name, value in (("patch_size", patch), ("merge_size", merge)):
        if shown.integer(name, value) != value:
            raise shown.fault(name, f"{value}, as in config.json", shown.values[name])
    return merge


def _layers(
    vision: JsonFields, name: str, default: tuple[int, ...], num_layers: int
) -> tuple[int, ...]:
    given = vision.values.get(name, [n for n in default if n < num_layers])
    layers = given if isinstance(given, list) else [-1]
    if layers != [n for n in range(num_layers) if n in layers]:
        raise vision.fault(name, f"a rising list of layers below {num_layers}", given)
    return tuple(layers)


_PARSERS: Mapping[str, Callable[[JsonFields, JsonFields, JsonFields], VisionSpec]] = {
    "Idefics3ForConditionalGeneration": _parse_tiles,
    "SmolVLMForConditionalGeneration": _parse_tiles,
    "Qwen2_5_VLForConditionalGeneration": _parse_windows,
    "Qwen3VLForConditionalGeneration": _parse_grid,
}


def _check_processor(shown: JsonFields, known: Sequence[str]) -> None:
    """Raise ConfigError unless the image processor is one of `known` and does all of its work."""
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
