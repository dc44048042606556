# SPDX-License-Identifier: Apache-2.0
"""Paged decode in Triton: a request's context is divided into splits, and the results of the splits
are combined.

    grid     kv heads x splits x requests, or kv heads x 1 x items of a split plan; fixed, since
             lengths are read on the device
    program  one kv head with the query heads that share it, and the tiles of its split
    partial  maximum, sum and unscaled output, all float32, for each (item, head)
    combine  one program for each (request, head) adds the weighted partials; not run for one split

A tile has TILE tokens. The block id is looked up for each token, so a tile may begin at any slot of
a block. Tiles before the window are skipped. Masked tokens are not loaded and count as zero,
because a loaded NaN multiplied by a weight of 0 would make the output NaN.

Scores are computed for powers of 2 instead of e: log2(e) is part of the scale, and exp2 is one
instruction. Indices of requests, heads and blocks are converted to 64 bits before they are
multiplied. With a float8 pool, K, V and queries are converted to float16, because a conversion to
bfloat16 would need another permute instruction. Scales of tokens are first divided by the largest
scale of their tile; otherwise small products would become 0 in float16.

The module imports triton, so callers import the module only to run the kernel."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .paged_decode_launch import Launch, choose_launch, choose_splits
from .split_plan import SplitPlan

LOG2_E = math.log2(math.e)
NO_WINDOW = 2**31 - 1
COMBINE_ROWS = 16  # partial results that the combine kernel loads at a time
# New values of these arguments do not compile the kernel again: no step waits for a compiler.
VARYING = ("window", "num_splits", "min_tiles")


@triton.jit
def share_tiles(  # type: ignore[no-untyped-def]
    length, window, num_splits, min_tiles, TILE: tl.constexpr
):
    """Return a request's first tile, the tile after its last, and the tiles per split."""
    first = tl.maximum(length - window, 0) // TILE
    end = (length + TILE - 1) // TILE
    share = tl.maximum((end - first + num_splits - 1) // num_splits, min_tiles)
    return first, end, share


@triton.jit
def find_tiles(  # type: ignore[no-untyped-def]
    length, window, split, num_splits, min_tiles, TILE: tl.constexpr
):
    """Return the first tile of a split, the tile after the split's last, and the tile after the
    request's last."""
    first, end, share = share_tiles(length, window, num_splits, min_tiles, TILE)
    start = first + split * share
    return start, tl.minimum(start + share, end), end


@triton.jit
def find_item(plan_share, request, split, num_splits):  # type: ignore[no-untyped-def]
    """Return the index of the partial result that this program writes, in 64 bits."""
    if plan_share is None:
        item = request * num_splits + split
    else:
        item = tl.program_id(2).to(tl.int64)
    return item


@triton.jit
def cap_scores(scores, cap):  # type: ignore[no-untyped-def]
    """Return cap * tanh(x), where `scores` is 2 * log2(e) * x. If exp2 overflows to infinity, the
    result is the cap."""
    return cap * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))


