# SPDX-License-Identifier: Apache-2.0
"""Writes of K and V in Triton. A program copies some rows of K or of V. A row is one head of one
token.

Rows are numbered token by token, so the rows of a program are adjacent in the source and, within a
token, in the pool. Each row is read once and written once, also for float8. The kernel checks the
slots, because slots are on the device; `write_kv` checks the other arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .write_kv_launch import NUM_WARPS, constants


@triton.jit
def _write_rows(  # type: ignore[no-untyped-def]
    source,
    kv,
    scales,
    token,
    head,
    block,
    offset,
    valid,
    token_stride,
    source_head_stride,
    dim_stride,
    block_stride,
    position_stride,
    head_stride,
    scale_block_stride,
    scale_position_stride,
    scale_head_stride,
    HEAD_DIM: tl.constexpr,
    SCALES_GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write rows of K or of V. `kv` points to the first element of K or V in the pool; `scales`
    points to the first scale of K or V, or is None."""
    dim = tl.arange(0, WIDTH)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    from_rows = token * token_stride + head * source_head_stride
    values = tl.load(source + from_rows[:, None] + (dim * dim_stride)[None, :], mask=mask, other=0)
    if scales is not None:
        values = values.to(tl.float32)
        scale_at = scales + head * scale_head_stride
        if SCALES_GIVEN:
            scale = tl.load(scale_at, mask=valid, other=1.0)
        else:
            # Infinities and NaN are excluded, because `<` is false for infinities and NaN.
            magnitudes = tl.abs(values)
            finite = tl.where(magnitudes < float("inf"), magnitudes, 0.0)
            # tl.div_rn rounds like torch's division; Triton's `/` is off by up to 2 ulp.
            scale = tl.div_rn(tl.max(finite, axis=1), LARGEST)
            scale = tl.maximum(scale, SMALLEST)
            scale_at += block * scale_block_stride + offset * scale_position_stride
            tl.store(scale_at, scale, mask=valid)
        # The GPU's conversion to e4m3, below, saturates and keeps NaN.
        values *= tl.div_rn(1.0, scale)[:, None]
    to_rows = block * block_stride + offset * position_stride + head * head_stride
    tl.store(kv + to_rows[:, None] + dim[None, :], values.to(kv.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("tokens", "num_slots"))
def write_kv_kernel(  # type: ignore[no-untyped-def]
    k,
    v,
    kv,
    slots,
    scales,
    tokens,
    num_slots,
    k_token_stride,
    k_head_stride,
    k_dim_stride,
    v_token_stride,
    v_head_stride,
    v_dim_stride,
    block_stride,
    side_stride,
    position_stride,
    head_stride,
    scale_block_stride,
    scale_side_stride,
    scale_position_stride,
    scale_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALES_GIVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Grid: (groups of ROWS rows, 2). Programs with a second index of 0 write K, with 1 V."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Indices are 64-bit before any product: source and pool may have more than 2^31 elements.
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    slot = tl.load(slots + token, mask=token < tokens, other=-1)
    valid = (slot >= 0) & (slot < num_slots)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    if tl.program_id(1) == 0:
        _write_rows(
            k,
            kv,
            scales,
            token,
            head,
            block,
            offset,
            valid,
            k_token_stride,
            k_head_stride,
            k_dim_stride,
            block_stride,
            position_stride,
            head_stride,
            scale_block_stride,
            scale_position_stride,
            scale_head_stride,
            HEAD_DIM,
            SCALES_GIVEN,
            LARGEST,
            SMALLEST,
            WIDTH,
        )
    else:
        _write_rows(
            v,
            kv + side_stride,
            scales if scales is None else scales + scale_side_stride,
            token,
            head,
            block,
            offset,
            valid,
            v_token_stride,
            v_head_stride,
            v_dim_stride,
            block_stride,
            position_stride,
            head_stride,
            scale_block_stride,
            scale_position_stride,
            scale_head_stride,
            HEAD_DIM,
            SCALES_GIVEN,
            LARGEST,
            SMALLEST,
            WIDTH,
        )


def write_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Run `write_kv.write_kv`; the arguments must have been checked."""
    num_blocks, _, block_size, num_heads, head_dim = kv.shape
    is_given = kv_scales is not None and kv_scales.ndim == 2
    known = constants(head_dim, block_size, num_heads, is_given)
    grid = (triton.cdiv(slots.numel() * num_heads, known["ROWS"]), 2)
    with torch.cuda.device(kv.device if kv.is_cuda else -1):
        write_kv_kernel[grid](
            k,
            v,
            kv,
            slots,
            kv_scales,
            slots.numel(),
            num_blocks * block_size,
            *k.stride(),
            *v.stride(),
            *kv.stride()[:4],
            *_scale_strides(kv_scales),
            **known,
            num_warps=NUM_WARPS,
        )


def _scale_strides(kv_scales: torch.Tensor | None) -> tuple[int, ...]:
    """Return the strides of the scales by block, K or V, position, and head; a stride is 0 for a
    dimension that the scales do not have."""
    if kv_scales is None:
        return (0, 0, 0, 0)
    if kv_scales.ndim == 2:
        side, head = kv_scales.stride()
        return (0, side, 0, head)
    return kv_scales.stride()
