# SPDX-License-Identifier: Apache-2.0
"""How paged decode is launched: tile, warps, stages, and into how many splits a context is cut.

The table is checked in and nothing is tuned while running, for a kernel that measured itself first
would stall the requests that meet it. `shipped_configurations` lists what the table leads to, for
the compiler. Knows nothing of what tensors hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..configuration import Configuration

MIN_SPLIT_TOKENS = 256  # a shorter split costs more to combine than it saves
PROGRAMS_PER_MULTIPROCESSOR = 4  # as many 16-bit DOT programs fit side by side
MAX_SPLITS = 256
DOT_ROWS = 16  # the fewest rows of a matrix product; groups are padded to it
NEWEST = (9, 0)  # what is taken where there is no device: in the interpreter


class Row(NamedTuple):
    tile: int  # tokens
    num_warps: int
    num_stages: int


# How scores are computed: sums of products where no heads share a kv head, else matrix products.
VECTOR, DOT, DOT_TOKEN_SCALES = "vector", "dot", "dot, a scale for each token"

# Lowest capability -> (path, bytes of a pool element, largest head size) -> row.
# Chosen by what the compiler says: no spill, and few enough registers that several programs share
# a multiprocessor. For DOT the block table is a pipeline stage of its own: 3 stages buffer K and V
# once, 5 twice.
TABLE: dict[tuple[int, int], dict[tuple[str, int, int], Row]] = {
    (8, 0): {
        (DOT, 2, 64): Row(64, 4, 3),
        (DOT, 2, 128): Row(64, 4, 3),
        (DOT, 2, 256): Row(32, 4, 3),
        (DOT, 4, 64): Row(64, 4, 3),
        (DOT, 4, 128): Row(32, 4, 3),
        (DOT, 4, 256): Row(16, 4, 3),
        (VECTOR, 2, 64): Row(64, 4, 3),
        (VECTOR, 2, 128): Row(32, 4, 3),
        (VECTOR, 2, 256): Row(16, 4, 3),
        (VECTOR, 4, 64): Row(64, 4, 3),
        (VECTOR, 4, 128): Row(32, 4, 3),
        (VECTOR, 4, 256): Row(16, 4, 3),
    },
    (8, 9): {
        # Conversion takes registers: 4 warps would need 195 for the same tile of 128.
        (DOT, 1, 64): Row(64, 8, 5),
        (DOT, 1, 128): Row(64, 8, 5),
        (DOT, 1, 256): Row(32, 8, 5),
        (DOT_TOKEN_SCALES, 1, 64): Row(32, 4, 5),
        (DOT_TOKEN_SCALES, 1, 128): Row(32, 4, 5),
        (DOT_TOKEN_SCALES, 1, 256): Row(16, 4, 5),
        (VECTOR, 1, 64): Row(64, 4, 3),
        (VECTOR, 1, 128): Row(32, 4, 3),
        (VECTOR, 1, 256): Row(16, 4, 3),
    },
}
HEAD_SIZES = (64, 128, 256)


@dataclass(frozen=True, slots=True)
class Launch:
    tile: int
    num_warps: int
    num_stages: int
    group_pad: int  # rows of the matrix product; 1: products and sums instead
    head_pad: int

    @property
    def min_tiles(self) -> int:
        """The fewest tiles of a split, where the number of splits is ours to choose."""
        return max(1, MIN_SPLIT_TOKENS // self.tile)


def choose_launch(
    capability: tuple[int, int] | None,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    token_scales: bool = False,
) -> Launch:
    """The row for `group` heads that share a kv head, of `head_dim` elements up to 256."""
    size = next(size for size in HEAD_SIZES if head_dim <= size)
    path = VECTOR if group == 1 else DOT_TOKEN_SCALES if token_scales else DOT
    key = (path, dtype.itemsize, size)
    given = capability or NEWEST
    row = next(
        TABLE[lowest][key]
        for lowest in sorted(TABLE, reverse=True)
        if lowest <= given and key in TABLE[lowest]
    )
    group_pad = 1 if group == 1 else max(DOT_ROWS, _power_of_two(group))
    return Launch(*row, group_pad, max(DOT_ROWS, _power_of_two(head_dim)))


def choose_splits(pairs: int, max_tokens: int, multiprocessors: int) -> int:
    """Into how many parts contexts of up to `max_tokens` are cut, for `pairs` of (request, kv
    head): enough to fill the device, none shorter than it is worth."""
    wanted = -(-PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // pairs)
    return max(1, min(wanted, max_tokens // MIN_SPLIT_TOKENS, MAX_SPLITS))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


class _Variant(NamedTuple):
    """One way the attention kernel is compiled."""

    pool: str
    q: str
    group: int
    head_dim: int
    splits: bool = True
    softcap: bool = False
    scales: str = ""  # "head" or "token"


POOLS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}
# Of each pool type the group of Llama, and the largest that is taken at the largest head size.
VARIANTS = (
    *(_Variant("bf16", "bf16", group, size) for group in (1, 4, 8) for size in HEAD_SIZES),
    _Variant("bf16", "bf16", 8, 80),
    _Variant("bf16", "bf16", 32, 256),
    _Variant("bf16", "bf16", 8, 128, splits=False),
    _Variant("bf16", "bf16", 2, 256, softcap=True),
    _Variant("fp16", "fp16", 8, 128),
    *(_Variant("fp32", "fp32", group, size) for group in (1, 16) for size in HEAD_SIZES),
    *(
        _Variant("fp8e4nv", "bf16", group, size, scales=scales)
        for group, size in ((1, 64), (1, 128), (8, 64), (8, 128), (32, 256))
        for scales in ("head", "token")
    ),
)


def shipped_configurations() -> list[Configuration]:
    """What the compiler is asked about. Imports triton."""
    from .paged_decode_triton import COMBINE_ROWS, combine_splits

    combine = Configuration(
        name="paged_decode.combine.bf16.d128",
        function=combine_splits,
        signature={
            "out": "*bf16",
            **dict.fromkeys(("partial_out", "partial_max", "partial_sum"), "*fp32"),
            "seq_lens": "*i32",
            **dict.fromkeys(("window", "num_splits", "min_tiles"), "i32"),
            **dict.fromkeys(("out_stride_request", "out_stride_head"), "i32"),
        },
        constexprs={"HEAD_DIM": 128, "HEAD_PAD": 128, "TILE": 64, "ROWS": COMBINE_ROWS},
        multiples_of_16=frozenset(("out_stride_request", "out_stride_head")),
    )
    return [*map(_configuration, VARIANTS), combine]


def _configuration(variant: _Variant) -> Configuration:
    from .paged_decode_triton import attend_split

    fp8 = bool(variant.scales)
    dtype, per_token = POOLS[variant.pool], variant.scales == "token"
    launch = choose_launch(NEWEST, variant.group, variant.head_dim, dtype, per_token)
    constexprs: dict[str, object] = {
        "GROUP": variant.group,
        "GROUP_PAD": launch.group_pad,
        "HEAD_DIM": variant.head_dim,
        "HEAD_PAD": launch.head_pad,
        "BLOCK_SIZE": 16,
        "TILE": launch.tile,
        "STAGES": launch.num_stages,
        "ONE_SPLIT": not variant.splits,
        "SOFTCAP": variant.softcap,
        "HEAD_SCALES": variant.scales == "head",
        "TOKEN_SCALES": per_token,
    }
    if not variant.splits:
        constexprs |= {"partial_max": None, "partial_sum": None}
    if not fp8:
        constexprs["kv_scales"] = None
    types = {
        "out": "*fp32" if variant.splits else f"*{variant.q}",
        "q": f"*{variant.q}",
        "kv": f"*{variant.pool}",
        **dict.fromkeys(("block_tables", "seq_lens"), "*i32"),
        **dict.fromkeys(("partial_max", "partial_sum", "kv_scales"), "*fp32"),
        **dict.fromkeys(("score_scale", "cap"), "fp32"),
        "kv_stride_block": "i64",
    }
    passed = [name for name in attend_split.arg_names if name not in constexprs]
    strides = [name for name in passed if name.startswith(("kv_stride", "q_stride", "out_stride"))]
    name = f"paged_decode.{variant.pool}.d{variant.head_dim}.g{variant.group}"
    name += ".one-split" * (not variant.splits) + ".softcap" * variant.softcap
    return Configuration(
        name=name + f".{variant.scales}-scales" * fp8,
        function=attend_split,
        signature={name: types.get(name, "i32") for name in passed},
        constexprs=constexprs,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        multiples_of_16=frozenset(strides),
        needs=frozenset({"LDGSTS"}),
        min_capability=(8, 9) if fp8 else (8, 0),
    )
