# SPDX-License-Identifier: Apache-2.0
"""write_kv: writes new keys and values to slots of the paged pool, quantised if the pool is float8.

The pool of one layer is `[num_blocks, 2, block_size, num_kv_heads, head_dim]`. The last stride of
the pool is 1 and the other strides may be any, so the pool may be a view of a pool in which all
layers of a block are contiguous. A slot is `block_id * block_size + offset`. A call must not
contain a slot twice, because the order in which rows are written is undefined."""

from __future__ import annotations

import torch

from ..kernel_choice import AUTO, TRITON, KernelRefused, choose_kernel
from ..pool_checks import (
    FP8,
    check_last_axis,
    check_one_device,
    check_scales,
    check_written,
    reason_against_fp8,
)
from .write_kv_plain import write_kv_plain

PLAIN_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
TRITON_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 1024  # elements of a row, which a program holds in registers


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    *,
    kv_scales: torch.Tensor | None = None,
    kernel: str = AUTO,
    strict: bool = False,
) -> None:
    """Write row i of `k` and `v`, `[tokens, num_kv_heads, head_dim]`, to slot `slots[i]` of `kv`.

    `k` and `v` may have any strides, for example as slices of a qkv tensor. A row whose slot is -1
    is not written. For slots beyond the pool, the plain kernel raises KernelRefused, while the
    Triton kernel does not write the row.

    A float8 pool needs float32 `kv_scales`: value = stored * scale. Scales for each head, `[2,
    num_kv_heads]`, are positive and only read. Scales for each token and head, `[num_blocks, 2,
    block_size, num_kv_heads]`, are written by this call, computed from the largest finite magnitude
    of each row. A number beyond the range of float8, or an infinity, becomes the largest float8
    number of its sign. NaN stays NaN.

    Raises KernelRefused for arguments that do not fit together."""
    check_write(k, v, kv, slots, kv_scales)
    run_write(choose_write_kernel(k, kv, kernel=kernel, strict=strict), k, v, kv, slots, kv_scales)


def choose_write_kernel(
    k: torch.Tensor, kv: torch.Tensor, *, kernel: str = AUTO, strict: bool = False
) -> str:
    """Return the kernel for rows like `k`. Raises KernelRefused like `choose_kernel`."""
    return choose_kernel(kernel, kv.device, unsupported=_reason_against(k, kv), strict=strict)


def run_write(
    chosen: str,
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Run the chosen kernel for `write_kv`; the arguments must have been checked."""
    if not slots.numel():
        return
    if chosen == TRITON:
        from .write_kv_triton import write_kv_triton

        write_kv_triton(k, v, kv, slots, kv_scales=kv_scales)
    else:
        write_kv_plain(k, v, kv, slots, kv_scales=kv_scales)


def check_write(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None,
) -> None:
    """Raise KernelRefused for arguments of `write_kv` that do not fit together."""
    _check_tensors(k, v, kv, slots)
    check_scales(kv, kv_scales)
    if kv_scales is not None and kv_scales.ndim == 4:
        check_written("kv_scales", kv_scales)
    check_one_device({"k": k, "v": v, "kv": kv, "slots": slots, "kv_scales": kv_scales})


def _check_tensors(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    if kv.ndim != 5 or kv.shape[1] != 2 or 0 in kv.shape:
        raise KernelRefused(
            "expected kv [num_blocks, 2, block_size, num_kv_heads, head_dim], not empty, "
            f"got {list(kv.shape)}"
        )
    check_last_axis("kv", kv)
    check_written("kv", kv)
    expected = (slots.numel(), kv.shape[3], kv.shape[4])
    if k.shape != expected or v.shape != expected:
        raise KernelRefused(
            "expected k and v [tokens, num_kv_heads, head_dim] of "
            f"{list(expected)}, after slots and kv, got {list(k.shape)} and {list(v.shape)}"
        )
    if slots.dtype is not torch.int64 or slots.ndim != 1 or not slots.is_contiguous():
        raise KernelRefused(
            f"expected contiguous int64 slots [tokens], got {slots.dtype} {list(slots.shape)} "
            f"with strides {slots.stride()}"
        )
    if k.dtype not in PLAIN_FLOATS or v.dtype is not k.dtype or kv.dtype not in (k.dtype, FP8):
        raise KernelRefused(
            "expected k and v of one dtype of 16 to 64 bits and kv of the same or float8_e4m3fn, "
            f"got {k.dtype}, {v.dtype} and {kv.dtype}"
        )


def _reason_against(k: torch.Tensor, kv: torch.Tensor) -> str | None:
    """Return the reason why the Triton kernel cannot write rows like `k` to `kv`, or None."""
    if k.dtype not in TRITON_FLOATS:
        return f"it computes nothing in {k.dtype}"
    if kv.shape[4] > MAX_HEAD_DIM:
        return f"it takes heads of up to {MAX_HEAD_DIM}, and this is {kv.shape[4]}"
    return reason_against_fp8(kv)
