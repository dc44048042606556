# SPDX-License-Identifier: Apache-2.0
"""What every attention kernel asks of its arguments before it runs.

Looks at shapes, types, strides and devices, never at what is in a tensor, so that nothing waits for
a device. Knows neither which kernel will run nor what that one cannot do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .choice import KernelRefused

FP8 = torch.float8_e4m3fn
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_query_and_pool(q: Tensor, kv: Tensor, rows: str) -> None:
    """Shapes; `rows` is what the first axis of q counts."""
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


def check_scales(kv: Tensor, kv_scales: Tensor | None) -> None:
    """A float8 pool has scales, of heads or of tokens and heads; no other pool has any."""
    if kv.dtype != FP8:
        if kv_scales is not None:
            raise KernelRefused(f"expected no kv_scales beside a pool of {kv.dtype}, got some")
        return
    if kv_scales is None:
        raise KernelRefused(f"expected kv_scales beside a pool of {FP8}, got none")
    wanted = ((2, kv.shape[3]), kv.shape[:4])
    if kv_scales.dtype != torch.float32 or kv_scales.shape not in wanted:
        raise KernelRefused(
            f"expected float32 kv_scales of {list(wanted[0])} or {list(wanted[1])}, "
            f"got {kv_scales.dtype} of {list(kv_scales.shape)}"
        )


def check_layout(
    q: Tensor,
    kv: Tensor,
    out: Tensor,
    integers: Mapping[str, Tensor],
    kv_scales: Tensor | None,
) -> None:
    """Types, `out`, last strides of all but `kv_scales`, devices of all."""
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
    if kv_scales is not None:
        given["kv_scales"] = kv_scales
    if len({tensor.device for tensor in given.values()}) != 1:
        devices = {name: str(tensor.device) for name, tensor in given.items()}
        raise KernelRefused(f"expected one device, got {devices}")


def check_last_axis(name: str, tensor: Tensor) -> None:
    """Contiguous there; of an axis of one element, the stride says nothing."""
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        raise KernelRefused(
            f"expected {name} contiguous in its last axis, got strides {tensor.stride()}"
        )
