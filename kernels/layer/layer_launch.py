# SPDX-License-Identifier: Apache-2.0
"""The launch constants of the kernels in `kernels/layer/`.

Every thread loads 16 bytes, eight 16-bit values, at a time. Because a decode step has few rows,
each program is small, and a row of the norm is divided among many warps."""

from __future__ import annotations

MAX_HIDDEN = 32768  # elements of a row, which a program of the norm holds in registers
NORM_WARP_ELEMENTS = 512  # elements of a row that a warp computes
MIN_NORM_WARPS, MAX_NORM_WARPS = 4, 32

GATE_BLOCK = 1024  # elements of a row that a program of the activation computes
GATE_WARPS = 4

ROTARY_TILE = 1024  # elements of heads that a program of `rotate_write` computes
ROTARY_WARPS = 2


def power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def norm_constants(size: int) -> dict[str, int]:
    return {"SIZE": size, "WIDTH": power_of_two(size)}


def norm_warps(size: int) -> int:
    warps = power_of_two(size) // NORM_WARP_ELEMENTS
    return min(MAX_NORM_WARPS, max(MIN_NORM_WARPS, warps))


def rotary_constants(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> dict[str, int]:
    """Return the constexpr arguments of the kernel `rotate_write`. A program computes at most as
    many heads as there are KV heads, because all its heads are of queries, of keys or of values."""
    width = max(16, power_of_two(head_dim // 2))
    rows = max(1, ROTARY_TILE // (2 * width))
    return {
        "HEADS": num_heads,
        "KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": block_size,
        "ROWS": min(rows, power_of_two(num_kv_heads)),
        "WIDTH": width,
    }


def rotary_programs(constants: dict[str, int]) -> int:
    """Return the number of programs that compute one token's queries, keys and values."""
    rows = constants["ROWS"]
    return -(-constants["HEADS"] // rows) + 2 * -(-constants["KV_HEADS"] // rows)
