# SPDX-License-Identifier: Apache-2.0
"""Attention of the new tokens of each request over the paged pool of one layer: chunks of prompts.

Checks its arguments and runs Triton's kernel or the plain twin. Knows nothing of how either works.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .choice import AUTO, FP8_CAPABILITY, TRITON, KernelRefused, choose_kernel, probe_hardware
from .paged_prefill_launch import MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM, choose_launch

FP8 = torch.float8_e4m3fn
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MAX_KV_HEADS = 65535  # of Triton's kernel: CUDA's limit on the second axis of a grid


def paged_prefill(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    kv_scales: Tensor | None = None,
    out: Tensor | None = None,
    kernel: str = AUTO,
    strict: bool = False,
) -> Tensor:
    """`out`, or a new tensor: `[tokens, heads, head_dim]`, as `q`.

    q              `[tokens, heads, head_dim]`, one request's new tokens after the other's
    kv             `[num_blocks, 2, block_size, kv heads, head_dim]`, a layer of the pool; new K and
                   V are in it already
    block_tables   int32 `[requests, max_blocks]`
    seq_lens       int32 `[requests]`, new tokens included
    query_starts   int32 `[requests + 1]`, ascending: request i has the rows `query_starts[i]` …
                   `query_starts[i + 1]` of q, its last positions; of equal ones, no row
    max_query_len  the most rows of a request; wrong by any amount it costs time, not truth
    window         how many tokens a position sees, itself included
    softcap        c: a score s becomes c * tanh(s / c)
    kv_scales      float32 above 0, for a float8 pool: `[2, kv heads]`, or
                   `[num_blocks, 2, block_size, kv heads]`. Triton's kernel then computes in
                   float16, and q must fit it.

    A position sees itself and what is before it; one below 0 (a length shorter than its rows) sees
    nothing and gives zeros. Rows of q that no request has are not written. What blocks hold beyond
    a request's length never reaches a result. Lengths, starts and block ids are on the device and
    not checked: a length must fit its table, and the ids of its blocks the pool.
    """
    _check_shapes(q, kv, block_tables, seq_lens, query_starts)
    _check_options(max_query_len, scale, window, softcap)
    _check_scales(kv, kv_scales)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    _check_layout(q, kv, block_tables, seq_lens, query_starts, kv_scales, out)
    reason = _reason_against_triton(q, kv)
    chosen = choose_kernel(kernel, q.device, unsupported=reason, strict=strict)
    if q.numel() == 0 or len(seq_lens) == 0:
        return out
    if chosen == TRITON:
        from .paged_prefill_triton import paged_prefill_triton

        launch = choose_launch(
            probe_hardware().capability, q.shape[2], q.shape[1] // kv.shape[3], max_query_len
        )
        return paged_prefill_triton(
            q,
            kv,
            block_tables,
            seq_lens,
            query_starts,
            launch=launch,
            scale=scale,
            window=window,
            softcap=softcap,
            kv_scales=kv_scales,
            out=out,
        )
    from .paged_prefill_plain import paged_prefill_plain

    return paged_prefill_plain(
        q,
        kv,
        block_tables,
        seq_lens,
        query_starts,
        scale=scale,
        window=window,
        softcap=softcap,
        kv_scales=kv_scales,
        out=out,
    )


def _check_shapes(
    q: Tensor, kv: Tensor, block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor
) -> None:
    if q.dim() != 3:
        raise KernelRefused(f"expected q of [tokens, heads, head_dim], got {list(q.shape)}")
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
    if block_tables.dim() != 2:
        raise KernelRefused(
            f"expected block_tables of [requests, max_blocks], got {list(block_tables.shape)}"
        )
    requests = len(block_tables)
    for name, tensor, size in (
        ("seq_lens", seq_lens, requests),
        ("query_starts", query_starts, requests + 1),
    ):
        if tensor.shape != (size,):
            raise KernelRefused(
                f"expected {name} of [{size}] beside block_tables of {requests} requests, "
                f"got {list(tensor.shape)}"
            )


def _check_options(
    max_query_len: int, scale: float, window: int | None, softcap: float | None
) -> None:
    if max_query_len < 0:
        raise KernelRefused(f"expected a max_query_len of 0 or more, got {max_query_len}")
    if not scale > 0:
        raise KernelRefused(f"expected a scale above 0, got {scale}")
    if window is not None and window < 1:
        raise KernelRefused(f"expected a window of 1 token or more, got {window}")
    if softcap is not None and not softcap > 0:
        raise KernelRefused(f"expected a softcap above 0, got {softcap}")


def _check_scales(kv: Tensor, kv_scales: Tensor | None) -> None:
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


def _check_layout(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    kv_scales: Tensor | None,
    out: Tensor,
) -> None:
    """Types, `out`, last strides, devices."""
    if q.dtype not in DTYPES or kv.dtype not in (q.dtype, FP8):
        raise KernelRefused(
            f"expected q of 16, 32 or 64 bits and kv as q or {FP8}: got {q.dtype} and {kv.dtype}"
        )
    if out.shape != q.shape or out.dtype != q.dtype:
        raise KernelRefused(
            f"expected out as q, {q.dtype} of {list(q.shape)}: got {out.dtype} of {list(out.shape)}"
        )
    integers = {"block_tables": block_tables, "seq_lens": seq_lens, "query_starts": query_starts}
    for name, tensor in integers.items():
        if tensor.dtype != torch.int32:
            raise KernelRefused(f"expected {name} of torch.int32, got {tensor.dtype}")
    given = {"q": q, "kv": kv, **integers, "out": out}
    if kv_scales is not None:
        given["kv_scales"] = kv_scales
    for name, tensor in given.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise KernelRefused(
                f"expected {name} contiguous in its last axis, got strides {tensor.stride()}"
            )
    if len({tensor.device for tensor in given.values()}) != 1:
        devices = {name: str(tensor.device) for name, tensor in given.items()}
        raise KernelRefused(f"expected one device, got {devices}")


def _reason_against_triton(q: Tensor, kv: Tensor) -> str | None:
    _, heads, head_dim = q.shape
    if q.dtype == torch.float64:
        return "it computes in float32, and these are float64"
    if q.dtype == torch.float32 and q.is_cuda:
        return "it multiplies on tensor cores, which round float32"
    if not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        return f"it takes heads of {MIN_HEAD_DIM} to {MAX_HEAD_DIM} elements, and these {head_dim}"
    if heads // kv.shape[3] > MAX_GROUP:
        return f"at most {MAX_GROUP} heads share a kv head there: {heads}/{kv.shape[3]}"
    if kv.shape[3] > MAX_KV_HEADS:
        return f"it takes at most {MAX_KV_HEADS} kv heads, and these are {kv.shape[3]}"
    if kv.dtype == FP8 and q.is_cuda:
        capability = probe_hardware().capability
        if capability is not None and capability < FP8_CAPABILITY:
            return f"{FP8} needs compute capability {FP8_CAPABILITY}, and this is {capability}"
    return None
