# SPDX-License-Identifier: Apache-2.0
"""LayerWindows: the layers with a sliding window, and the window's width, read from config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..checkpoint.json_fields import JsonFields
from ..families import Family, Windows
from .rope_spec import FULL, LAYER_KINDS, SLIDING

# Defaults of the families for absent keys; a null value does not take these defaults.
DEFAULT_MAX_WINDOW_LAYERS = 28
DEFAULT_WINDOW_PATTERN = 6


class LayerWindows(NamedTuple):
    """The width of the sliding window in positions, the token's own included, and the layers with
    the window."""

    window: int
    layers: tuple[int, ...]


def parse_windows(config: JsonFields, family: Family, num_layers: int) -> LayerWindows | None:
    """Read the width of the window and the layers that have it; None if no layer has a window.
    Raises ConfigError with the key that has an unusable value."""
    size = _window(config, family)
    # In families with states, layer_types says which layers have a state, not a window.
    kinds: list[str] = []
    if family.states is None:
        kinds = config.layer_kinds("layer_types", LAYER_KINDS, num_layers)
    if SLIDING in kinds and size is None:
        raise config.fault("layer_types", f"{FULL} for every layer, as it has no window", SLIDING)
    if size is None:
        if family.windows in (Windows.MOST_LAYERS, Windows.OTHER_LAYERS) and not kinds:
            raise config.fault("sliding_window", "a whole number, or layer_types be given", None)
        return None
    layers = tuple(range(num_layers))
    if family.windows not in (Windows.EVERY_LAYER, Windows.SWITCHED):
        slides = _slides_by_type(kinds) if kinds else _slides_by_number(config, family)
        layers = tuple(layer for layer in layers if slides(layer))
    return LayerWindows(size, layers) if layers else None


def _slides_by_type(kinds: list[str]) -> Callable[[int], bool]:
    return lambda layer: kinds[layer] == SLIDING


def _slides_by_number(config: JsonFields, family: Family) -> Callable[[int], bool]:
    if family.windows is Windows.MOST_LAYERS:
        pattern = config.integer("sliding_window_pattern", DEFAULT_WINDOW_PATTERN)
        return lambda layer: (layer + 1) % pattern > 0
    if family.windows is Windows.OTHER_LAYERS:
        return lambda layer: layer % 2 == 0
    if family.windows is Windows.BY_TYPE:
        raise config.fault("layer_types", "given, as use_sliding_window is true", None)
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
    return lambda layer: layer >= first


def _window(config: JsonFields, family: Family) -> int | None:
    """Read the width of the window in positions; None if no layer has a window."""
    if family.windows is Windows.NONE:
        for name in ("sliding_window", "use_sliding_window"):
            if config.has(name) and config.values[name] is not False:
                raise config.fault(name, "absent, for this family has none", config.values[name])
        return None
    is_switched = family.windows in (Windows.SOME_LAYERS, Windows.SWITCHED, Windows.BY_TYPE)
    if is_switched and not config.boolean("use_sliding_window", False):
        return None
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None
    if family.default_window is None and not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", family.default_window, minimum=2)
