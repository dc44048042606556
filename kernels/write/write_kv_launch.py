# SPDX-License-Identifier: Apache-2.0
"""The launch of the KV write.

All devices and dtypes have one tile. A program moves TILE elements, 16 a thread: two wide loads of
16-bit values. The tile is so small that many programs run at once and hide each other's latency.
"""

from __future__ import annotations

from .write_kv_plain import E4M3_MAX, SMALLEST_SCALE

TILE = 2048  # elements
NUM_WARPS = 4


def width(head_dim: int) -> int:
    """The lanes of a row, a power of two; the lanes beyond `head_dim` are masked."""
    return max(16, 1 << (head_dim - 1).bit_length())


def rows_per_program(head_dim: int) -> int:
    return max(1, TILE // width(head_dim))


def constants(head_dim: int, block_size: int, num_heads: int, is_given: bool) -> dict[str, object]:
    """The kernel's constexpr arguments. With `is_given` scales are read, not computed."""
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
