# SPDX-License-Identifier: Apache-2.0
"""The launch parameters of paged prefill: a table of tile sizes, warps and pipeline stages.

Kernels are not tuned while the engine runs: all processes use the same launch for a call."""

from __future__ import annotations

from dataclasses import dataclass

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256  # tl.dot needs 16; the table has no launch above 256
SHORT_ROWS = 64  # the most rows for which the table's second column is used
MAX_GROUP = 64  # query heads per KV head; one token's heads must fit into a tile of 64 rows


@dataclass(frozen=True, slots=True)
class Launch:
    """The tile of one program, and the compiler's options for it."""

    block_rows: int  # tokens times the query heads that share a KV head
    block_keys: int
    num_warps: int
    num_stages: int


# Padded head size -> launches for long and for short chunks. Loads of the block table take pipeline
# stages too: with 3 stages the kernel waits for each tile of K and V; with 5 stages the next tile
# is loaded during a tile's computation. Compiled ahead of time, no launch spills with a group of 7
# query heads, a window, a soft cap and scales of tokens together. WIDE_FP8 is for float8 pools on
# capability 9 and 10, where four warps multiply at once and shared memory has 227 KB.
WIDE_FP8 = {
    64: (Launch(128, 64, 8, 5), Launch(64, 64, 4, 5)),
    128: (Launch(128, 64, 8, 5), Launch(64, 64, 4, 5)),
    256: (Launch(64, 32, 8, 5), Launch(64, 32, 8, 5)),
}
# WIDE is for 16-bit pools, which need no conversion. A tile of 128 keys, instead of 64, updates the
# running maximum half as often. One program fills a multiprocessor's registers with either tile.
WIDE = WIDE_FP8 | {128: (Launch(128, 128, 8, 3), Launch(64, 64, 4, 5))}
NARROW = {  # other GPUs: 64 keys spill with a group of 7; some have 99 KB of shared memory
    64: (Launch(128, 64, 8, 5), Launch(64, 32, 4, 5)),
    128: (Launch(128, 32, 8, 5), Launch(64, 32, 4, 5)),
    256: (Launch(64, 32, 8, 3), Launch(64, 32, 8, 3)),
}


def padded_head_dim(head_dim: int) -> int:
    return 1 << (head_dim - 1).bit_length()


def choose_launch(
    capability: tuple[int, int] | None,
    head_dim: int,
    group: int,
    max_query_len: int,
    *,
    is_fp8: bool,
) -> Launch:
    """Return the launch; for no `capability` (Triton's interpreter), that of large GPUs."""
    is_wide = capability is None or capability[0] in (9, 10)
    table = (WIDE_FP8 if is_fp8 else WIDE) if is_wide else NARROW
    long, short = table[max(padded_head_dim(head_dim), min(table))]
    return short if max_query_len * group <= SHORT_ROWS else long


def converts_q_first(head_dim: int) -> bool:
    """Whether q is converted to float16 before the launch, if the pool is float8. A q that the
    kernel converts stays in registers, not in shared memory, and 256 elements per head need too
    many registers."""
    return padded_head_dim(head_dim) > 128


def constants(
    launch: Launch,
    *,
    head_dim: int,
    group: int,
    block_size: int,
    has_window: bool,
    has_softcap: bool,
    is_fp8: bool,
    scales_dim: int,
) -> dict[str, object]:
    """Return the kernel's compile-time arguments. `scales_dim` is 2 for a scale per head, 4 for one
    per token and head, and 0 for none."""
    return {
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "HEAD_SCALES": scales_dim == 2,
        "TOKEN_SCALES": scales_dim == 4,
        "FP8": is_fp8,
        "GROUP": group,
        "BLOCK_SIZE": block_size,
        "HEAD_DIM": head_dim,
        "PADDED_DIM": padded_head_dim(head_dim),
        "BLOCK_M": launch.block_rows,
        "BLOCK_N": launch.block_keys,
    }
