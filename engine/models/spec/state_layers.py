# SPDX-License-Identifier: Apache-2.0
"""StateFamily: which layers of a family carry a state, and the parser that makes a StateSpec."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..checkpoint.json_fields import JsonFields
from ..states.state_spec import StateKind, StateSpec
from .rope_spec import FULL

MAX_CONV_WIDTH = 64


class Projections(Enum):
    """The form in which the matrices into a layer with a state are stored."""

    ONE = "one"


@dataclass(frozen=True, slots=True)
class StateFamily:
    """The layers with a state of a family: facts of its code, and defaults where config.json is
    silent."""

    kind: StateKind
    state_names: tuple[str, ...]  # what layer_types calls a layer with a state
    attention_names: tuple[str, ...] = (FULL,)  # and one with attention
    # Where config.json lists the layers with attention if it has no layer_types.
    attention_layers_key: str | None = None
    default_width: int = 4  # columns of the convolution's window
    projections: Projections = Projections.ONE


def parse_states(
    config: JsonFields, family: StateFamily, hidden_size: int, num_layers: int
) -> StateSpec | None:
    """The state of a model, or None where no layer carries one; raises ConfigError naming the
    key."""
    layers = _state_layers(config, family, num_layers)
    if len(layers) == num_layers:
        expected = f"{' or '.join(family.attention_names)} for at least one of the layers"
        raise config.fault("layer_types", expected, config.values.get("layer_types"))
    if not layers:
        return None
    return _parse_short_conv(config, family, hidden_size, layers)


def _state_layers(config: JsonFields, family: StateFamily, num_layers: int) -> tuple[int, ...]:
    kinds = config.values.get("layer_types")
    if kinds is None:
        return _layers_by_number(config, family, num_layers)
    names = (*family.state_names, *family.attention_names)
    listed = kinds if isinstance(kinds, list) else []
    if len(listed) != num_layers or any(kind not in names for kind in listed):
        expected = f"a list of {' or '.join(names)} for each of the {num_layers} layers"
        raise config.fault("layer_types", expected, kinds)
    return tuple(layer for layer in range(num_layers) if listed[layer] in family.state_names)


def _layers_by_number(config: JsonFields, family: StateFamily, num_layers: int) -> tuple[int, ...]:
    """The layers with a state, by a config.json without layer_types."""
    key = family.attention_layers_key
    given = None if key is None else config.values.get(key)
    if key is None or given is None:
        return ()
    listed = given if isinstance(given, list) else [given]
    if any(type(layer) is not int or not 0 <= layer < num_layers for layer in listed):
        raise config.fault(key, f"a list of layers below {num_layers}", given)
    return tuple(layer for layer in range(num_layers) if layer not in listed)


def _parse_short_conv(
    config: JsonFields, family: StateFamily, hidden_size: int, layers: tuple[int, ...]
) -> StateSpec:
    for key in ("conv_dim", "conv_dim_out"):
        if config.has(key) and config.values[key] != hidden_size:
            raise config.fault(key, f"hidden_size ({hidden_size})", config.values[key])
    has_bias = config.boolean("conv_bias", False)
    return StateSpec(
        family.kind,
        layers,
        conv_channels=hidden_size,
        conv_width=config.integer(
            "conv_L_cache", family.default_width, minimum=2, maximum=MAX_CONV_WIDTH
        ),
        has_conv_bias=has_bias,
        has_bias=has_bias,
    )
