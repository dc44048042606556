# SPDX-License-Identifier: Apache-2.0
"""The launch parameters of the kernel that writes K and V.

All GPUs and dtypes have the same tile. A program copies TILE elements, 16 per thread: two wide
loads of 16-bit values. The tile is small, so that many programs run at the same time and hide the
latency of their loads."""

from __future__ import annotations

from .write_kv_plain import E4M3_MAX, SMALLEST_SCALE

TILE = 2048  # elements
NUM_WARPS = 4


def width(head_dim: int) -> int:
    """Return the number of lanes of a row, a power of two; lanes beyond `head_dim` are masked."""
    return max(16, 1 << (head_dim - 1).bit_length())


def rows_per_program(head_dim: int) -> int:
    return max(1, TILE // width(head_dim))


def constants(head_dim: int, block_size: int, num_heads: int, is_given: bool) -> dict[str, object]:
    """Return the kernel's constexpr arguments. If `is_given`, scales are read, else computed."""
    return {
        "HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "SCALES_GIVEN": is_given,
        "LARGEST": E4M3_MAX,
        "SMALLEST": SMALLEST_SCALE,
        "ROWS": rows_per_program(head_dim),
        "WIDTH": width(head_dim),
    }
