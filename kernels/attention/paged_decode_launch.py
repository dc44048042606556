# SPDX-License-Identifier: Apache-2.0
"""The launch parameters of paged decode: tile size, warps, pipeline stages, and the number of
splits of a context.

The parameters are in a fixed table. Kernels are not tuned while the engine runs, because timing a
kernel would delay requests. `kernels/shipped.py` lists the kernel configurations of the table."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

MIN_SPLIT_TOKENS = 128  # shorter splits take longer to combine than they save
# The time of a program's start, first loads and partial result, in times of one tile; an estimate.
PROGRAM_TILES = 1
# DOT programs that fit on a multiprocessor: for 16-bit pools, and for float8 pools.
PROGRAMS_PER_MULTIPROCESSOR, FP8_PROGRAMS_PER_MULTIPROCESSOR = 4, 3
MAX_SPLITS = 256
DOT_ROWS = 16  # the fewest rows of tl.dot; groups of fewer query heads are padded
NEWEST = (9, 0)  # compute capability that is assumed in Triton's interpreter

DOT_MANY = "dot, many heads"

HEAD_SIZES = (64, 128, 256)


class Row(NamedTuple):
    tile: int  # tokens
    num_warps: int
    num_stages: int


# Ways to compute scores: VECTOR by sums of products, if no query heads share a kv head; DOT by
# matrix products. DOT_MANY is for float8 pools with more than DOT_ROWS query heads per kv head.
VECTOR, DOT, DOT_TOKEN_SCALES = "vector", "dot", "dot, a scale for each token"

# Lowest capability -> (path, bytes of a pool element, largest head size) -> row. In the compiler's
# figures the rows have no spills, and few enough registers that several programs share a
# multiprocessor. With DOT, loads of the block table take pipeline stages too: 3 stages buffer one
# tile of K and V, 5 stages two tiles.
TABLE: dict[tuple[int, int], dict[tuple[str, int, int], Row]] = {
    (8, 0): {
        (DOT, 2, 64): Row(64, 4, 3),
        (DOT, 2, 128): Row(64, 4, 3),
        (DOT, 2, 256): Row(32, 4, 3),
        (DOT, 4, 64): Row(64, 4, 3),
        (DOT, 4, 128): Row(32, 4, 3),
        (DOT, 4, 256): Row(16, 4, 3),
        (VECTOR, 2, 64): Row(64, 4, 2),
        (VECTOR, 2, 128): Row(32, 4, 3),
        (VECTOR, 2, 256): Row(16, 4, 3),
        (VECTOR, 4, 64): Row(64, 4, 3),
        (VECTOR, 4, 128): Row(32, 4, 3),
        (VECTOR, 4, 256): Row(16, 4, 3),
    },
    (8, 9): {
        # float8 conversion needs registers: with tiles of 64, only one program of 8 warps fits.
        (DOT, 1, 64): Row(32, 4, 5),
        (DOT, 1, 128): Row(32, 4, 5),
        (DOT, 1, 256): Row(32, 8, 5),
        # With 32 query heads per kv head, tiles of 32 in 4 warps spill on Triton 3.6.0.
        (DOT_MANY, 1, 64): Row(64, 8, 5),
        (DOT_MANY, 1, 128): Row(64, 8, 5),
        (DOT_MANY, 1, 256): Row(32, 8, 5),
        (DOT_TOKEN_SCALES, 1, 64): Row(32, 4, 5),
        (DOT_TOKEN_SCALES, 1, 128): Row(32, 4, 5),
        (DOT_TOKEN_SCALES, 1, 256): Row(16, 4, 5),
        (VECTOR, 1, 64): Row(64, 4, 3),
        (VECTOR, 1, 128): Row(32, 4, 3),
        (VECTOR, 1, 256): Row(16, 4, 3),
    },
}


@dataclass(frozen=True, slots=True)
class Launch:
    tile: int
    num_warps: int
    num_stages: int
    group_pad: int  # rows of the matrix product; 1 for VECTOR
    head_pad: int
    programs: int = PROGRAMS_PER_MULTIPROCESSOR  # that run side by side on a multiprocessor

    @property
    def min_tiles(self) -> int:
        """The smallest number of tiles in a split, if the caller sets no number of splits."""
        return max(1, MIN_SPLIT_TOKENS // self.tile)


def choose_launch(
    capability: tuple[int, int] | None,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    token_scales: bool = False,
) -> Launch:
    """Return the launch for `group` query heads per kv head and at most 256 elements per head."""
    size = next(size for size in HEAD_SIZES if head_dim <= size)
    is_fp8 = dtype.itemsize == 1
    path = VECTOR if group == 1 else DOT_TOKEN_SCALES if token_scales else DOT
    if path == DOT and is_fp8 and group > DOT_ROWS:
        path = DOT_MANY
    key = (path, dtype.itemsize, size)
    given = capability or NEWEST
    row = next(
        TABLE[lowest][key]
        for lowest in sorted(TABLE, reverse=True)
        if lowest <= given and key in TABLE[lowest]
    )
    group_pad = 1 if group == 1 else max(DOT_ROWS, _power_of_two(group))
    programs = FP8_PROGRAMS_PER_MULTIPROCESSOR if is_fp8 else PROGRAMS_PER_MULTIPROCESSOR
    return Launch(*row, group_pad, max(DOT_ROWS, _power_of_two(head_dim)), programs)


@functools.lru_cache(maxsize=1024)  # all layers of a step make the same call
def choose_splits(
    pairs: int,
    max_tokens: int,
    multiprocessors: int,
    tile: int,
    programs: int = PROGRAMS_PER_MULTIPROCESSOR,
) -> int:
    """Return the estimated fastest number of splits per context, for `pairs` pairs of request and
    kv head whose contexts have up to `max_tokens` tokens. A split has at least MIN_SPLIT_TOKENS
    tokens. A GPU runs programs in waves, and a last wave of a few programs takes as long as a full
    wave."""
    slots = programs * multiprocessors
    tiles = max(1, -(-max_tokens // tile))
    most = max(1, min(max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))
    best, least = 1, 0
    for splits in range(1, most + 1):
        share = -(-tiles // splits)
        waves = -(-pairs * -(-tiles // share) // slots)
        time = waves * (share + PROGRAM_TILES)
        if splits == 1 or time < least:
            best, least = splits, time
    return best


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
