# SPDX-License-Identifier: Apache-2.0
"""rotate_write: rotates queries and keys and writes new K and V, in one launch.

When the engine starts, `choose_rotate_write` decides whether the kernel is used. Otherwise
functions of `engine/models/` norm and rotate queries and keys, and `write_kv` writes K and V; only
the rounding of the norm differs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..kernel_choice import AUTO, PLAIN, KernelRefused, choose_kernel
from ..pool_checks import check_one_device, check_written, reason_against_fp8
from ..write.write_kv import check_write
from .elementwise import reason_against_dtype

MAX_HEAD_DIM = 512  # elements of a head, which a program holds in registers


class Rotary(NamedTuple):
    """The rotation of a step's queries and keys before attention, and the norms before it."""

    positions: Tensor  # int64 [tokens]
    cos: Tensor  # [positions, head_dim // 2], of the queries' type
    sin: Tensor
    head_norms: Tensor | None = None  # [heads + kv heads, head_dim]; float32 or the queries' type
    eps: float = 0.0


def choose_rotate_write(
    q: Tensor,
    kv: Tensor,
    kv_scales: Tensor | None,
    *,
    kernel: str = AUTO,
    strict: bool = False,
) -> str:
    """Return TRITON if the kernel can run for queries like `q` `[any, heads, head_dim]` over a pool
    `kv`, else PLAIN; PLAIN for all types wider than 16 bits. Raises KernelRefused like
    `choose_kernel`."""
    if reason_against_dtype(q.dtype) is not None:
        return PLAIN
    reason = _reason_against(q, kv, kv_scales)
    return choose_kernel(kernel, kv.device, unsupported=reason, strict=strict)


def rotate_write(
    qkv: Tensor,
    rotary: Rotary,
    kv: Tensor,
    slots: Tensor,
    *,
    kv_scales: Tensor | None = None,
) -> None:
    """Norm and rotate the queries of `qkv` `[tokens, heads + 2 kv heads, head_dim]` in place. Write
    the normed, rotated keys and the values of `qkv` to the pool; the keys in `qkv` do not change.
    `kv`, `slots` and `kv_scales` (one scale for each head) are as in `write_kv`. `qkv` may have any
    stride between tokens.

    K and V of tokens with a slot of -1 are not written, but the positions of these tokens must be
    in the tables of cosines and sines too. Raises KernelRefused for arguments that do not fit
    together."""
    _check(qkv, rotary, kv, slots, kv_scales)
    run_rotate_write(qkv, rotary, kv, slots, kv_scales)


def run_rotate_write(
    qkv: Tensor, rotary: Rotary, kv: Tensor, slots: Tensor, kv_scales: Tensor | None
) -> None:
    """Run `rotate_write`; the arguments must have been checked."""
    if not len(qkv):
        return
    from .rotate_write_triton import rotate_write_triton

    rotate_write_triton(
        qkv, rotary.positions, rotary.cos, rotary.sin, kv, slots,
        head_norms=rotary.head_norms, eps=rotary.eps, kv_scales=kv_scales,
    )  # fmt: skip


def _check(
    qkv: Tensor, rotary: Rotary, kv: Tensor, slots: Tensor, kv_scales: Tensor | None
) -> None:
    kv_heads = kv.shape[3] if kv.dim() == 5 else 0
    if qkv.dim() != 3 or qkv.shape[1] <= 2 * kv_heads:
        raise KernelRefused(
            f"expected qkv [tokens, heads + 2 x {kv_heads} kv heads, head_dim] over kv, "
            f"got {list(qkv.shape)}"
        )
    tokens, rows, head_dim = qkv.shape
    first = rows - 2 * kv_heads
    check_write(qkv[:, first : rows - kv_heads], qkv[:, rows - kv_heads :], kv, slots, kv_scales)
    if reason := _reason_against(qkv, kv, kv_scales):
        raise KernelRefused(f"the Triton kernel cannot run: {reason}")
    check_written("qkv", qkv)
    if tokens and qkv.stride()[1:] != (head_dim, 1):
        raise KernelRefused(
            f"expected the heads of a token side by side in qkv, got strides {qkv.stride()}"
        )
    positions, cos, sin, head_norms, _ = rotary
    if positions.dtype is not torch.int64 or positions.shape != (tokens,):
        raise KernelRefused(
            f"expected int64 positions [{tokens}], got {positions.dtype} {list(positions.shape)}"
        )
    table = (len(cos), head_dim // 2)
    for name, tensor, shape, dtypes in (
        ("cos", cos, table, (qkv.dtype,)),
        ("sin", sin, table, (qkv.dtype,)),
        ("head_norms", head_norms, (rows - kv_heads, head_dim), (qkv.dtype, torch.float32)),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise KernelRefused(
                f"expected contiguous {name} {list(shape)} of {' or '.join(map(str, dtypes))}, got "
                f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"
            )
    if not positions.is_contiguous():
        raise KernelRefused(f"expected contiguous positions, got strides {positions.stride()}")
    given = {"qkv": qkv, "positions": positions, "cos": cos, "sin": sin, "head_norms": head_norms}
    check_one_device({**given, "kv": kv})


def _reason_against(q: Tensor, kv: Tensor, kv_scales: Tensor | None) -> str | None:
    """Return the reason why the Triton kernel cannot compute with `q` and `kv`, or None."""
    if reason := reason_against_dtype(q.dtype):
        return reason
    head_dim = kv.shape[4]
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"it takes heads of an even size up to {MAX_HEAD_DIM}, and this is {head_dim}"
    if kv_scales is not None and kv_scales.dim() == 4:
        return "it takes scales of heads, and these are of tokens"
    return reason_against_fp8(kv)
