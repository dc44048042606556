# SPDX-License-Identifier: Apache-2.0
"""paged_prefill: attention of several new tokens of each request (chunks of prompts) over the paged
KV pool of one layer.

The function checks its arguments and runs the Triton kernel, the compiled library for CPUs, or
plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernel_choice import AUTO, NATIVE, TRITON, KernelRefused, choose_kernel, probe_hardware
from ..pool_checks import FP8, check_last_axis, check_scales, reason_against_fp8
from .attention_checks import (
    check_layout,
    check_query_and_pool,
    check_scores,
    reason_against_native,
)
from .paged_prefill_launch import MAX_GROUP, MAX_HEAD_DIM, MIN_HEAD_DIM, choose_launch

MAX_KV_HEADS = 65535  # of the Triton kernel: CUDA's limit on a grid's second axis


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
    """Write attention to `out`, or to a new tensor, and return it: `[tokens, heads, head_dim]`.

    q              `[tokens, heads, head_dim]`, one request's new tokens after the other's
    kv             `[num_blocks, 2, block_size, kv heads, head_dim]`, a layer of the pool; new K and
                   V are in it already
    block_tables   int32 `[requests, max_blocks]`
    seq_lens       int32 `[requests]`, new tokens included
    query_starts   int32 `[requests + 1]`, ascending: request i has the rows `query_starts[i]` …
                   `query_starts[i + 1]` of q, its last positions; no row if both are equal
    max_query_len  the most rows of a request; a wrong number costs time, but changes no result
    window         tokens that a position sees, itself included
    softcap        c: a score s becomes c * tanh(s / c)
    kv_scales      float32 above 0, for a float8 pool: `[2, kv heads]`, or
                   `[num_blocks, 2, block_size, kv heads]`. Triton's kernel then computes in
                   float16, and q must fit it.

    Attention is causal: a position sees itself and earlier positions. If a request has fewer tokens
    than rows, its first rows have positions below 0, and zeros as results. Rows of `out` for rows
    of q that belong to no request are not written. Data of blocks beyond a request's length, or
    before the window of its first row, never changes a result. The exception: with a scale for each
    token, a NaN before the window makes results NaN. Calls with equal arguments return equal bits.
    If `max_query_len` is the same, the result of a request does not depend, in any bit, on other
    requests. Lengths, starts and block ids are on the device and are not checked. The caller must
    ensure that each length fits its row of the table, and that block ids are in the pool."""
    check_query_and_pool(q, kv, "tokens")
    _check_batch(block_tables, seq_lens, query_starts)
    _check_options(max_query_len, scale)
    check_scores(window, softcap)
    check_scales(kv, kv_scales)
    if kv_scales is not None:
        check_last_axis("kv_scales", kv_scales)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    integers = {"block_tables": block_tables, "seq_lens": seq_lens, "query_starts": query_starts}
    check_layout(q, kv, out, integers, kv_scales)
    chosen = choose_prefill_kernel(q, kv, scale, kernel=kernel, strict=strict)
    return run_prefill(
        chosen,
        q,
        kv,
        block_tables,
        seq_lens,
        query_starts,
        max_query_len=max_query_len,
        scale=scale,
        window=window,
        softcap=softcap,
        kv_scales=kv_scales,
        out=out,
    )


def choose_prefill_kernel(
    q: Tensor, kv: Tensor, scale: float, *, kernel: str = AUTO, strict: bool = False
) -> str:
    """Choose the kernel for queries like `q` `[any, heads, head_dim]` over the pool; the options
    are those of `paged_prefill`. Raises KernelRefused like `choose_kernel`."""
    return choose_kernel(
        kernel,
        q.device,
        unsupported=_reason_against_triton(q, kv),
        native_unsupported=reason_against_native(q, kv, scale),
        strict=strict,
    )


def run_prefill(
    chosen: str,
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    max_query_len: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Run the chosen kernel for `paged_prefill`; the arguments must have been checked."""
    if q.numel() == 0 or len(seq_lens) == 0:
        return out
    if chosen == TRITON:
        from .paged_prefill_triton import paged_prefill_triton

        launch = choose_launch(
            probe_hardware().capability,
            q.shape[2],
            q.shape[1] // kv.shape[3],
            max_query_len,
            is_fp8=kv.dtype == FP8,
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
    if chosen == NATIVE:
        from ..cpu.paged_attention import paged_attention_cpu

        return paged_attention_cpu(
            q,
            kv,
            block_tables,
            seq_lens,
            query_starts,
            scale=scale,
            window=window,
            softcap=softcap,
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


def _check_batch(block_tables: Tensor, seq_lens: Tensor, query_starts: Tensor) -> None:
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


def _check_options(max_query_len: int, scale: float) -> None:
    if max_query_len < 0:
        raise KernelRefused(f"expected a max_query_len of 0 or more, got {max_query_len}")
    if not scale > 0:
        raise KernelRefused(f"expected a scale above 0, got {scale}")


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
    return reason_against_fp8(kv)
