# SPDX-License-Identifier: Apache-2.0
"""StateSpec: the sizes of the state that some layers of a model carry from token to token.

A layer with a state has no K and V, except in some families. A state has up to two parts: the last
columns that the layer's convolution reads, in the type of the computation, and a recurrent part, in
float32 (or float64 if the computation is in float64). This module does not import torch, so memory
plans and error messages need no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NamedTuple

from ....tiers.block import DTYPE_BYTES

# Each part of a state begins at a multiple of this number of bytes.
ALIGNMENT = 64


class StateKind(StrEnum):
    """The rule by which each token changes a state."""

    SHORT_CONV = "short convolution"
    GATED_DELTA = "gated delta rule"
    MAMBA2 = "Mamba-2"


class OutputNorm(StrEnum):
    """The position of a Mamba-2 layer's output norm: before or after the gate, or no norm."""

    BEHIND_GATE = "behind the gate"
    BEFORE_GATE = "before the gate"
    NONE = "none"


class StatePart(NamedTuple):
    """A part of one layer's state within a slot."""

    layer: int
    is_recurrent: bool  # False: the convolution's part
    offset: int  # bytes from the beginning of the slot
    num_bytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The layers that carry a state, and the sizes of the state, which are the same for all layers.
    The convolution treats each channel separately. A gated delta rule has `num_heads` heads of
    values with `head_dim` elements, and `num_groups` heads of queries and keys with `state_size`
    elements. Mamba-2 has `num_heads` heads with `head_dim` elements; its B and C have `state_size`
    elements and are the same for all heads of a group."""

    kind: StateKind
    layers: tuple[int, ...]  # the numbers of the layers, ascending
    conv_channels: int
    conv_width: int  # columns of the convolution's window; the state has one less
    num_heads: int = 0
    head_dim: int = 0
    num_groups: int = 0
    state_size: int = 0
    has_conv_bias: bool = False
    has_bias: bool = False  # whether the input and output matrices have biases
    time_steps: tuple[float, float] | None = None  # lower and upper bound of Mamba-2's time steps
    output_norm: OutputNorm = OutputNorm.BEHIND_GATE  # position of Mamba-2's norm

    @property
    def inner_size(self) -> int:
        """Number of elements per token in the input of the layer's output matrix."""
        return self.num_heads * self.head_dim or self.conv_channels

    @property
    def in_size(self) -> int:
        """Number of elements per token in the output of the layer's input matrix."""
        if self.kind is StateKind.SHORT_CONV:
            return 3 * self.conv_channels
        scalars = 2 if self.kind is StateKind.GATED_DELTA else 1
        return self.conv_channels + self.inner_size + scalars * self.num_heads

    @property
    def conv_shape(self) -> tuple[int, int]:
        return (self.conv_channels, self.conv_width - 1)

    @property
    def recurrent_shape(self) -> tuple[int, int, int] | None:
        """Shape of one layer's recurrent part; None if the layer has no such part."""
        if self.kind is StateKind.SHORT_CONV:
            return None
        if self.kind is StateKind.GATED_DELTA:
            return (self.num_heads, self.state_size, self.head_dim)
        return (self.num_heads, self.head_dim, self.state_size)

    def parts(self, dtype: str) -> tuple[StatePart, ...]:
        """Return the parts of a slot by ascending offset, for a computation in `dtype`."""
        wide = "float64" if dtype == "float64" else "float32"
        shapes: list[tuple[bool, tuple[int, ...], str]] = [(False, self.conv_shape, dtype)]
        if self.recurrent_shape is not None:
            shapes.append((True, self.recurrent_shape, wide))
        parts: list[StatePart] = []
        offset = 0
        for layer in self.layers:
            for is_recurrent, shape, kind in shapes:
                size = prod(shape) * DTYPE_BYTES[kind]
                parts.append(StatePart(layer, is_recurrent, offset, size, shape, kind))
                offset += _aligned(size)
        return tuple(parts)

    def slot_bytes(self, dtype: str) -> int:
        """Return the size in bytes of all layers' states, for a computation in `dtype`."""
        last = self.parts(dtype)[-1]
        return last.offset + _aligned(last.num_bytes)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