@triton.jit(do_not_specialize=VARYING)
def attend_split(  # type: ignore[no-untyped-def]
    out,  # the result if a context has one split, else the partial outputs
    partial_max,
    partial_sum,
    q,
    kv,
    block_tables,
    seq_lens,
    kv_scales,
    plan_share,  # the split plan, or None
    plan_requests,
    plan_splits,
    score_scale,
    cap,
    window,
    num_splits,
    min_tiles,
    out_stride_request,
    out_stride_head,
    q_stride_request,
    q_stride_head,
    kv_stride_block,
    kv_stride_pair,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    scale_stride_block,
    scale_stride_pair,
    scale_stride_slot,
    scale_stride_head,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,  # if 1, scores are sums of products instead of tl.dot
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    ONE_SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
):
    kv_head = tl.program_id(0).to(tl.int64)
    if plan_share is None:
        split = tl.program_id(1)
        request = tl.program_id(2)
    else:
        request = tl.load(plan_requests + tl.program_id(2))
        if request < 0:
            return
        split = tl.load(plan_splits + tl.program_id(2))
        min_tiles = tl.load(plan_share)
    request = request.to(tl.int64)
    length = tl.load(seq_lens + request)
    start, stop, end = find_tiles(length, window, split, num_splits, min_tiles, TILE)
    if not ONE_SPLIT:
        if start >= end:
            return  # the combine kernel does not read the partial of an empty split

    rows = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, HEAD_PAD)
    heads = kv_head * GROUP + rows
    real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = request * q_stride_request + heads[:, None] * q_stride_head + dims[None, :]
    queries = tl.load(q + q_offsets, mask=real, other=0.0)
    if HEAD_SCALES or TOKEN_SCALES:
        queries = queries.to(tl.float16)
    if HEAD_SCALES:
        score_scale *= tl.load(kv_scales + kv_head * scale_stride_head)

    keys = kv + kv_head * kv_stride_head
    values = keys + kv_stride_pair
    table = block_tables + request * table_stride
    top = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, HEAD_PAD], tl.float32)
    for tile in tl.range(start, stop, num_stages=STAGES):
        tokens = tile * TILE + tl.arange(0, TILE)
        seen = (tokens < length) & (tokens >= length - window)
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        slots = tokens % BLOCK_SIZE
        places = (blocks * kv_stride_block + slots * kv_stride_slot)[:, None] + dims[None, :]
        there = seen[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(keys + places, mask=there, other=0.0)
        v = tl.load(values + places, mask=there, other=0.0)
        if HEAD_SCALES or TOKEN_SCALES:
            k = k.to(tl.float16)
            v = v.to(tl.float16)

        if GROUP_PAD == 1:
            scores = tl.sum(queries.to(tl.float32) * k.to(tl.float32), axis=1)[None, :]
        else:
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        scores *= score_scale
        if TOKEN_SCALES:
            scale_rows = kv_scales + blocks * scale_stride_block + slots * scale_stride_slot
            scale_rows += kv_head * scale_stride_head
            scores *= tl.load(scale_rows, mask=seen, other=0.0)[None, :]
        if SOFTCAP:
            scores = cap_scores(scores, cap)
        scores = tl.where(seen[None, :], scores, float("-inf"))

        new_top = tl.maximum(top, tl.max(scores, axis=1))
        fade = tl.exp2(top - new_top)
        p = tl.exp2(scores - new_top[:, None])
        total = total * fade + tl.sum(p, axis=1)
        acc *= fade[:, None]
        top = new_top
        if TOKEN_SCALES:
            v_scales = tl.load(scale_rows + scale_stride_pair, mask=seen, other=0.0)
            largest = tl.maximum(tl.max(v_scales, axis=0), 1e-30)  # not 0 if all scales are
            p *= (v_scales / largest)[None, :]
        if GROUP_PAD == 1:
            part = tl.sum(tl.trans(p) * v.to(tl.float32), axis=0)[None, :]
        else:
            part = tl.dot(p.to(v.dtype), v, input_precision="ieee")
        if TOKEN_SCALES:
            part *= largest
        acc += part

    if HEAD_SCALES:
        acc *= tl.load(kv_scales + scale_stride_pair + kv_head * scale_stride_head)
    if ONE_SPLIT:
        acc /= tl.where(total > 0, total, 1.0)[:, None]  # the result for a length of 0 is zeros
        out_offsets = request * out_stride_request + heads[:, None] * out_stride_head
        tl.store(out + out_offsets + dims[None, :], acc.to(out.dtype.element_ty), mask=real)
    else:
        item = find_item(plan_share, request, split, num_splits)
        partials = item * tl.num_programs(0) * GROUP + heads
        tl.store(partial_max + partials, top, mask=rows < GROUP)
        tl.store(partial_sum + partials, total, mask=rows < GROUP)
        tl.store(out + partials[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)


@triton.jit(do_not_specialize=VARYING)
def combine_splits(  # type: ignore[no-untyped-def]
    out,
    partial_out,
    partial_max,
    partial_sum,
    seq_lens,
    plan_share,  # the split plan, or None
    plan_first_items,
    window,
    num_splits,
    min_tiles,
    out_stride_request,
    out_stride_head,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    request = tl.program_id(1).to(tl.int64)
    length = tl.load(seq_lens + request)
    if plan_share is None:
        item = request * num_splits
    else:
        item = tl.load(plan_first_items + request).to(tl.int64)
        min_tiles = tl.load(plan_share)
    first, end, share = share_tiles(length, window, num_splits, min_tiles, TILE)
    used = (end - first + share - 1) // share
    num_heads = tl.num_programs(0)
    partial = item * num_heads + head  # the partial result of the request's first split

    dims = tl.arange(0, HEAD_PAD)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([HEAD_PAD], tl.float32)
    for start in range(0, used, ROWS):
        splits = start + tl.arange(0, ROWS)
        there = splits < used
        places = splits * num_heads
        maxima = tl.load(partial_max + partial + places, mask=there, other=float("-inf"))
        sums = tl.load(partial_sum + partial + places, mask=there, other=0.0)
        outs = tl.load(
            partial_out + partial * HEAD_DIM + places[:, None] * HEAD_DIM + dims[None, :],
            mask=there[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(maxima, axis=0))
        fade = tl.exp2(top - new_top)
        weights = tl.exp2(maxima - new_top)
        total = total * fade + tl.sum(weights * sums, axis=0)
        acc = acc * fade + tl.sum(weights[:, None] * outs, axis=0)
        top = new_top
    acc /= tl.where(total > 0, total, 1.0)
    rows = out + request * out_stride_request + head * out_stride_head
    tl.store(rows + dims, acc.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def paged_decode_triton(
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
    """Launch the attention kernel and, if there are several splits, the kernel that combines the
    splits. The arguments must have been checked. The launch does not wait for the device."""
    requests, num_heads, head_dim = q.shape
    block_size, kv_heads = kv.shape[2], kv.shape[3]
    group = num_heads // kv_heads
    per_token = kv_scales is not None and kv_scales.dim() == 4
    launch = decode_launch(q, kv, kv_scales)
    max_tokens = block_tables.shape[1] * block_size
    seen = max_tokens if window is None else min(max_tokens, window + launch.tile)
    min_tiles = 1
    if plan is not None and seen <= launch.min_tiles * launch.tile:
        plan, num_splits = None, 1  # no context is long enough for two splits
    if num_splits is None and plan is None:
        num_splits = choose_splits(
            requests * kv_heads, seen, multiprocessors(q.device), launch.tile, launch.programs
        )
        min_tiles = launch.min_tiles
    window = NO_WINDOW if window is None else min(window, NO_WINDOW)
    one_split = plan is None and num_splits == 1
    grid, items = (kv_heads, num_splits, requests), requests * (num_splits or 0)
    if plan is not None:
        # The number of items is so large that only `plan.share` limits a split's length.
        items = num_splits = len(plan.requests)
        grid = kv_heads, 1, items

    partial_out, partial_max, partial_sum = out, None, None
    if not one_split:
        workspace = (items, num_heads)
        partial_out = q.new_empty((*workspace, head_dim), dtype=torch.float32)
        partial_max = q.new_empty(workspace, dtype=torch.float32)
        partial_sum = q.new_empty(workspace, dtype=torch.float32)
    # With a softcap, tanh(x) is computed as 1 - 2 / (exp(2x) + 1).
    score_scale = scale * LOG2_E if softcap is None else 2 * scale * LOG2_E / softcap
    shared = (window, num_splits, min_tiles, out.stride(0), out.stride(1))
    # Triton launches kernels on the current device.
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        attend_split[grid](
            partial_out,
            partial_max,
            partial_sum,
            q,
            kv,
            block_tables,
            seq_lens,
            kv_scales,
            None if plan is None else plan.share,
            None if plan is None else plan.requests,
            None if plan is None else plan.splits,
            score_scale,
            0.0 if softcap is None else softcap * LOG2_E,
            *shared,
            *q.stride()[:2],
            *kv.stride()[:4],
            block_tables.stride(0),
            *_scale_strides(kv_scales),
            GROUP=group,
            GROUP_PAD=launch.group_pad,
            HEAD_DIM=head_dim,
            HEAD_PAD=launch.head_pad,
            BLOCK_SIZE=block_size,
            TILE=launch.tile,
            STAGES=launch.num_stages,
            ONE_SPLIT=one_split,
            SOFTCAP=softcap is not None,
            HEAD_SCALES=kv_scales is not None and not per_token,
            TOKEN_SCALES=per_token,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
        if not one_split:
            combine_splits[(num_heads, requests)](
                out,
                partial_out,
                partial_max,
                partial_sum,
                seq_lens,
                None if plan is None else plan.share,
                None if plan is None else plan.first_items,
                *shared,
                HEAD_DIM=head_dim,
                HEAD_PAD=launch.head_pad,
                TILE=launch.tile,
                ROWS=COMBINE_ROWS,
                num_warps=4,
            )
    return out


def _scale_strides(kv_scales: Tensor | None) -> tuple[int, int, int, int]:
    """Return the strides of `kv_scales` by block, K or V, slot, and head; a stride is 0 for a
    dimension that `kv_scales` does not have."""
    if kv_scales is None:
        return 0, 0, 0, 0
    if kv_scales.dim() == 2:
        return 0, kv_scales.stride(0), 0, kv_scales.stride(1)
    block, pair, slot, head = kv_scales.stride()
    return block, pair, slot, head


def decode_launch(q: Tensor, kv: Tensor, kv_scales: Tensor | None) -> Launch:
    """Return the row of the launch table for queries like `q` `[any, heads, head_dim]`."""
    per_token = kv_scales is not None and kv_scales.dim() == 4
    group = q.shape[1] // kv.shape[3]
    return choose_launch(_capability(q.device), group, q.shape[2], kv.dtype, per_token)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
