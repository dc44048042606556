# SPDX-License-Identifier: Apache-2.0
"""Batches of the sizes that models have, made and judged on the device they run on.

The truth is float64 as in `decode_batches.py` and `prefill_batches.py`, but a request at a time, so
that contexts of thousands are quick; test_large_batches.py compares the two. Whatever no request
has written is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratakv.kernels.attention.paged_decode import paged_decode
from stratakv.kernels.attention.paged_prefill import paged_prefill
from stratakv.kernels.pool_checks import FP8


@dataclass
class LargeBatch:
    """Chunks over cached context, or with one new token each the rows of a decode step."""

    q: Tensor
    kv: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    chunks: list[tuple[int, int]]  # new tokens of each request, and the tokens before them
    options: dict[str, Any]

    def decode(self, kernel: str, **more: Any) -> Tensor:
        tensors = (self.q, self.kv, self.block_tables, self.seq_lens)
        return paged_decode(*tensors, **self.options, **more, kernel=kernel)

    def prefill(self, kernel: str, **more: Any) -> Tensor:
        more.setdefault("max_query_len", max(new for new, _ in self.chunks))
        tensors = (self.q, self.kv, self.block_tables, self.seq_lens, self.query_starts)
        return paged_prefill(*tensors, **self.options, **more, kernel=kernel)


def make_large_batch(
    device: torch.device,
    chunks: list[tuple[int, int]],
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    scales: str = "",
    num_blocks: int | None = None,
    **options: Any,
) -> LargeBatch:
    """Blocks are drawn from the whole pool, its first and its last among them."""
    lengths = [new + before for new, before in chunks]
    widths = [-(-length // block_size) for length in lengths]
    num_blocks = num_blocks or sum(widths) + 3
    ids = 1 + torch.randperm(num_blocks - 2)[: sum(widths)]
    ids[:1], ids[-1:] = num_blocks - 1, 0
    shape = (num_blocks, 2, block_size, kv_heads, head_dim)
    kv = nan_pool(shape, FP8 if scales else dtype, device)
    if scales:
        sizes = (2, kv_heads) if scales == "head" else shape[:-1]
        options["kv_scales"] = 0.005 + 0.01 * torch.rand(sizes, device=device)
    tables = torch.zeros(len(chunks), max(widths), dtype=torch.int32)
    for row, (length, own) in enumerate(zip(lengths, ids.split(widths), strict=True)):
        tables[row, : len(own)] = own
        fresh = torch.randn(len(own), *shape[1:], device=device)
        fresh = (fresh * 100).clamp(-448, 448) if scales else fresh
        if length % block_size:
            fresh[-1, :, length % block_size :] = float("nan")
        # As bytes, because torch does not index float8.
        kv.view(torch.uint8)[own.to(device)] = fresh.to(kv.dtype).view(torch.uint8)
    news = torch.tensor([new for new, _ in chunks])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), news.cumsum(0)])
    q = torch.randn(int(starts[-1]), group * kv_heads, head_dim, device=device).to(dtype)
    return LargeBatch(
        q=q,
        kv=kv,
        block_tables=tables.to(device),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_starts=starts.to(device, torch.int32),
        chunks=chunks,
        options={"scale": head_dim**-0.5, **options},
    )


def nan_pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """All bits set, which is NaN in every float that a pool may have."""
    size = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.full(size, 255, dtype=torch.uint8, device=device).view(dtype)


def truth(batch: LargeBatch) -> Tensor:
    """In float64, one request and one kv head at a time; zeros where a row sees nothing."""
    scales = batch.options.get("kv_scales")
    block_size, kv_heads = batch.kv.shape[2:4]
    expected = torch.zeros(batch.q.shape, dtype=torch.float64, device=batch.q.device)
    for request, (new, before) in enumerate(batch.chunks):
        length, start = new + before, int(batch.query_starts[request])
        ids = batch.block_tables[request, : -(-length // block_size)].long()
        stored = batch.kv.view(torch.uint8)[ids].view(batch.kv.dtype).double()
        if scales is not None:
            stored *= (scales[ids] if scales.dim() == 4 else scales[:, None])[..., None].double()
        k, v = stored.transpose(0, 1).flatten(1, 2)[:, :length]
        rows = slice(start, start + new)
        positions = before + torch.arange(new, device=batch.q.device)
        for head in range(kv_heads if new and length else 0):
            q, out = (x[rows].chunk(kv_heads, 1)[head] for x in (batch.q, expected))
            out.copy_(_attend(q.double(), k[:, head], v[:, head], positions, batch.options))
    return expected


def _attend(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, options: dict[str, Any]) -> Tensor:
    """`[rows, heads, head_dim]` of one kv head."""
    window, cap = options.get("window"), options.get("softcap")
    scores = torch.einsum("rhd,kd->rhk", q, k) * options["scale"]
    if cap:
        scores = cap * (scores / cap).tanh()
    distance = positions[:, None] - torch.arange(len(k), device=q.device)
    hidden = (distance < 0) | (distance >= (window or len(k)))
    return scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1) @ v


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within a few roundings of a row's size: over thousands of tokens rows become small, and an
    error as large as one token's value must show."""
    size = expected.square().mean(-1, keepdim=True).sqrt() + expected.abs()
    allowed = 4 * torch.finfo(found.dtype).eps * size
    wrong = ~((found.double() - expected).abs() <= allowed)  # NaN is wrong
    assert not bool(wrong.any()), (
        f"{int(wrong.sum())} of {wrong.numel()} elements are off, the first at "
        f"{wrong.nonzero()[0].tolist()}"
    )
