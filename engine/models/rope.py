# SPDX-License-Identifier: Apache-2.0
"""Rotary positions: inverse frequencies of every kind, cosines and sines, and the rotation itself.

Frequencies and angles are computed in float32 in transformers' order of operations, because models
are trained with the rounding of this order. Only the finished tables of cosines and sines are
converted to the model's type."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ...tiers.settings.values import ConfigError
from .model_spec import ModelSpec
from .spec.rope_spec import RopeSpec


def rope_tables(
    rope: RopeSpec,
    head_dim: int,
    length: int,
    max_positions: int,
    dtype: torch.dtype,
    turning_dim: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of positions 0 … length-1, each `[length, head_dim // 2]` in
    `dtype`. With `turning_dim`, only `turning_dim` elements of a head rotate, in the order of
    `turning_order`.

    `length` must not exceed the model's `max_context`. Up to `max_context`, no kind of rotary
    positions depends on the length of a sequence, and the tables equal those of transformers."""
    frequencies, scale = inverse_frequencies(rope, turning_dim or head_dim, max_positions)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    # The last row has the largest angles.
    if not (cos[-1].isfinite().all() and sin[-1].isfinite().all()):
        raise ConfigError(
            f"the {rope.kind} rotary positions of config.json come to numbers that {dtype} cannot "
            "hold; correct rope_parameters or rope_scaling"
        )
    still = (length, (head_dim - (turning_dim or head_dim)) // 2)
    return (
        torch.cat((cos, torch.ones(still, dtype=dtype)), 1),
        torch.cat((sin, torch.zeros(still, dtype=dtype)), 1),
    )


def turns_of(
    spec: ModelSpec, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Return the tables of cosines and sines `[positions, 1, head_dim // 2]`, for each kind of
    rotary positions."""
    tables = []
    for rope in spec.ropes:
        # Tables are computed on the host, so that every device has the same numbers.
        cos, sin = rope_tables(
            rope, spec.head_dim, max_model_len, spec.max_positions, dtype, spec.turning_dim
        )
        tables.append((cos[:, None].to(device), sin[:, None].to(device)))
    return tables


def growth_of(
    spec: ModelSpec, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Return the factor `[positions, 1, 1]` of queries at each position; None without a factor."""
    if spec.query_growth is None:
        return None
    steps = torch.arange(max_model_len) // spec.rope.original_max_positions
    growth = 1 + spec.query_growth * torch.log(1 + steps)
    return growth.to(dtype)[:, None, None].to(device)


def turning_order(head_dim: int, turning_dim: int) -> Tensor:
    """Return int64 `[head_dim]`, which maps this project's order of a head's elements to the stored
    order. In the stored order, element i of the first half of the first `turning_dim` elements
    pairs with element i of the second half. In this project's order, element i of a head's first
    half pairs with element i of the head's second half; the last pairs do not rotate."""
    places = torch.arange(head_dim)
    middle, still = turning_dim // 2, turning_dim + (head_dim - turning_dim) // 2
    return torch.cat(
        (places[:middle], places[turning_dim:still], places[middle:turning_dim], places[still:])
    )


def inverse_frequencies(rope: RopeSpec, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Return inverse frequencies, float32 `[head_dim // 2]`, and a factor of cosines and sines."""
    return _KINDS[rope.kind](rope, head_dim, max_positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `[tokens, heads, head_dim]`; `cos` and `sin` are `[tokens, 1, head_dim // 2]`.

    As in Llama, element i of a head's first half is paired with element i of its second half."""
    first, second = x.chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return out


def _exponents(dim: int) -> Tensor:
    return torch.arange(0, dim, 2, dtype=torch.int64).float() / dim


def _default(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    return 1.0 / (rope.theta ** _exponents(dim)), 1.0


def _linear(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    return _default(rope, dim, max_positions)[0] / rope.factor, 1.0


def _dynamic(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    # Up to max_positions the stretched base equals theta except for rounding. The stretch is
    # computed all the same, to round as transformers does.
    stretch = rope.factor * max_positions / max_positions - (rope.factor - 1)
    base = rope.theta * stretch ** (dim / (dim - 2)) if dim > 2 else rope.theta
    return 1.0 / (base ** _exponents(dim)), 1.0


def _proportional(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    turning = int(rope.partial_rotary_factor * dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / dim
    still = torch.zeros(dim // 2 - turning)
    return torch.cat([1.0 / (rope.theta**exponents), still]) / rope.factor, 1.0


def _llama3(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Divide the frequencies of long waves by the factor, keep those of short waves, and blend the
    frequencies of waves in between."""
    frequencies = _default(rope, dim, max_positions)[0]
    length = rope.original_max_positions
    waves = 2 * math.pi / frequencies
    is_long = waves > length / rope.low_freq_factor
    is_short = waves < length / rope.high_freq_factor
    share = length / waves - rope.low_freq_factor
    share = share / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    stretched = torch.where(is_long, frequencies / rope.factor, blended)
    return torch.where(is_short, frequencies, stretched), 1.0


def _yarn(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Blend original frequencies with divided ones by a linear ramp over the dimensions."""

    def dimension(turns: float) -> float:
        """Return the dimension whose wave makes `turns` turns within the original context."""
        waves = math.log(rope.original_max_positions / (turns * 2 * math.pi))
        return dim * waves / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without a division by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    wavelengths = rope.theta ** _exponents(dim)
    frequencies = 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    return frequencies, _yarn_attention(rope)


def _yarn_attention(rope: RopeSpec) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Use the factors for short sequences, since `max_context` excludes long sequences."""
    scale = rope.attention_factor
    if scale is None:
        grown = math.log(rope.factor) / math.log(rope.original_max_positions)
        scale = math.sqrt(1 + grown) if rope.factor > 1 else 1.0
    factors = torch.tensor(rope.short_factor, dtype=torch.float32)
    return 1.0 / (factors * rope.theta ** _exponents(dim)), scale


def _still(rope: RopeSpec, dim: int, max_positions: int) -> tuple[Tensor, float]:
    return torch.zeros(dim // 2), 1.0


_Kind = Callable[[RopeSpec, int, int], tuple[Tensor, float]]
_KINDS: dict[str, _Kind] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
    "still": _still,
}
