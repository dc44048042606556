# SPDX-License-Identifier: Apache-2.0
"""How the prefill kernel is launched: tiles, warps and pipeline stages, from a checked-in table.

Nothing is tuned while it runs, so the same call is the same launch in every process. Knows nothing
of tensors, and imports the kernel only to list what is shipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..configuration import Configuration

MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256  # below, tl.dot has too little to add up; above, no row here
SHORT_ROWS = 64  # chunks of no more rows than this take the table's second column
MAX_GROUP = 64  # one token's rows have to fit into the smaller tile


@dataclass(frozen=True, slots=True)
class Launch:
    """The tile of one program and what the compiler is told."""

    block_rows: int  # tokens times the heads that share a KV head
    block_keys: int
    num_warps: int
    num_stages: int


# By padded head size: for long chunks, and for short ones. Looking a block up is a pipeline stage
# of its own: with 3 stages a tile of K and V is waited for as soon as it is asked for, with 5 one
# more is under way meanwhile. Found by compiling ahead of time: nothing here spills with a group
# of 7, a window, a soft cap and scales of tokens together.
WIDE = {  # capability 9 and 10: four warps multiply at once, and 227 KB of shared memory
    64: (Launch(128, 64, 8, 5), Launch(64, 64, 4, 5)),
    128: (Launch(128, 64, 8, 5), Launch(64, 64, 4, 5)),
    256: (Launch(64, 32, 8, 5), Launch(64, 32, 8, 5)),
}
NARROW = {  # the others: 64 keys spill with a group of 7, and some have 99 KB of shared memory
    64: (Launch(128, 64, 8, 5), Launch(64, 32, 4, 5)),
    128: (Launch(128, 32, 8, 5), Launch(64, 32, 4, 5)),
    256: (Launch(64, 32, 8, 3), Launch(64, 32, 8, 3)),
}


def padded_head_dim(head_dim: int) -> int:
    """The size that the kernel computes with."""
    return 1 << (head_dim - 1).bit_length()


def choose_launch(
    capability: tuple[int, int] | None, head_dim: int, group: int, max_query_len: int
) -> Launch:
    """None is the interpreter, which runs what the largest devices run."""
    table = WIDE if capability is None or capability[0] in (9, 10) else NARROW
    long, short = table[max(padded_head_dim(head_dim), min(table))]
    return short if max_query_len * group <= SHORT_ROWS else long


def converts_q_first(head_dim: int) -> bool:
    """Whether q becomes fp16 before the kernel runs, where the pool is float8. Converted inside,
    q stays in registers instead of shared memory, and with 256 elements those do not suffice."""
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
    """The kernel's compile-time arguments. `scales_dim` is 2 for scales of heads, 4 for scales of
    tokens, 0 without."""
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


def shipped_configurations() -> list[Configuration]:
    """What is compiled ahead of time: usual models on the device that the table was made for, and
    the heaviest call that each row of the table allows."""
    usual = (
        ("bf16", 64, 8, 16, 0),
        ("bf16", 96, 4, 16, 0),
        ("bf16", 128, 1, 16, 0),
        ("bf16", 128, 4, 16, 0),
        ("bf16", 128, 8, 64, 0),
        ("fp16", 128, 4, 16, 0),
        ("fp8e4nv", 128, 4, 16, 2),
        ("fp8e4nv", 128, 8, 32, 4),
    )
    found = [
        _configuration("", WIDE, False, kv, head_dim, group, block_size, scales_dim, False)
        for kv, head_dim, group, block_size, scales_dim in usual
    ]
    for name, table in (("wide", WIDE), ("narrow", NARROW)):
        for head_dim in table:
            for short in (False, True):
                for kv, scales_dim in (("bf16", 0), ("fp8e4nv", 4)):
                    found.append(
                        _configuration(name, table, short, kv, head_dim, 7, 16, scales_dim, True)
                    )
    return found


def _configuration(
    row: str,
    table: dict[int, tuple[Launch, Launch]],
    short: bool,
    kv: str,
    head_dim: int,
    group: int,
    block_size: int,
    scales_dim: int,
    has_window_and_cap: bool,
) -> Configuration:
    from .paged_prefill_triton import paged_prefill_kernel

    launch = table[padded_head_dim(head_dim)][short]
    is_fp8 = kv == "fp8e4nv"
    fixed = constants(
        launch,
        head_dim=head_dim,
        group=group,
        block_size=block_size,
        has_window=has_window_and_cap,
        has_softcap=has_window_and_cap,
        is_fp8=is_fp8,
        scales_dim=scales_dim,
    )
    pointers = {"kv_ptr": f"*{kv}", "out_ptr": "*bf16" if is_fp8 else f"*{kv}"}
    pointers["q_ptr"] = "*fp16" if is_fp8 and converts_q_first(head_dim) else pointers["out_ptr"]
    pointers |= dict.fromkeys(("table_ptr", "seq_lens_ptr", "query_starts_ptr"), "*i32")
    if scales_dim:
        pointers["scales_ptr"] = "*fp32"
    else:
        fixed["scales_ptr"] = None
    floats = dict.fromkeys(("score_factor", "cap_factor"), "fp32")
    given = {**pointers, **floats, **fixed}
    sizes = [name for name in paged_prefill_kernel.arg_names if name not in given]
    ending = f"{row}.{'short' if short else 'long'}" if row else f"s{scales_dim}"
    return Configuration(
        name=f"paged_prefill.{kv}.d{head_dim}.g{group}.b{block_size}.{ending}",
        function=paged_prefill_kernel,
        signature=pointers | floats | dict.fromkeys(sizes, "i32"),
        constexprs=fixed,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        multiples_of_16=frozenset(size for size in sizes if size.startswith(("q_", "out_", "kv_"))),
        needs=frozenset({"HGMMA", "LDGSTS"} if table is WIDE else {"LDGSTS"}),
        min_capability=(9, 0) if table is WIDE else (8, 9) if is_fp8 else (8, 0),
    )
