# SPDX-License-Identifier: Apache-2.0
"""RopeSpec: the rotary positions in a model's config.json, in Hugging Face's older and newer form.

The newer form has `rope_parameters` with `rope_theta` inside. The older form has `rope_scaling`,
and `rope_theta` at the top level. `rope.py` computes the tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ..checkpoint.json_fields import MAX_COUNT, JsonFields

ROPE_KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_OLD_KINDS = {"su": "longrope"}
_BY_SECTIONS = "mrope"  # a kind of old files: default, with sections
DEFAULT_THETA = 10000.0
# Known factors are 2 to 128. With far larger ones, rounding would destroy the positions.
MAX_FACTOR = 1e6
# Hugging Face's names for layers that see all tokens, and for layers with a window.
FULL, SLIDING = LAYER_KINDS = ("full_attention", "sliding_attention")
# Keys of partial rotation, of queries that grow with their position, and of image positions.
PARTIAL, GROWTH = "partial_rotary_factor", "llama_4_scaling_beta"
SECTIONS = "mrope_section"
_UNSUPPORTED = (*LAYER_KINDS, SECTIONS, GROWTH)


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The kind of a layer's rotary positions, and its parameters. Fields that the kind does not use
    keep their defaults."""

    kind: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_positions: int = 0  # yarn, longrope, llama3: positions before the stretching
    attention_factor: float | None = None  # yarn, longrope: given, or derived from the factor
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    partial_rotary_factor: float = 1.0  # proportional only


@dataclass(frozen=True, slots=True)
class Sections:
    """The parts of half a head that turn by time, height and width."""

    default: tuple[int, int, int]  # elements of each, if the model's file names none
    # Whether the parts follow each other; else height and width take every third element.
    are_joined: bool = False


# For layers without rotary positions.
STILL = RopeSpec("still")


def parse_rope(
    config: JsonFields,
    head_dim: int,
    max_positions: int,
    default_theta: float = DEFAULT_THETA,
    heeded: Collection[str] = (),
    default_turning: float = 1.0,
) -> RopeSpec:
    """Read the rotary positions from a config.json. `heeded` has keys that the file may have:
    `turning_size` and `parse_query_growth` read them, or they do not matter for text. Raises
    ConfigError with the key that has an unusable value.

    If config.json has both forms, a non-empty `rope_scaling` is used, as in transformers."""
    fields = _rope_fields(config)
    theta = config.number("rope_theta", default_theta)
    if PARTIAL in heeded:
        head_dim = turning_size(config, head_dim, default_turning)
    return _parse_fields(config, fields, theta, head_dim, max_positions, heeded)


def turning_size(config: JsonFields, head_dim: int, default: float = 1.0) -> int:
    """Read how many elements of a head rotate; these are the first elements of the head."""
    fields = _rope_fields(config)
    source = fields if fields.has(PARTIAL) else config
    share = source.number(PARTIAL, default, at_most=1.0)
    size = int(head_dim * share)
    if size < 2 or size % 2 or head_dim % 2:
        raise source.fault(PARTIAL, f"a share that is an even part of {head_dim}", share)
    return size


def parse_axes(config: JsonFields, sections: Sections, head_dim: int) -> tuple[int, ...]:
    """Read the axis by which each element of half a head turns, for `ModelSpec.rope_axes`. The
    sections follow each other, or height and width take every third element up to their section and
    time takes the rest. Raises ConfigError for unusable sections."""
    fields, half = _rope_fields(config), head_dim // 2
    given = fields.values.get(SECTIONS, list(sections.default))
    sizes = [each for each in given if isinstance(each, int)] if isinstance(given, list) else []
    if len(sizes) != 3 or sizes != given or not 0 <= min(sizes) <= max(sizes) <= half:
        raise fields.fault(SECTIONS, f"three whole numbers from 0 to {half}", given)
    if sections.are_joined:
        if sum(sizes) != half:
            raise fields.fault(SECTIONS, f"three whole numbers with the sum {half}", given)
        return tuple(axis for axis in range(3) for _ in range(sizes[axis]))
    axes = [0] * half
    for axis in (1, 2):
        for element in range(axis, min(sizes[axis] * 3, half), 3):
            axes[element] = axis
    return tuple(axes)


def parse_query_growth(config: JsonFields, rope: RopeSpec) -> float | None:
    """Read the factor by which queries grow with their position, for `ModelSpec.query_growth`; None
    if config.json has none."""
    fields = _rope_fields(config)
    if not fields.has(GROWTH):
        return None
    growth = fields.number_from(GROWTH, 0.0, MAX_FACTOR)
    if growth and not rope.original_max_positions:
        raise fields.fault(GROWTH, f"0 (or absent) beside {rope.kind} positions", growth)
    return growth or None


def _rope_fields(config: JsonFields) -> JsonFields:
    old = config.inner("rope_scaling")
    return old if old.values else config.inner("rope_parameters")


