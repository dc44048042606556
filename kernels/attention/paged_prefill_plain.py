# SPDX-License-Identifier: Apache-2.0
"""Paged prefill in plain torch, one request after the other.

The plain kernel computes on any device and for any head size, and in float64 for exact comparisons
with the Triton kernel. The plain kernel reads the lengths on the host, so on a GPU it waits for the
device."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_plain import gather_tokens

MAX_SCORES = 1 << 24  # scores in memory at once; a long chunk is computed in pieces


def paged_prefill_plain(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write the result to `out`, and return `out`. `paged_prefill` has checked the arguments."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    starts = query_starts.tolist()
    for request, length in enumerate(seq_lens.tolist()):
        start, end = starts[request], starts[request + 1]
        context = length - (end - start)
        if start == end:
            continue
        # Blocks before the first window are not read: other requests may use these blocks.
        begin = 0 if window is None else max(0, context - window + 1)
        skipped = begin // kv.shape[2]
        blocks = block_tables[request, skipped : -(-length // kv.shape[2])].long()
        held = slice(begin - skipped * kv.shape[2], length - skipped * kv.shape[2])
        k, v = (gather_tokens(kv, plane, blocks, kv_scales, wide)[held] for plane in (0, 1))
        rows = max(1, MAX_SCORES // (q.shape[1] * max(1, length - begin)))
        for first in range(start, end, rows):
            last = min(first + rows, end)
            positions = torch.arange(first, last, device=q.device) - start + context - begin
            seen = _seen(positions, length - begin, window)
            out[first:last] = _attend(q[first:last].to(wide), k, v, seen, scale, softcap)
    return out


def _seen(positions: Tensor, length: int, window: int | None) -> Tensor:
    """Return which keys each position sees, as bool `[positions, length]`."""
    keys = torch.arange(length, device=positions.device)
    seen = keys <= positions[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    return seen


def _attend(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Return the attention `[rows, heads, head_dim]`; a row that sees no key is zeros."""
    rows, _, head_dim = q.shape
    grouped = q.reshape(rows, k.shape[1], -1, head_dim)
    scores = torch.einsum("rhgd,khd->hgrk", grouped, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    weights = weights.masked_fill(~seen, 0)  # softmax of a row of -inf is NaN
    return torch.einsum("hgrk,khd->rhgd", weights, v).reshape(q.shape)
