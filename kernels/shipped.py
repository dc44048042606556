# SPDX-License-Identifier: Apache-2.0
"""The shipped configurations: all variants of the Triton kernels that are compiled ahead of time.

`tools/compile_kernels.py` compiles the configurations for GPUs that its machine may lack, and
writes the compiler's figures to `resources.json`. The configurations are built from the launch
tables in the folders of `kernels/`. A call of `shipped_configurations` imports triton."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .attention import paged_decode_launch, paged_prefill_launch
from .configuration import Configuration
from .copy import copy_blocks_launch
from .layer import layer_launch
from .write import write_kv_launch

POOLS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8e4nv": torch.float8_e4m3fn,
}


def shipped_configurations() -> list[Configuration]:
    return [*_copies(), *_decodes(), *_prefills(), *_writes(), *_layers()]


def _copies() -> list[Configuration]:
    """Return configurations of the three kinds of copies in the widest word, and of a copy in
    bytes."""
    both, to_rows, from_rows = (True, True), (True, False), (False, True)
    return [
        _copy("copy_blocks", "i64", both),
        _copy("gather_blocks", "i64", to_rows),
        _copy("scatter_blocks", "i64", from_rows),
        _copy("copy_blocks", "u8", both),
    ]


def _copy(move: str, word: str, has_ids: tuple[bool, bool]) -> Configuration:
    from .copy.copy_blocks_triton import move_blocks_kernel

    signature = {"source": f"*{word}", "target": f"*{word}"}
    fixed: dict[str, object] = {"CHUNK": copy_blocks_launch.CHUNK_WORDS}
    for name, given in zip(("source_ids", "target_ids"), has_ids, strict=True):
        if given:
            signature[name] = "*i64"
        else:
            fixed[name] = None
    sizes = [name for name in move_blocks_kernel.arg_names if name not in {**signature, **fixed}]
    aligned = {"words", "source_stride", "target_stride"} if word != "u8" else set()
    return Configuration(
        name=f"{move}.{word}",
        function=move_blocks_kernel,
        signature=signature | dict.fromkeys(sizes, "i32"),
        constexprs=fixed,
        num_warps=copy_blocks_launch.NUM_WARPS,
        multiples_of_16=frozenset(aligned),
    )


class _DecodeVariant(NamedTuple):
    """A variant of the decode kernel."""

    pool: str
    q: str
    group: int
    head_dim: int
    splits: bool = True
    softcap: bool = False
    scales: str = ""  # "head" or "token"


# Each pool type has variants with Llama's group, and with the largest group and head size.
DECODE_VARIANTS = (
    *(
        _DecodeVariant("bf16", "bf16", group, size)
        for group in (1, 4, 8)
        for size in paged_decode_launch.HEAD_SIZES
    ),
    _DecodeVariant("bf16", "bf16", 8, 80),
    _DecodeVariant("bf16", "bf16", 32, 256),
    _DecodeVariant("bf16", "bf16", 8, 128, splits=False),
    _DecodeVariant("bf16", "bf16", 2, 256, softcap=True),
    _DecodeVariant("fp16", "fp16", 8, 128),
    *(
        _DecodeVariant("fp32", "fp32", group, size)
        for group in (1, 16)
        for size in paged_decode_launch.HEAD_SIZES
    ),
    *(
        _DecodeVariant("fp8e4nv", "bf16", group, size, scales=scales)
        for group, size in (
            *((group, size) for group in (1, 4, 8) for size in (64, 128)),
            *((32, size) for size in paged_decode_launch.HEAD_SIZES),
        )
        for scales in ("head", "token")
    ),
)


def _decodes() -> list[Configuration]:
    """Return configurations of decode, and of the kernel that combines splits."""
    from .attention.paged_decode_triton import COMBINE_ROWS, combine_splits

    combine = Configuration(
        name="paged_decode.combine.bf16.d128",
        function=combine_splits,
        signature={
            "out": "*bf16",
            **dict.fromkeys(("partial_out", "partial_max", "partial_sum"), "*fp32"),
            **dict.fromkeys(("seq_lens", "plan_share", "plan_first_items"), "*i32"),
            **dict.fromkeys(("window", "num_splits", "min_tiles"), "i32"),
            **dict.fromkeys(("out_stride_request", "out_stride_head"), "i32"),
        },
        constexprs={"HEAD_DIM": 128, "HEAD_PAD": 128, "TILE": 64, "ROWS": COMBINE_ROWS},
        multiples_of_16=frozenset(("out_stride_request", "out_stride_head")),
    )
    return [*map(_decode, DECODE_VARIANTS), combine]


def _decode(variant: _DecodeVariant) -> Configuration:
    from .attention.paged_decode_triton import attend_split

    fp8 = bool(variant.scales)
    dtype, per_token = POOLS[variant.pool], variant.scales == "token"
    launch = paged_decode_launch.choose_launch(
        paged_decode_launch.NEWEST, variant.group, variant.head_dim, dtype, per_token
    )
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
    plan = ("plan_share", "plan_requests", "plan_splits")
    if not variant.splits:
        constexprs |= dict.fromkeys(("partial_max", "partial_sum", *plan))
    if not fp8:
        constexprs["kv_scales"] = None
    types = {
        "out": "*fp32" if variant.splits else f"*{variant.q}",
        "q": f"*{variant.q}",
        "kv": f"*{variant.pool}",
        **dict.fromkeys(("block_tables", "seq_lens", *plan), "*i32"),
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
        min_programs=_least_side_by_side(variant),
        tile_bytes=2 * launch.tile * variant.head_dim * dtype.itemsize,
        tile_flops=4 * variant.group * launch.tile * variant.head_dim,
    )


def _least_side_by_side(variant: _DecodeVariant) -> int:
    """Return the smallest number of programs that must fit on a multiprocessor at the same time.
    Usual head and group sizes need several programs, which compute while other programs load."""
    if variant.head_dim > 128 or variant.group > paged_decode_launch.DOT_ROWS:
        return 1
    return 2 if variant.scales or variant.group == 1 else 4


def _prefills() -> list[Configuration]:
    """Return configurations of prefill for usual models on the largest GPUs, and of the call that
    needs most registers for each row of the launch table."""
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
        _prefill("", True, False, kv, head_dim, group, block_size, scales_dim, False)
        for kv, head_dim, group, block_size, scales_dim in usual
    ]
    for name, is_wide in (("wide", True), ("narrow", False)):
        for head_dim in paged_prefill_launch.NARROW:
            for short in (False, True):
                for kv, scales_dim in (("bf16", 0), ("fp8e4nv", 4)):
                    found.append(
                        _prefill(name, is_wide, short, kv, head_dim, 7, 16, scales_dim, True)
                    )
    return found


def _prefill(
    row: str,
    is_wide: bool,
    short: bool,
    kv: str,
    head_dim: int,
    group: int,
    block_size: int,
    scales_dim: int,
    has_window_and_cap: bool,
) -> Configuration:
    from .attention.paged_prefill_triton import paged_prefill_kernel

    is_fp8 = kv == "fp8e4nv"
    launch = paged_prefill_launch.choose_launch(
        (9, 0) if is_wide else (8, 0), head_dim, group, 1 if short else 1 << 20, is_fp8=is_fp8
    )
    fixed = paged_prefill_launch.constants(
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
    pointers["q_ptr"] = (
        "*fp16"
        if is_fp8 and paged_prefill_launch.converts_q_first(head_dim)
        else pointers["out_ptr"]
    )
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
        needs=frozenset({"HGMMA", "LDGSTS"} if is_wide else {"LDGSTS"}),
        min_capability=(9, 0) if is_wide else (8, 9) if is_fp8 else (8, 0),
        min_programs=2 if short and head_dim <= 128 else 1,
        tile_bytes=2 * launch.block_keys * head_dim * POOLS[kv].itemsize,
        tile_flops=4 * (launch.block_rows // group * group) * launch.block_keys * head_dim,
    )


def _writes() -> list[Configuration]:
    """Return configurations of KV writes: slices of qkv to a pool whose blocks contain all
    layers."""
    found = []
    for head_dim, dtype in ((64, "bf16"), (128, "bf16"), (128, "fp16"), (128, "fp32")):
        found.append(_write(head_dim, dtype, dtype, "none"))
    found += [_write(128, "bf16", "fp8e4nv", scales) for scales in ("given", "computed")]
    return found


def _write(head_dim: int, dtype: str, pool_dtype: str, scales: str) -> Configuration:
    from .write.write_kv_triton import write_kv_kernel

    fixed: dict[str, object] = {**write_kv_launch.constants(head_dim, 16, 8, scales == "given")}
    fixed |= {"k_dim_stride": 1, "v_dim_stride": 1}
    signature = {"k": f"*{dtype}", "v": f"*{dtype}", "kv": f"*{pool_dtype}", "slots": "*i64"}
    if scales == "none":
        fixed["scales"] = None
    else:
        signature["scales"] = "*fp32"
        fixed["scale_head_stride"] = 1
    # All arguments outside `signature` and `fixed` are sizes and strides.
    sizes = [name for name in write_kv_kernel.arg_names if name not in {**signature, **fixed}]
    return Configuration(
        name=f"write_kv.{dtype}.{pool_dtype}.{scales}.d{head_dim}",
        function=write_kv_kernel,
        signature=signature | dict.fromkeys(sizes, "i32"),
        constexprs=fixed,
        num_warps=write_kv_launch.NUM_WARPS,
        multiples_of_16=frozenset(
            name for name in sizes if name.endswith("_stride") and not name.startswith("scale_")
        ),
        min_capability=(8, 9) if pool_dtype == "fp8e4nv" else (8, 0),
    )


def _layers() -> list[Configuration]:
    """Return configurations of the norm, gate and rotation: rows of Llama-3 and Qwen3 8B (4096),
    Qwen3 14B (5120), and Gemma 3 (2560) with float32 norm weights; 8 KV heads."""
    norms = (("bf16", "bf16", 4096), ("fp16", "fp16", 4096), ("bf16", "bf16", 5120))
    gates = (("bf16", False), ("fp16", False), ("bf16", True))
    rotations = [
        _rotation(dtype, dtype, head_dim, norms)
        for dtype in ("bf16", "fp16")
        for head_dim in (64, 128, 256)
        for norms in ("", dtype)
    ]
    return [
        *(_norm(*norm) for norm in (*norms, ("bf16", "fp32", 2560))),
        *(_gate(*gate) for gate in gates),
        *rotations,
        _rotation("bf16", "bf16", 256, "fp32"),
        *(_rotation("bf16", "fp8e4nv", 128, norms) for norms in ("", "bf16")),
        _rotation("fp16", "fp8e4nv", 64, ""),
    ]


def _norm(dtype: str, weight: str, size: int) -> Configuration:
    from .layer.elementwise_triton import rms_norm_kernel

    return Configuration(
        name=f"rms_norm.{dtype}.{weight}.h{size}",
        function=rms_norm_kernel,
        signature={
            "x": f"*{dtype}",
            "weight": f"*{weight}",
            "out": f"*{dtype}",
            "eps": "fp32",
            "row_stride": "i32",
        },
        constexprs=layer_launch.norm_constants(size),
        num_warps=layer_launch.norm_warps(size),
        multiples_of_16=frozenset({"row_stride"}),
    )


def _gate(dtype: str, is_gelu: bool) -> Configuration:
    from .layer.elementwise_triton import gate_kernel

    return Configuration(
        name=f"gate.{dtype}.{'gelu' if is_gelu else 'silu'}",
        function=gate_kernel,
        signature={
            **dict.fromkeys(("gate", "up"), f"*{dtype}"),
            **dict.fromkeys(("row_stride", "size"), "i32"),
        },
        constexprs={"GELU": is_gelu, "BLOCK": layer_launch.GATE_BLOCK},
        num_warps=layer_launch.GATE_WARPS,
        multiples_of_16=frozenset({"row_stride", "size"}),
    )


def _rotation(dtype: str, pool_dtype: str, head_dim: int, norms: str) -> Configuration:
    """Return a configuration of the kernel of `rotate_write`. `norms` is the type of the norm
    weights, or "" for a model without norm weights."""
    from .layer.rotate_write_triton import rotate_write_kernel

    fixed: dict[str, object] = {**layer_launch.rotary_constants(32, 8, head_dim, 16)}
    signature = dict.fromkeys(("qkv", "cos", "sin"), f"*{dtype}")
    signature |= dict.fromkeys(("slots", "positions"), "*i64")
    signature |= {"kv": f"*{pool_dtype}", "eps": "fp32"}
    if norms:
        signature["head_norms"] = f"*{norms}"
    else:
        fixed["head_norms"] = None
    if pool_dtype == "fp8e4nv":
        signature["scales"] = "*fp32"
        fixed["scale_head_stride"] = 1
    else:
        fixed["scales"] = None
    sizes = [name for name in rotate_write_kernel.arg_names if name not in {**signature, **fixed}]
    return Configuration(
        name=f"rotate_write.{dtype}.{pool_dtype}.d{head_dim}" + f".{norms}-norms" * bool(norms),
        function=rotate_write_kernel,
        signature=signature | dict.fromkeys(sizes, "i32"),
        constexprs=fixed,
        num_warps=layer_launch.ROTARY_WARPS,
        multiples_of_16=frozenset(
            name for name in sizes if name.endswith("_stride") and not name.startswith("scale_")
        ),
        min_capability=(8, 9) if pool_dtype == "fp8e4nv" else (8, 0),
    )