def parse_two_ropes(
    config: JsonFields, head_dim: int, max_positions: int, thetas: tuple[float, float]
) -> tuple[RopeSpec, RopeSpec]:
    """Read the rotary positions of layers with full attention, and of layers with a window.
    `thetas` has the default `rope_theta` of both kinds of layers, in this order. Raises ConfigError
    with the key that has an unusable value.

    In the newer form, `rope_parameters` has an object for each of the two kinds of layers. In the
    older form, `rope_theta` and `rope_scaling` are for layers with full attention, and
    `rope_local_base_freq` is the theta of layers with a window. If config.json has a `rope_scaling`
    and the newer form, the fields of `rope_scaling` override those of full attention."""
    new = config.inner("rope_parameters")
    for name in new.values:
        if name not in LAYER_KINDS:
            expected = (
                f"absent, for this family has an object for each of {' and '.join(LAYER_KINDS)}"
            )
            raise new.fault(name, expected, new.values[name])
    full, local = (new.inner(kind) for kind in LAYER_KINDS)
    old = config.inner("rope_scaling")
    if old.values:
        full = JsonFields({**full.values, **old.values}, old.where)
    theta = config.number("rope_theta", thetas[0], above=1.0)
    local_theta = config.number("rope_local_base_freq", thetas[1], above=1.0)
    return (
        _parse_fields(config, full, theta, head_dim, max_positions),
        _parse_fields(config, local, local_theta, head_dim, max_positions),
    )


def _parse_fields(
    config: JsonFields,
    fields: JsonFields,
    theta: float,
    head_dim: int,
    max_positions: int,
    heeded: Collection[str] = (),
) -> RopeSpec:
    """Read one kind of rotary positions from `fields`. `config` is the whole config.json, and
    `theta` is the default of `rope_theta`."""
    kind = fields.text("rope_type", fields.text("type", "default"))
    kind = _OLD_KINDS.get(kind, kind)
    if kind == _BY_SECTIONS and SECTIONS in heeded:
        kind = "default"
    if kind not in ROPE_KINDS:
        raise fields.fault("rope_type", "one of " + ", ".join(ROPE_KINDS), kind)
    for name in _UNSUPPORTED:
        if fields.has(name) and name not in heeded:
            raise fields.fault(name, "absent (it is not supported)", fields.values[name])
    theta = fields.number("rope_theta", theta, above=1.0)
    if PARTIAL not in heeded:
        _refuse_partial(config, fields, kind)

    if kind == "default":
        return RopeSpec(theta=theta)
    if kind in ("linear", "dynamic"):
        return RopeSpec(kind, theta, fields.number("factor", at_most=MAX_FACTOR))
    if kind == "proportional":
        share = fields.number(PARTIAL, 1.0)
        if share > 1.0:
            raise fields.fault(PARTIAL, "at most 1", share)
        factor = fields.number("factor", 1.0, at_most=MAX_FACTOR)
        return RopeSpec(kind, theta, factor, partial_rotary_factor=share)

    original = _original_length(config, fields, max_positions)
    if kind == "llama3":
        return _llama3(fields, theta, original)
    factor = fields.number("factor", max_positions / original, at_most=MAX_FACTOR)
    if kind == "yarn":
        return _yarn(fields, theta, original, factor)
    return RopeSpec(
        kind,
        theta,
        factor,
        original,
        attention_factor=fields.optional_number("attention_factor"),
        short_factor=fields.numbers("short_factor", head_dim // 2),
        long_factor=fields.numbers("long_factor", head_dim // 2),
    )


def _llama3(fields: JsonFields, theta: float, original: int) -> RopeSpec:
    low = fields.number("low_freq_factor")
    high = fields.number("high_freq_factor")
    if high <= low:
        raise fields.fault("high_freq_factor", f"above low_freq_factor ({low:g})", high)
    return RopeSpec(
        "llama3",
        theta,
        fields.number("factor", at_most=MAX_FACTOR),
        original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(fields: JsonFields, theta: float, original: int, factor: float) -> RopeSpec:
    return RopeSpec(
        "yarn",
        theta,
        factor,
        original,
        attention_factor=fields.optional_number("attention_factor"),
        # Zero means the default too; transformers reads both as "not given".
        beta_fast=_number_or_zero(fields, "beta_fast") or 32.0,
        beta_slow=_number_or_zero(fields, "beta_slow") or 1.0,
        mscale=_number_or_zero(fields, "mscale"),
        mscale_all_dim=_number_or_zero(fields, "mscale_all_dim"),
        truncate=fields.boolean("truncate", True),
    )


def _number_or_zero(fields: JsonFields, name: str) -> float | None:
    return fields.number_from(name, 0.0, MAX_FACTOR) if fields.has(name) else None


def _original_length(config: JsonFields, fields: JsonFields, max_positions: int) -> int:
    # The key may stand at the top level, and wins there.
    name = "original_max_position_embeddings"
    source = config if config.has(name) else fields
    return source.integer(name, max_positions, minimum=2)


def _refuse_partial(config: JsonFields, fields: JsonFields, kind: str) -> None:
    for source in (config, fields):
        share = source.number(PARTIAL, 1.0)
        if share != 1.0 and not (kind == "proportional" and source is fields):
            raise source.fault(PARTIAL, "1 (or absent) for this kind", share)


def stable_length(rope: RopeSpec, max_positions: int) -> int:
    """Return the length, in tokens, up to which a token's rotation does not depend on later tokens.

    In a longer sequence, `dynamic` and `longrope` rotate a token by the length that the sequence
    has in this step. K would then depend on how the prompt is divided into chunks, and could not be
    shared. `yarn` stretches the original length by its factor, and the result counts even if
    `max_position_embeddings` is lower."""
    if rope.kind == STILL.kind:
        return MAX_COUNT
    if rope.kind == "longrope":
        return min(max_positions, rope.original_max_positions)
    if rope.kind == "yarn":
        return max(max_positions, yarn_length(rope))
    return max_positions


def yarn_length(rope: RopeSpec) -> int:
    return min(int(rope.factor * rope.original_max_positions), MAX_COUNT)
