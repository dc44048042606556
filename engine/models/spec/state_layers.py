# SPDX-License-Identifier: Apache-2.0
"""StateFamily: the layers of a model family that carry a state. `parse_states` makes a `StateSpec`
from config.json."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import inf

from ....tiers.settings.values import ConfigError
from ..checkpoint.json_fields import JsonFields
from ..states.state_spec import OutputNorm, StateKind, StateSpec
from .rope_spec import FULL

MAX_CONV_WIDTH = 64
TYPE_KEYS = ("layer_types", "layers_block_type")
DEFAULT_OWN_SIZE = 1024  # default of mamba_d_ssm
_EXPANDED = "mamba_expand * hidden_size"


class Projections(Enum):
    """The form in which a checkpoint stores the input matrices of a layer with a state."""

    ONE = "one"
    BY_GROUP = "by group"  # two matrices, with all rows of a key head together
    APART = "apart"


class MambaKeys(Enum):
    """The form of the names of Mamba-2's sizes in config.json: with or without the prefix
    `mamba_`."""

    PREFIXED = "mamba_"
    BARE = "bare"


@dataclass(frozen=True, slots=True)
class StateFamily:
    """The layers of a family that carry a state: constants of its code, and defaults for keys that
    config.json lacks."""

    kind: StateKind
    state_names: tuple[str, ...]  # names of layers with a state in layer_types
    attention_names: tuple[str, ...] = (FULL,)  # names of layers with attention in layer_types
    # The key that lists the layers with attention in a config.json without layer_types.
    attention_layers_key: str | None = None
    # Without layer_types and the list, each n-th layer has attention; n is config.json's
    # full_attention_interval or this default. None: `is_default` decides for all layers.
    default_interval: int | None = None
    # Whether all layers, rather than none, have a state if config.json has no key of layers.
    is_default: bool = False
    is_beside_attention: bool = False  # whether every layer has both a state and attention
    keys: MambaKeys = MambaKeys.PREFIXED
    has_own_size: bool = False  # whether mamba_d_ssm is read; else mamba_expand gives the size
    may_lack_norm: bool = False  # whether mamba_rms_norm and mamba_norm_before_gate are read
    default_state_size: int = 0  # default of Mamba-2's state size
    default_width: int = 4  # columns of the convolution's window
    projections: Projections = Projections.ONE


def parse_states(
    config: JsonFields,
    family: StateFamily,
    hidden_size: int,
    num_layers: int,
    listed: tuple[int, ...] | None = None,
) -> StateSpec | None:
    """Read the `StateSpec` of a model; None if no layer carries a state. `listed` has the layers
    with a state, if the caller has read them. Raises ConfigError with the key that has an unusable
    value."""
    layers = _state_layers(config, family, num_layers) if listed is None else listed
    if len(layers) == num_layers and not family.is_beside_attention:
        names = " or ".join(family.attention_names)
        raise ConfigError(f"{config.where}: layer_types must be {names} for at least one layer")
    if not layers:
        return None
    if family.kind is StateKind.GATED_DELTA:
        return _parse_gated_delta(config, family, layers)
    if family.keys is MambaKeys.BARE:
        return _parse_bare_mamba2(config, family, layers)
    if family.kind is StateKind.MAMBA2:
        return _parse_mamba2(config, family, hidden_size, layers)
    return _parse_short_conv(config, family, hidden_size, layers)


def _state_layers(config: JsonFields, family: StateFamily, num_layers: int) -> tuple[int, ...]:
    if family.is_beside_attention:
        return tuple(range(num_layers))
    key = next((key for key in TYPE_KEYS if config.has(key)), TYPE_KEYS[0])
    kinds = config.layer_kinds(key, (*family.state_names, *family.attention_names), num_layers)
    if not kinds:
        return _layers_by_number(config, family, num_layers)
    return tuple(layer for layer in range(num_layers) if kinds[layer] in family.state_names)


def _layers_by_number(config: JsonFields, family: StateFamily, num_layers: int) -> tuple[int, ...]:
    """Return the layers with a state for a config.json without a list of layer types."""
    key = family.attention_layers_key
    given = None if key is None else config.values.get(key)
    if key is None or given is None:
        if family.default_interval is None:
            return tuple(range(num_layers)) if family.is_default else ()
        interval = config.integer("full_attention_interval", family.default_interval)
        return tuple(layer for layer in range(num_layers) if (layer + 1) % interval)
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
        conv_width=_conv_width(config, "conv_L_cache", family),
        has_conv_bias=has_bias,
        has_bias=has_bias,
    )


def _parse_gated_delta(
    config: JsonFields, family: StateFamily, layers: tuple[int, ...]
) -> StateSpec:
    groups = config.integer("linear_num_key_heads", 16)
    heads = config.integer("linear_num_value_heads", 32)
    if heads % groups:
        raise config.fault(
            "linear_num_value_heads", f"a multiple of linear_num_key_heads ({groups})", heads
        )
    size = config.integer("linear_key_head_dim", 128)
    head_dim = config.integer("linear_value_head_dim", 128)
    return StateSpec(
        family.kind,
        layers,
        conv_channels=2 * groups * size + heads * head_dim,
        conv_width=_conv_width(config, "linear_conv_kernel_dim", family),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size,
    )


def _parse_mamba2(
    config: JsonFields, family: StateFamily, hidden_size: int, layers: tuple[int, ...]
) -> StateSpec:
    heads = config.integer("mamba_n_heads", 128)
    key = "mamba_d_ssm"
    if family.has_own_size and (config.has(key) or key not in config.values):
        inner, named = config.integer(key, DEFAULT_OWN_SIZE), key
    else:
        inner, named = config.integer("mamba_expand", 2) * hidden_size, _EXPANDED
    if inner % heads:
        raise config.fault("mamba_n_heads", f"a divisor of {named} ({inner})", heads)
    head_dim = inner // heads
    if config.values.get("mamba_d_head", "auto") not in ("auto", None, head_dim):
        expected = f"{head_dim}, which is {named} / mamba_n_heads, or 'auto'"
        raise config.fault("mamba_d_head", expected, config.values["mamba_d_head"])
    groups = config.integer("mamba_n_groups", 1)
    if heads % groups:
        raise config.fault("mamba_n_groups", f"a divisor of mamba_n_heads ({heads})", groups)
    size = config.integer("mamba_d_state", family.default_state_size)
    return StateSpec(
        family.kind,
        layers,
        conv_channels=inner + 2 * groups * size,
        conv_width=_conv_width(config, "mamba_d_conv", family),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size,
        has_conv_bias=config.boolean("mamba_conv_bias", True),
        has_bias=_has_biases(config, family),
        time_steps=_time_steps(config),
        output_norm=_output_norm(config, family),
    )


def _has_biases(config: JsonFields, family: StateFamily) -> bool:
    """Whether the input and output matrices of a layer have biases; either both have one, or
    neither."""
    has_bias = config.boolean("mamba_proj_bias", False)
    key = "projectors_bias"  # the key for the output matrix
    if family.is_beside_attention and config.boolean(key, False) != has_bias:
        raise config.fault(key, f"{has_bias}, as mamba_proj_bias is", config.values.get(key))
    return has_bias


def _output_norm(config: JsonFields, family: StateFamily) -> OutputNorm:
    if not family.may_lack_norm:
        return OutputNorm.BEHIND_GATE
    is_before = config.boolean("mamba_norm_before_gate", True)
    if not config.boolean("mamba_rms_norm", False):
        return OutputNorm.NONE
    return OutputNorm.BEFORE_GATE if is_before else OutputNorm.BEHIND_GATE


def _parse_bare_mamba2(
    config: JsonFields, family: StateFamily, layers: tuple[int, ...]
) -> StateSpec:
    """Read the sizes of Mamba-2 whose names in config.json have no prefix. Some sizes also have an
    older key; if config.json has the older key, the older key's value is used."""

    def spelt(older: str, name: str) -> str:
        return older if config.has(older) else name

    if config.text("mamba_hidden_act", "silu") not in ("silu", "swish"):
        raise config.fault("mamba_hidden_act", "'silu'", config.values["mamba_hidden_act"])
    heads = config.integer("mamba_num_heads", 128)
    head_dim = config.integer("mamba_head_dim", 64)
    key = spelt("mamba_n_groups", "n_groups")
    groups = config.integer(key, 8)
    if heads % groups:
        raise config.fault(key, f"a divisor of mamba_num_heads ({heads})", groups)
    size = config.integer("ssm_state_size", family.default_state_size)
    return StateSpec(
        family.kind,
        layers,
        conv_channels=heads * head_dim + 2 * groups * size,
        conv_width=_conv_width(config, spelt("mamba_d_conv", "conv_kernel"), family),
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_size=size,
        has_conv_bias=config.boolean(spelt("mamba_conv_bias", "use_conv_bias"), True),
        has_bias=config.boolean("use_bias", False),
        time_steps=_time_steps(config, spelt("mamba_dt_limit", "time_step_limit")),
    )


def _time_steps(config: JsonFields, key: str = "time_step_limit") -> tuple[float, float] | None:
    """Read the bounds of Mamba-2's time steps; None for bounds that limit nothing."""
    if not config.has(key):
        return None
    given = config.values[key]
    bounds = [_unpacked(each) for each in given] if isinstance(given, list) else []
    if len(bounds) != 2 or any(type(each) not in (int, float) for each in bounds):
        raise config.fault(key, "a list of two numbers", given)
    low, high = (float(each) for each in bounds)  # type: ignore[arg-type]
    if not 0 <= low < high:
        raise config.fault(key, "two numbers from 0, the first below the second", given)
    return None if (low, high) == (0.0, inf) else (low, high)


def _unpacked(value: object) -> object:
    """Return infinity for the JSON object that stands for infinity in newer files; return other
    values unchanged."""
    if isinstance(value, dict) and value == {"__float__": "Infinity"}:
        return inf
    return value


def _conv_width(config: JsonFields, key: str, family: StateFamily) -> int:
    return config.integer(key, family.default_width, minimum=2, maximum=MAX_CONV_WIDTH)
