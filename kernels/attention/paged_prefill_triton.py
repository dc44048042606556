# SPDX-License-Identifier: Apache-2.0
"""Prefill attention over the paged pool, in Triton: one kernel for a batch of chunks of any length.

A program computes `BLOCK_M` rows of one KV head. A row is one query head of one token, so all query
heads that share the KV head share the loads of K and V:

    rows    token 0: heads 0 … group-1 | token 1: heads 0 … group-1 | …
    keys    | edge of the window | seen by every row | edge of the diagonal |
    loop      masked               unmasked            masked

Each program finds its tokens on the device by bisecting `query_starts`, so the host needs only the
numbers of tokens and requests to compute the grid. Sums are in float32. Scores are computed for
powers of 2 instead of e."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .paged_prefill_launch import Launch, constants, converts_q_first

LOG2_E = math.log2(math.e)
# A token's scales are about 1/448 of its largest value. Multiplied by 2^8, the scales are near 1,
# so small weights do not become subnormal numbers of fp16.
SCALE_GAIN = tl.constexpr(256.0)
# Arguments that differ between steps: a new value does not compile the kernel again.
NOT_SPECIALIZED = ("seq_lens_ptr", "query_starts_ptr", "num_requests", "table_stride")


@triton.jit
def _attend(  # type: ignore[no-untyped-def]
    acc,
    total,
    peak,
    q,
    positions,
    first_key,
    last_key,
    key_begin,
    key_end,
    table_ptr,
    k_ptr,
    v_ptr,
    kv_block_stride,
    kv_slot_stride,
    k_scales_ptr,
    v_scales_ptr,
    scales_block_stride,
    scales_slot_stride,
    score_factor,
    cap_factor,
    window,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Add the keys `first_key` … `last_key` to the running sums of a tile. MASKED is false if every
    row sees all keys, and true if some rows see only some keys. Keys from `key_end` on are not
    loaded; with a window, V before `key_begin` is not loaded either."""
    dims = tl.arange(0, PADDED_DIM)
    for start in range(first_key, last_key, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        block_numbers = keys // BLOCK_SIZE
        if MASKED:
            blocks = tl.load(table_ptr + block_numbers, mask=keys < key_end, other=0)
        else:
            blocks = tl.load(table_ptr + block_numbers)
        slots = keys % BLOCK_SIZE
        rows = blocks.to(tl.int64) * kv_block_stride + slots.to(tl.int64) * kv_slot_stride
        offsets = rows[:, None] + dims[None, :]
        # Bytes outside the keys may be NaN, and 0 * NaN is NaN, so only keys are loaded.
        if MASKED or PADDED_DIM != HEAD_DIM:
            loaded = (keys < key_end)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=loaded, other=0.0)
            # K before the window is loaded, because the mask removes its scores. With scales of
            # tokens, which the engine never uses, a mask for V would spill registers.
            if MASKED and HAS_WINDOW and not TOKEN_SCALES:
                loaded = loaded & (keys >= key_begin)[:, None]
            v = tl.load(v_ptr + offsets, mask=loaded, other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)

        scores = tl.dot(q, tl.trans(k.to(q.dtype)))
        if TOKEN_SCALES:
            places = blocks.to(tl.int64) * scales_block_stride + slots * scales_slot_stride
            if MASKED:
                k_scales = tl.load(k_scales_ptr + places, mask=keys < key_end, other=0.0)
                v_scales = tl.load(v_scales_ptr + places, mask=keys < key_end, other=0.0)
            else:
                k_scales = tl.load(k_scales_ptr + places)
                v_scales = tl.load(v_scales_ptr + places)
            scores = scores * k_scales[None, :]
        factor = score_factor
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (e^2x + 1): exact too if e^2x is 0 or infinite.
            scores = 1.0 - 2.0 / (tl.exp2(scores * score_factor) + 1.0)
            factor = cap_factor
        if MASKED:
            seen = keys[None, :] <= positions[:, None]
            if HAS_WINDOW:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))

        new_peak = tl.maximum(peak, tl.max(scores, 1) * factor)
        shift = new_peak
        if MASKED:  # for a row without a visible key, -inf - -inf would be NaN
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * factor - shift[:, None])
        kept = tl.exp2(peak - shift)
        total = total * kept + tl.sum(weights, 1)
        acc = acc * kept[:, None]
        if TOKEN_SCALES:
            weights = weights * (v_scales * SCALE_GAIN)[None, :]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc)
        peak = new_peak
    return acc, total, peak


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def paged_prefill_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    kv_ptr,
    table_ptr,
    seq_lens_ptr,
    query_starts_ptr,
    scales_ptr,
    out_ptr,
    num_requests,
    score_factor,
    cap_factor,
    window,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    kv_block_stride,
    kv_plane_stride,
    kv_slot_stride,
    kv_head_stride,
    scales_block_stride,
    scales_plane_stride,
    scales_slot_stride,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_SCALES: tl.constexpr,
    TOKEN_SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    FP8: tl.constexpr,
):
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    # Tiles run from the last to the first: a request's last tile, the longest, starts early.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)

    # The tiles of request i begin at query_starts[i] // TILE_TOKENS + i: the request has enough
    # tiles for any number of its tokens, and at times an unused tile.
    low = 0
    high = num_requests
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(query_starts_ptr + middle) // TILE_TOKENS + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    request = low
    query_start = tl.load(query_starts_ptr + request)
    query_len = tl.load(query_starts_ptr + request + 1) - query_start
    first_query = (tile - (query_start // TILE_TOKENS + request)) * TILE_TOKENS
    if first_query >= query_len:
        return

    lines = tl.arange(0, BLOCK_M)
    queries = first_query + lines // GROUP
    heads = kv_head * GROUP + lines % GROUP
    dims = tl.arange(0, PADDED_DIM)
    is_row = (lines < TILE_TOKENS * GROUP) & (queries < query_len)
    is_value = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (query_start + queries).to(tl.int64)
    q_rows = tokens * q_token_stride + heads.to(tl.int64) * q_head_stride
    q = tl.load(q_ptr + q_rows[:, None] + dims[None, :], mask=is_value, other=0.0)
    if FP8:  # the hardware converts fp8 to fp16; to bf16 takes many instructions
        q = q.to(tl.float16)

    context = tl.load(seq_lens_ptr + request) - query_len
    positions = context + queries
    first_position = context + first_query
    last_position = context + tl.minimum(first_query + TILE_TOKENS, query_len) - 1
    # A position below 0 is a padding row of a request of length 0; the row's result is zeros.
    key_end = tl.maximum(last_position + 1, 0)
    diagonal = tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N
    k_ptr = kv_ptr + kv_head.to(tl.int64) * kv_head_stride
    v_ptr = k_ptr + tl.full([], 1, tl.int64) * kv_plane_stride
    table_ptr += request.to(tl.int64) * table_stride
    k_scales_ptr = scales_ptr
    v_scales_ptr = scales_ptr
    if HEAD_SCALES or TOKEN_SCALES:
        k_scales_ptr = scales_ptr + kv_head
        v_scales_ptr = k_scales_ptr + scales_plane_stride
    if HEAD_SCALES:
        score_factor = score_factor * tl.load(k_scales_ptr)

    acc = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    unmasked_from = 0
    key_begin = 0
    if HAS_WINDOW:
        key_begin = tl.maximum(first_position - window + 1, 0)
        nearest = key_begin // BLOCK_N * BLOCK_N
        inside = (tl.maximum(last_position - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
        unmasked_from = tl.minimum(inside, diagonal)
        acc, total, peak = _attend(
            acc, total, peak, q, positions, nearest, unmasked_from, key_begin, key_end,
            table_ptr, k_ptr, v_ptr, kv_block_stride, kv_slot_stride,
            k_scales_ptr, v_scales_ptr, scales_block_stride, scales_slot_stride,
            score_factor, cap_factor, window,
            True, HAS_WINDOW, HAS_SOFTCAP, TOKEN_SCALES,
            BLOCK_SIZE, BLOCK_N, HEAD_DIM, PADDED_DIM,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, positions, unmasked_from, diagonal, key_begin, key_end,
        table_ptr, k_ptr, v_ptr, kv_block_stride, kv_slot_stride,
        k_scales_ptr, v_scales_ptr, scales_block_stride, scales_slot_stride,
        score_factor, cap_factor, window,
        False, HAS_WINDOW, HAS_SOFTCAP, TOKEN_SCALES,
        BLOCK_SIZE, BLOCK_N, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, q, positions, diagonal, key_end, key_begin, key_end,
        table_ptr, k_ptr, v_ptr, kv_block_stride, kv_slot_stride,
        k_scales_ptr, v_scales_ptr, scales_block_stride, scales_slot_stride,
        score_factor, cap_factor, window,
        True, HAS_WINDOW, HAS_SOFTCAP, TOKEN_SCALES,
        BLOCK_SIZE, BLOCK_N, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip

    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if HEAD_SCALES:
        result = result * tl.load(v_scales_ptr)
    if TOKEN_SCALES:
        result = result / SCALE_GAIN
    out_rows = tokens * out_token_stride + heads.to(tl.int64) * out_head_stride
    out = out_ptr + out_rows[:, None] + dims[None, :]
    tl.store(out, result.to(out_ptr.dtype.element_ty), mask=is_value)


def paged_prefill_triton(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    launch: Launch,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write the result to `out`, and return `out`. `paged_prefill` has checked the arguments.

    The host reads nothing from the GPU and does not wait for the GPU."""
    num_kv_heads, num_requests = kv.shape[3], len(seq_lens)
    group = q.shape[1] // num_kv_heads
    is_fp8 = kv.dtype == torch.float8_e4m3fn
    if is_fp8 and converts_q_first(q.shape[2]):
        q = q.to(torch.float16)
    compiled = constants(
        launch,
        head_dim=q.shape[2],
        group=group,
        block_size=kv.shape[2],
        has_window=window is not None,
        has_softcap=softcap is not None,
        is_fp8=is_fp8,
        scales_dim=0 if kv_scales is None else kv_scales.dim(),
    )
    block, plane, slot = 0, 0, 0
    if kv_scales is not None and kv_scales.dim() == 4:
        block, plane, slot = kv_scales.stride()[:3]
    elif kv_scales is not None:
        plane = kv_scales.stride(0)
    # The most tiles that the requests can need; the program of an unused tile ends at once.
    tiles = len(q) // (launch.block_rows // group) + num_requests
    # Triton launches kernels on the current device.
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        paged_prefill_kernel[(tiles, num_kv_heads)](
            q,
            kv,
            block_tables,
            seq_lens,
            query_starts,
            kv_scales,
            out,
            num_requests,
            scale * LOG2_E if softcap is None else 2.0 * scale / softcap * LOG2_E,
            0.0 if softcap is None else softcap * LOG2_E,
            window or 0,
            *q.stride()[:2],
            *out.stride()[:2],
            block_tables.stride(0),
            *kv.stride()[:4],
            block,
            plane,
            slot,
            **compiled,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
        )
    return out
