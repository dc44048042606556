# SPDX-License-Identifier: Apache-2.0
"""Paged decode in plain torch, one request after the other.

The plain kernel computes on any device and for any head size, and in float64 for exact comparisons
with the Triton kernel. The plain kernel reads the lengths on the host, so on a GPU it waits for the
device."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_plain import gather_tokens


def paged_decode_plain(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    kv_scales: Tensor | None,
    out: Tensor,
) -> Tensor:
    """Write the result to `out`, and return `out`. `paged_decode` has checked the arguments."""
    block_size, kv_heads, head_dim = kv.shape[2:]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    for request, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            out[request] = 0
            continue
        first = 0 if window is None else max(0, length - window)
        skipped = first // block_size
        blocks = block_tables[request, skipped : -(-length // block_size)].long()
        seen = slice(first - skipped * block_size, length - skipped * block_size)
        k, v = (gather_tokens(kv, i, blocks, kv_scales, wide)[seen] for i in (0, 1))
        queries = q[request].to(wide).reshape(kv_heads, -1, head_dim)
        scores = torch.einsum("hgd,thd->hgt", queries, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        weighed = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v)
        out[request] = weighed.reshape(-1, head_dim)
    return out
