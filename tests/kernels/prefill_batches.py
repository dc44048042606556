# SPDX-License-Identifier: Apache-2.0
"""Batches for paged prefill, and what must come out of them: a loop over rows in float64.

The truth knows nothing of blocks: it is computed from the keys that a batch was made from. Every
slot that no request uses, or whose token is before all its windows, holds NaN, and so does `out`
before a run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from stratakv.kernels.attention.paged_prefill import paged_prefill

NAN = float("nan")
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 5e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}


@dataclass(frozen=True)
class Case:
    """A batch to lay down in a pool."""

    chunks: tuple[tuple[int, int], ...]  # new tokens of each request, and the tokens before them
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None
    scales_dim: int = 0
    window: int | None = None
    softcap: float | None = None
    shared_blocks: int = 0  # the first blocks of all requests are the same ones


@dataclass
class Batch:
    """The arguments of a call, and the rows that are expected."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    options: dict[str, Any]
    expected: Tensor

    def run(self, kernel: str) -> Tensor:
        q = self.tensors[0]
        out = torch.full_like(q, NAN, memory_format=torch.contiguous_format)
        result = paged_prefill(*self.tensors, **self.options, out=out, kernel=kernel)
        assert result is out
        return out

    def difference(self, kernel: str) -> float:
        """The largest, infinite if a row is NaN that should not be or the other way round."""
        found = self.run(kernel).double().cpu()
        if not torch.equal(found.isnan(), self.expected.isnan()):
            return math.inf
        return (found - self.expected).abs().nan_to_num(0).max().item()

    def check(self, *names: str) -> None:
        for kernel in names or ("plain", "triton"):
            assert self.difference(kernel) < TOLERANCE[self.tensors[0].dtype], kernel


def make_batch(case: Case, device: torch.device) -> Batch:
    if device.type == "cuda" and case.dtype == torch.float32:
        case = replace(case, dtype=torch.float16)  # the device's kernel takes no float32
    pool_dtype = case.pool_dtype or case.dtype
    lengths = [new + before for new, before in case.chunks]
    widths = [-(-length // case.block_size) for length in lengths]
    shared = case.shared_blocks
    num_blocks = 3 + sum(widths)
    # The pool's last block is a request's first or, where blocks are shared, everybody's.
    free = [num_blocks - 1, *(torch.randperm(num_blocks - 2) + 1).tolist()]
    tables = torch.zeros(len(lengths), max(widths) + 1, dtype=torch.int32)
    for request, width in enumerate(widths):
        own = [free.pop(0) for _ in range(width)]
        tables[request, :width] = torch.tensor(own)
        tables[request, : min(shared, width)] = tables[0, : min(shared, width)]

    pool = torch.full((num_blocks, 2, 2, case.block_size, case.kv_heads, case.head_dim), NAN)
    pool[0] = 0  # the null block
    scales = _make_scales(case, num_blocks)
    truth: list[Tensor] = []  # [2, length, kv heads, head_dim]: what each request has cached
    for request, length in enumerate(lengths):
        ids = tables[request, : widths[request]].long()
        fresh = torch.randn(len(ids), 2, case.block_size, case.kv_heads, case.head_dim)
        if request and shared:
            fresh[:shared] = pool[ids[:shared], 1]
        elif scales is not None:
            fresh = (fresh * 100).clamp(-448, 448)  # a scale of about 0.01 brings it back
        slots = fresh.transpose(1, 2).flatten(0, 1)
        slots[length:] = NAN
        may_be_nan = not shared and case.scales_dim != 4
        if case.window is not None and may_be_nan:  # what the first row does not see any more
            slots[: max(0, case.chunks[request][1] - case.window + 1)] = NAN
        fresh = slots.unflatten(0, (-1, case.block_size)).transpose(1, 2)
        pool[ids, 1] = fresh
        stored = fresh.to(pool_dtype).double()
        if scales is not None:
            of_blocks = scales.double() if case.scales_dim == 2 else scales[ids].double()
            stored = stored * (
                of_blocks[:, None, :, None] if case.scales_dim == 2 else of_blocks[..., None]
            )
        truth.append(stored.transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1))

    num_tokens = sum(new for new, _ in case.chunks)
    # q is a slice of a wider tensor, as behind a fused projection, and three rows are padding.
    wide = torch.randn(num_tokens + 3, case.heads + 2 * case.kv_heads, case.head_dim)
    q = wide.to(case.dtype)[:, : case.heads]
    starts = [0]
    for new, _ in case.chunks:
        starts.append(starts[-1] + new)
    scale = case.head_dim**-0.5
    expected = torch.full(q.shape, NAN, dtype=torch.float64)
    for request, (new, before) in enumerate(case.chunks):
        for i in range(new):
            row = starts[request] + i
            expected[row] = _attend_one(q[row].double(), truth[request], before + i, case, scale)
    if scales is not None and case.scales_dim == 4:
        unused = pool[:, 1, 0, :, 0, 0].isnan()
        scales.transpose(1, 2)[unused] = NAN
    tensors = (
        q.to(device),
        pool.to(pool_dtype).to(device)[:, 1],
        tables.to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )
    options = {
        "max_query_len": max(new for new, _ in case.chunks),
        "scale": scale,
        "window": case.window,
        "softcap": case.softcap,
        "kv_scales": None if scales is None else scales.to(device),
    }
    return Batch(tensors, options, expected)


def _make_scales(case: Case, num_blocks: int) -> Tensor | None:
    """About 0.01, another for each place. The ones of tokens are a layer of two, as their pool."""
    if case.scales_dim == 2:
        return torch.rand(2, case.kv_heads) * 0.01 + 0.005
    if case.scales_dim == 4:
        shape = (num_blocks, 2, 2, case.block_size, case.kv_heads)
        return (torch.rand(shape) * 0.01 + 0.005)[:, 1]
    return None


def _attend_one(q: Tensor, cached: Tensor, position: int, case: Case, scale: float) -> Tensor:
    """The definition, for one token: `[heads, head_dim]`."""
    if position < 0:
        return torch.zeros_like(q)
    first = 0 if case.window is None else max(0, position - case.window + 1)
    result = torch.empty_like(q)
    for head in range(case.heads):
        k, v = cached[:, first : position + 1, head * case.kv_heads // case.heads]
        scores = k @ q[head] * scale
        if case.softcap is not None:
            scores = case.softcap * (scores / case.softcap).tanh()
        result[head] = scores.softmax(0) @ v
    return result
