# SPDX-License-Identifier: Apache-2.0
"""How far back the layers of a model see, as its configuration says.

A window of W positions is a token's own and the W - 1 before it. Sequences of at most W tokens are
computed the same with and without it, so a model with windows is served up to that length. Knows
nothing of attention.
"""

from __future__ import annotations

from .checkpoint.json_fields import JsonFields
from .families import Family, Windows

# What the families take where config.json is silent, which is not the same as null.
DEFAULT_WINDOW = 4096
DEFAULT_MAX_WINDOW_LAYERS = 28

_FULL, _SLIDING = "full_attention", "sliding_attention"


def parse_sliding_window(config: JsonFields, family: Family, num_layers: int) -> int | None:
    """The window in positions where any layer has one, else None; raises ConfigError naming the
    key."""
    window = _window(config, family)
    kinds = _layer_types(config, num_layers)
    if _SLIDING in kinds and window is None:
        raise config.fault("layer_types", f"{_FULL} for every layer, as it has no window", kinds)
    if window is None or family.windows is Windows.EVERY_LAYER:
        return window
    first = config.integer("max_window_layers", DEFAULT_MAX_WINDOW_LAYERS, minimum=0)
    slides = _SLIDING in kinds if kinds else first < num_layers
    return window if slides else None


def _window(config: JsonFields, family: Family) -> int | None:
    """The window that layers have if they have one."""
    if family.windows is Windows.NONE:
        for name in ("sliding_window", "use_sliding_window"):
            if config.has(name) and config.values[name] is not False:
                raise config.fault(name, "absent, for this family has none", config.values[name])
        return None
    if family.windows is Windows.SOME_LAYERS and not config.boolean("use_sliding_window", False):
        return None
    if "sliding_window" in config.values and not config.has("sliding_window"):
        return None
    return config.integer("sliding_window", DEFAULT_WINDOW, minimum=2)


def _layer_types(config: JsonFields, num_layers: int) -> list[object]:
    """One kind for each layer, or nothing where config.json does not say."""
    kinds = config.values.get("layer_types")
    if kinds is None:
        return []
    listed = kinds if isinstance(kinds, list) else []
    if len(listed) != num_layers or any(kind not in (_FULL, _SLIDING) for kind in listed):
        expected = f"a list of {_FULL} or {_SLIDING} for each of the {num_layers} layers"
        raise config.fault("layer_types", expected, kinds)
    return listed
