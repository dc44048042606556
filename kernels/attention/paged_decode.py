# SPDX-License-Identifier: Apache-2.0
"""paged_decode: attention of one new token of each request over the paged KV pool of one layer.

The function checks its arguments and runs the Triton kernel, the compiled library for CPUs, or
plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernel_choice import AUTO, NATIVE, TRITON, KernelRefused, choose_kernel
from ..pool_checks import check_scales, reason_against_fp8
from .attention_checks import (
    check_layout,
    check_query_and_pool,
    check_scores,
    reason_against_native,
)
from .split_plan import SplitPlan, SplitPlanner

MAX_HEAD_DIM = 256  # of the Triton kernel: tiles of larger heads exceed shared memory
MAX_GROUP = 32  # of the Triton kernel: query heads per KV head; with more heads, registers spill
MAX_GROUP_FP32 = 16
MAX_GRID = 65535  # requests of the Triton kernel: CUDA's limit on a grid's third axis


def paged_decode(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    num_splits: int | None = None,
    plan: SplitPlan | None = None,
    out: Tensor | None = None,
    kernel: str = AUTO,
    strict: bool = False,
) -> Tensor:
    """Write attention to `out`, or to a new tensor, and return it: `[requests, heads, head_dim]`.

    q             `[requests, heads, head_dim]`
    kv            `[num_blocks, 2, block_size, kv heads, head_dim]`, a layer of the pool; new K and
                  V are in it already
    block_tables  int32 `[requests, max_blocks]`
    seq_lens      int32 `[requests]`, new token included; 0 gives zeros
    window        tokens that are seen, the new one included
    softcap       c: a score s becomes c * tanh(s / c)
    kv_scales     float32, for a float8 pool: `[2, kv heads]`, or
                  `[num_blocks, 2, block_size, kv heads]`
    num_splits    parts into which Triton's kernel cuts a context; None: by the plan
    plan          from the lengths (`split_plan.py`), on the device, for Triton's kernel; None: by
                  the table's width and the number of requests

    Data of blocks beyond a request's length, or before its window, never changes a result. Calls
    with equal arguments return equal bits. If `num_splits` is given, the result of a request does
    not depend, in any bit, on other requests or on the width of the table. Lengths and block ids
    are on the device and are not checked. The caller must ensure that each length fits its row of
    the table, and that block ids are in the pool."""
    check_query_and_pool(q, kv, "requests")
    _check_batch(len(q), block_tables, seq_lens)
    _check_splits(num_splits, plan, len(q))
    check_scores(window, softcap)
    check_scales(kv, kv_scales)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    integers = {"block_tables": block_tables, "seq_lens": seq_lens}
    if plan is not None:
        integers |= plan._asdict()
    check_layout(q, kv, out, integers, kv_scales)
    chosen = choose_decode_kernel(q, kv, scale, kernel=kernel, strict=strict)
    return run_decode(
        chosen,
        q,
        kv,
        block_tables,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        kv_scales=kv_scales,
        num_splits=num_splits,
        plan=plan,
        out=out,
    )


def choose_decode_kernel(
    q: Tensor, kv: Tensor, scale: float, *, kernel: str = AUTO, strict: bool = False
) -> str:
    """Choose the kernel for queries like `q` `[any, heads, head_dim]` over the pool; the options
    are those of `paged_decode`. Raises KernelRefused like `choose_kernel`."""
    return choose_kernel(
        kernel,
        q.device,
        unsupported=_reason_against_triton(q, kv),
        native_unsupported=reason_against_native(q, kv, scale),
        strict=strict,
    )


def run_decode(
    chosen: str,
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    num_splits: int | None,
    plan: SplitPlan | None,
    out: Tensor,
) -> Tensor:
    """Run the chosen kernel for `paged_decode`; the arguments must have been checked."""
    if q.numel() == 0:
        return out
    if chosen == TRITON:
        from .paged_decode_triton import paged_decode_triton

        return paged_decode_triton(
            q,
            kv,
            block_tables,
            seq_lens,
            scale=scale,
            window=window,
            softcap=softcap,
            kv_scales=kv_scales,
            num_splits=num_splits,
            plan=plan,
            out=out,
        )
    if chosen == NATIVE:
        from ..cpu.paged_attention import paged_attention_cpu

        return paged_attention_cpu(
            q,
            kv,
            block_tables,
            seq_lens,
            None,
            scale=scale,
            window=window,
            softcap=softcap,
            out=out,
        )
    from .paged_decode_plain import paged_decode_plain

    return paged_decode_plain(
        q,
        kv,
        block_tables,
        seq_lens,
        scale=scale,
        window=window,
        softcap=softcap,
        kv_scales=kv_scales,
        out=out,
    )


def _check_batch(requests: int, block_tables: Tensor, seq_lens: Tensor) -> None:
    if block_tables.dim() != 2 or len(block_tables) != requests:
        raise KernelRefused(
            f"expected block_tables of [{requests}, max_blocks], got {list(block_tables.shape)}"
        )
    if seq_lens.shape != (requests,):
        raise KernelRefused(f"expected seq_lens of [{requests}], got {list(seq_lens.shape)}")


def split_planner(
    q: Tensor, kv: Tensor, kv_scales: Tensor | None, chosen: str
) -> SplitPlanner | None:
    """Return the planner of splits for queries like `q` `[any, heads, head_dim]`; None if the
    kernel `chosen` uses no split plan."""
    if chosen != TRITON:
        return None
    from .paged_decode_triton import decode_launch, multiprocessors

    launch = decode_launch(q, kv, kv_scales)
    slots = launch.programs * multiprocessors(q.device) // kv.shape[3]
    return SplitPlanner(launch.tile, max(1, slots), launch.min_tiles)


def _check_splits(num_splits: int | None, plan: SplitPlan | None, requests: int) -> None:
    if plan is not None and (num_splits is not None or len(plan.first_items) != requests):
        raise KernelRefused(
            f"expected a plan of {requests} requests and no num_splits beside it, got one of "
            f"{len(plan.first_items)} and {num_splits}"
        )
    if num_splits is not None and not 1 <= num_splits <= MAX_GRID:
        raise KernelRefused(f"expected num_splits from 1 to {MAX_GRID}, got {num_splits}")


def _reason_against_triton(q: Tensor, kv: Tensor) -> str | None:
    if torch.float64 in (q.dtype, kv.dtype):
        return "it computes in float32, and these are float64"
    if q.shape[-1] > MAX_HEAD_DIM:
        return f"its heads have at most {MAX_HEAD_DIM} elements, and these {q.shape[-1]}"
    group = q.shape[1] // kv.shape[3]
    most = MAX_GROUP_FP32 if kv.dtype == torch.float32 else MAX_GROUP
    if group > most:
        return f"at most {most} heads share a kv head of {kv.dtype} there, and here {group}"
    if len(q) > MAX_GRID:
        return f"it takes at most {MAX_GRID} requests at a time, and these are {len(q)}"
    return reason_against_fp8(kv)
