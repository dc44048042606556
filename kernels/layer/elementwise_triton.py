# SPDX-License-Identifier: Apache-2.0
"""A layer's RMS norm and gated activation in Triton. A program computes one row of the norm, or a
part of a row of the activation.

The arithmetic is in float32. Values are rounded to the rows' type at the steps where the torch
operators of `engine/models/layers.py` round. The callers in `elementwise.py` check the arguments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .layer_launch import GATE_BLOCK, GATE_WARPS, norm_constants, norm_warps

# gelu(x) is about x * sigmoid(GELU_SCALE * (x + GELU_CUBE * x**3)); the scale is 2 * sqrt(2 / pi).
GELU_SCALE = tl.constexpr(1.5957691216057308)
GELU_CUBE = tl.constexpr(0.044715)


@triton.jit
def weighted(normed, weights, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return float32 `normed` times `weights`, as `dtype`. With 16-bit weights, `normed` is rounded
    before the product; with float32 weights, only the product is rounded."""
    if weights.dtype != tl.float32:
        normed = normed.to(dtype).to(tl.float32)
    return (normed * weights.to(tl.float32)).to(dtype)


@triton.jit
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, weight, out, eps, row_stride, SIZE: tl.constexpr, WIDTH: tl.constexpr
):
    """Compute the RMS norm of one row. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    mask = lane < SIZE
    values = tl.load(x + row * row_stride + lane, mask=mask, other=0).to(tl.float32)
    weights = tl.load(weight + lane, mask=mask, other=0)
    normed = values * tl.rsqrt(tl.sum(values * values) / SIZE + eps)
    tl.store(out + row * SIZE + lane, weighted(normed, weights, x.dtype.element_ty), mask=mask)


@triton.jit
def gate_kernel(  # type: ignore[no-untyped-def]
    gate, up, row_stride, size, GELU: tl.constexpr, BLOCK: tl.constexpr
):
    """Write a block of activation(gate) * up to `gate`. Grid: (rows, blocks of a row)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lane < size
    at = row * row_stride + lane
    x = tl.load(gate + at, mask=mask, other=0).to(tl.float32)
    y = tl.load(up + at, mask=mask, other=0).to(tl.float32)
    slope = GELU_SCALE * (x + GELU_CUBE * (x * x * x)) if GELU else x
    # SiLU and GELU are computed as x * sigmoid(slope).
    activated = (x / (1.0 + tl.exp(-slope))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(gate + at, (activated * y).to(gate.dtype.element_ty), mask=mask)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Run `elementwise.rms_norm`; the arguments must have been checked."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    with torch.cuda.device(x.device if x.is_cuda else -1):
        rms_norm_kernel[(rows,)](
            x, weight, out, eps, x.stride(0), **norm_constants(size), num_warps=norm_warps(size)
        )
    return out


def gate_triton(gate: torch.Tensor, up: torch.Tensor, is_gelu: bool) -> None:
    """Run `elementwise.silu_gate` or `gelu_gate`; the arguments must have been checked."""
    rows, size = gate.shape
    with torch.cuda.device(gate.device if gate.is_cuda else -1):
        gate_kernel[(rows, triton.cdiv(size, GATE_BLOCK))](
            gate, up, gate.stride(0), size, GELU=is_gelu, BLOCK=GATE_BLOCK, num_warps=GATE_WARPS
        )
