# SPDX-License-Identifier: Apache-2.0
"""The rotation of queries and keys and the KV write in Triton. A program computes some heads of one
token, of queries, of keys or of values:

    of queries    normed, rotated, written back in place
    of keys       normed, rotated, written to the pool; in `qkv` they stay unrotated
    of values     written to the pool

A head is in registers as two halves, because the rotation pairs each element of the first half with
an element of the second. Products are rounded where torch's operators round. So the results equal
those of `norm`, `rotate` and `write_kv` in every bit, except for the order of the norm's sum. The
kernel checks only the slots, because the slots are on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise_triton import weighted
from .layer_launch import ROTARY_WARPS, rotary_constants, rotary_programs


# The kernel is compiled once for all addresses of `slots` and `positions`.
@triton.jit(do_not_specialize=("num_slots",), do_not_specialize_on_alignment=("slots", "positions"))
def rotate_write_kernel(  # type: ignore[no-untyped-def]
    qkv,
    kv,
    slots,
    positions,
    cos,
    sin,
    head_norms,
    scales,
    eps,
    num_slots,
    token_stride,
    block_stride,
    side_stride,
    position_stride,
    head_stride,
    scale_side_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (tokens, groups of ROWS heads). Groups of queries come before groups of keys and of
    values."""
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    KV_GROUPS: tl.constexpr = (KV_HEADS + ROWS - 1) // ROWS
    # Indices are 64-bit before any product: the pool and the rows may have more than 2^31 elements.
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    is_query = group < Q_GROUPS
    is_value = group >= Q_GROUPS + KV_GROUPS
    # The group's first head among its queries, keys or values; these begin at head `begin` of qkv.
    first_head = tl.where(is_query, group, (group - Q_GROUPS) % KV_GROUPS) * ROWS
    begin = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    head = first_head + tl.arange(0, ROWS)
    valid = head < tl.where(is_query, HEADS, KV_HEADS)
    lane = tl.arange(0, WIDTH)
    mask = valid[:, None] & (lane < HALF)[None, :]
    row_at = (begin + head)[:, None] * HEAD_DIM + lane[None, :]
    at = qkv + token * token_stride + row_at
    left = tl.load(at, mask=mask, other=0)
    right = tl.load(at + HALF, mask=mask, other=0)
    dtype: tl.constexpr = left.dtype
    if not is_value:
        if head_norms is not None:
            x, y = left.to(tl.float32), right.to(tl.float32)
            mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / HEAD_DIM
            factor = tl.rsqrt(mean + eps)[:, None]
            weight_at = head_norms + row_at
            left = weighted(x * factor, tl.load(weight_at, mask=mask, other=0), dtype)
            right = weighted(y * factor, tl.load(weight_at + HALF, mask=mask, other=0), dtype)
        # Each head loads its cosines and sines, from the cache and without a barrier.
        turn_at = tl.load(positions + token) * HALF + lane[None, :] + tl.zeros_like(row_at)
        cosines = tl.load(cos + turn_at, mask=mask, other=0).to(tl.float32)
        sines = tl.load(sin + turn_at, mask=mask, other=0).to(tl.float32)
        x, y = left.to(tl.float32), right.to(tl.float32)
        # The first product is rounded as in torch's `mul`; `addcmul_` adds an unrounded product.
        left = ((x * cosines).to(dtype).to(tl.float32) - y * sines).to(dtype)
        right = ((y * cosines).to(dtype).to(tl.float32) + x * sines).to(dtype)
    if is_query:
        tl.store(at, left, mask=mask)
        tl.store(at + HALF, right, mask=mask)
    else:
        slot = tl.load(slots + token)
        if (slot >= 0) & (slot < num_slots):
            side = tl.where(is_value, 1, 0).to(tl.int64)
            place = (slot // BLOCK_SIZE) * block_stride + (slot % BLOCK_SIZE) * position_stride
            place += side * side_stride
            target = kv + place + head.to(tl.int64)[:, None] * head_stride + lane[None, :]
            if scales is not None:
                scale_at = scales + side * scale_side_stride + head * scale_head_stride
                scale = tl.load(scale_at, mask=valid, other=1.0)
                inverse = tl.div_rn(1.0, scale)[:, None]
                # The GPU's conversion to e4m3 saturates and keeps NaN.
                x = (left.to(tl.float32) * inverse).to(kv.dtype.element_ty)
                y = (right.to(tl.float32) * inverse).to(kv.dtype.element_ty)
                tl.store(target, x, mask=mask)
                tl.store(target + HALF, y, mask=mask)
            else:
                tl.store(target, left, mask=mask)
                tl.store(target + HALF, right, mask=mask)


def rotate_write_triton(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    head_norms: torch.Tensor | None,
    eps: float,
    kv_scales: torch.Tensor | None,
) -> None:
    """Run `rotate_write.rotate_write`; the arguments must have been checked."""
    tokens, rows, head_dim = qkv.shape
    num_blocks, _, block_size, num_kv_heads, _ = kv.shape
    known = rotary_constants(rows - 2 * num_kv_heads, num_kv_heads, head_dim, block_size)
    scale_strides = (0, 0) if kv_scales is None else kv_scales.stride()
    with torch.cuda.device(kv.device if kv.is_cuda else -1):
        rotate_write_kernel[(tokens, rotary_programs(known))](
            qkv,
            kv,
            slots,
            positions,
            cos,
            sin,
            head_norms,
            kv_scales,
            eps,
            num_blocks * block_size,
            qkv.stride(0),
            *kv.stride()[:4],
            *scale_strides,
            **known,
            num_warps=ROTARY_WARPS,
        )
