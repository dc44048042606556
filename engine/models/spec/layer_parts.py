# SPDX-License-Identifier: Apache-2.0
"""LayerParts: the kind of each layer, for families whose layers are either a mixer or an MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..checkpoint.json_fields import JsonFields
from .state_layers import TYPE_KEYS

# The key, in older files, of a text with one letter for the kind of each layer.
PATTERN = "hybrid_override_pattern"
_LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
_STATES = ("mamba", "linear_attention")
_ATTENTION = ("attention", "full_attention")
_MLP, _EXPERTS = "mlp", "moe"
_KNOWN = (*_STATES, *_ATTENTION, _MLP, _EXPERTS)


class LayerParts(NamedTuple):
    """The numbers of the layers of each kind, ascending."""

    states: tuple[int, ...]
    attention: tuple[int, ...]
    mlps: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return sum(map(len, self))


def parse_layer_parts(config: JsonFields) -> LayerParts:
    """Read the kind of each layer from a list or from a pattern of letters. Raises ConfigError with
    the key that has an unusable value."""
    key = next((key for key in (*TYPE_KEYS, PATTERN) if config.has(key)), TYPE_KEYS[1])
    given = config.values.get(key)
    kinds = _kinds(config, key)
    if _EXPERTS in kinds:
        letter = " (E)" if key == PATTERN else ""
        raise config.fault(
            key, f"without {_EXPERTS}{letter}: experts of this family are not supported", given
        )

    def layers_of(*names: str) -> tuple[int, ...]:
        return tuple(layer for layer, kind in enumerate(kinds) if kind in names)

    parts = LayerParts(layers_of(*_STATES), layers_of(*_ATTENTION), layers_of(_MLP))
    if not parts.states or not parts.attention:
        expected = "one with a state and one with attention at least among the layers"
        raise config.fault(key, expected, given)
    count = "num_hidden_layers"
    if config.has(count) and config.values[count] != parts.num_layers:
        expected = f"{parts.num_layers}, as {key} lists so many"
        raise config.fault(count, expected, config.values[count])
    return parts


def _kinds(config: JsonFields, key: str) -> Sequence[object]:
    given = config.values.get(key)
    if key == PATTERN:
        pattern = config.text(PATTERN)
        if not set(pattern) <= set(_LETTERS):
            raise config.fault(key, f"a text of {' '.join(_LETTERS)}, one for each layer", given)
        return [_LETTERS[letter] for letter in pattern]
    if not isinstance(given, list) or any(kind not in _KNOWN for kind in given):
        expected = f"a list with one of {', '.join(_KNOWN)} for each layer"
        raise config.fault(key, expected, given)
    return given
