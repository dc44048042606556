# SPDX-License-Identifier: Apache-2.0
"""The checks of a call's arguments that are made before an attention kernel runs.

The checks read shapes, types, strides and devices, never contents, so a check waits for no GPU. All
implementations of a kernel have the same checks. `../pool_checks.py` has the checks of the KV pool
alone."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..cpu.paged_attention import reason_against
from ..kernel_choice import KernelRefused
from ..pool_checks import FP8, check_last_axis, check_one_device, check_written

QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_query_and_pool(q: Tensor, kv: Tensor, rows: str) -> None:
    """Raise KernelRefused unless the shapes match; errors call q's first axis `rows`."""
    if q.dim() != 3:
        raise KernelRefused(f"expected q of [{rows}, heads, head_dim], got {list(q.shape)}")
    _, heads, head_dim = q.shape
    if kv.dim() != 5 or kv.shape[1] != 2 or kv.shape[4] != head_dim or 0 in kv.shape:
        raise KernelRefused(
            f"expected kv of [num_blocks, 2, block_size, kv heads, {head_dim}], not empty, "
            f"got {list(kv.shape)}"
        )
    if heads % kv.shape[3]:
        raise KernelRefused(
            f"expected heads as a multiple of the {kv.shape[3]} kv heads, got {heads}"
        )


def check_scores(window: int | None, softcap: float | None) -> None:
    if window is not None and window < 1:
        raise KernelRefused(f"expected a window of 1 token or more, got {window}")
    if softcap is not None and not softcap > 0:
        raise KernelRefused(f"expected a softcap above 0, got {softcap}")


def check_layout(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    integers: Mapping[str, Tensor],
    kv_scales: Tensor | None,
) -> None:
    """Raise KernelRefused unless the kernels support the types, the strides (of all but
    `kv_scales`), the devices and the shape of `out`."""
    if q.dtype not in QUERY_DTYPES or kv.dtype not in (q.dtype, FP8):
        raise KernelRefused(
            f"expected q of 16, 32 or 64 bits and kv as q or {FP8}: got {q.dtype} and {kv.dtype}"
        )
    if out.shape != q.shape or out.dtype != q.dtype:
        raise KernelRefused(
            f"expected out as q, {q.dtype} of {list(q.shape)}: got {out.dtype} of {list(out.shape)}"
        )
    for name, tensor in integers.items():
        if tensor.dtype != torch.int32:
            raise KernelRefused(f"expected {name} of torch.int32, got {tensor.dtype}")
    given = {"q": q, "kv": kv, **integers, "out": out}
    for name, tensor in given.items():
        check_last_axis(name, tensor)
    check_written("out", out)
    check_one_device({**given, "kv_scales": kv_scales})


def reason_against_native(q: Tensor, kv: Tensor, scale: float) -> str | None:
    """Return the reason why the compiled library cannot compute with `q` and `kv`, or None."""
    if q.device.type != "cpu":
        return f"its tensors are on {q.device.type}"
    if not scale > 0:
        return f"it takes a scale above 0, and this is {scale}"
    return reason_against(q.dtype, q.shape[-1], pool_dtype=kv.dtype)
