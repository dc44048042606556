# SPDX-License-Identifier: Apache-2.0
"""Batches for paged decode, and what must come out of them: a float64 loop over requests and heads.

The loop is written from the definition and shares nothing with the code it judges. Every pool is
poisoned: what no request may see is NaN, in its own blocks and in all others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stratakv.kernels.attention.attention_checks import FP8
from stratakv.kernels.attention.paged_decode import paged_decode

TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


@dataclass
class Case:
    """One call, and all that is needed to say what must come out of it."""

    q: Tensor
    kv: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    options: dict[str, Any]

    def run(self, kernel: str, function: Callable[..., Tensor] = paged_decode) -> Tensor:
        return function(
            self.q, self.kv, self.block_tables, self.seq_lens, kernel=kernel, **self.options
        )


def make_case(
    device: torch.device,
    lengths: list[int],
    *,
    group: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    pool_dtype: torch.dtype | None = None,
    scales: str = "",
    **options: Any,
) -> Case:
    """Blocks are drawn from the whole pool in any order, its first and its last among them; the
    second request begins with the first one's blocks, as far as both are whole."""
    width = max(1, *(-(-length // block_size) for length in lengths))
    num_blocks = len(lengths) * width
    ids = torch.randperm(num_blocks).view(len(lengths), width)
    if len(lengths) > 1:
        shared = min(lengths[:2]) // block_size
        ids[1, :shared] = ids[0, :shared]
    longest = ids[lengths.index(max(lengths))]
    for place, wanted in ((0, 0), (-1, num_blocks - 1)):
        old = int(longest[place])
        ids.copy_(torch.where(ids == old, wanted, torch.where(ids == wanted, old, ids)))
    shape = (num_blocks, 2, block_size, kv_heads, head_dim)
    pool = torch.full((num_blocks, 3, *shape[1:]), math.nan)  # the middle one of three layers
    pool[:, 1] = poison(torch.randn(shape), ids, lengths, options.get("window"))
    pool = pool.to(pool_dtype or dtype).to(device)
    if scales:
        sizes = (2, kv_heads) if scales == "head" else shape[:-1]
        # As small as scales of real activations are, which float16 alone would not survive.
        kv_scales = torch.rand(sizes) * 10.0 ** -torch.randint(1, 4, sizes)
        if scales == "token":
            kv_scales = poison(kv_scales, ids, lengths, options.get("window"))
        options["kv_scales"] = kv_scales.to(device)
    q = torch.randn(len(lengths), 3 * group * kv_heads, head_dim).to(dtype).to(device)
    options.setdefault("scale", head_dim**-0.5)
    return Case(
        q=q[:, group * kv_heads : 2 * group * kv_heads],  # as of a fused projection
        kv=pool[:, 1],
        block_tables=ids.to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        options=options,
    )


def poison(pool: Tensor, ids: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """`pool` `[num_blocks, 2, block_size, …]` with NaN wherever no request may look."""
    block_size = pool.shape[2]
    poisoned = torch.full_like(pool, math.nan)
    for row, length in enumerate(lengths):
        for token in range(max(0, length - (window or length)), length):
            place = (ids[row, token // block_size], slice(None), token % block_size)
            poisoned[place] = pool[place]
    return poisoned


def by_definition(case: Case) -> Tensor:
    """In float64, one request and one head at a time."""
    window, cap = case.options.get("window"), case.options.get("softcap")
    kv = case.kv.double()
    scales = case.options.get("kv_scales")
    if scales is not None:
        per_token = scales if scales.dim() == 4 else scales[None, :, None, :]
        kv = kv * per_token.double()[..., None]
    block_size, kv_heads = kv.shape[2], kv.shape[3]
    group = case.q.shape[1] // kv_heads
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for request, length in enumerate(case.seq_lens.tolist()):
        first = max(0, length - window) if window else 0
        places = [
            (int(case.block_tables[request, token // block_size]), token % block_size)
            for token in range(first, length)
        ]
        for head in range(case.q.shape[1] if places else 0):
            keys = torch.stack([kv[block, 0, slot, head // group] for block, slot in places])
            values = torch.stack([kv[block, 1, slot, head // group] for block, slot in places])
            scores = keys @ case.q[request, head].double() * case.options["scale"]
            if cap:
                scores = cap * (scores / cap).tanh()
            weights = (scores - scores.max()).exp()
            out[request, head] = (weights @ values / weights.sum()).cpu()
    return out


def assert_right(case: Case, out: Tensor) -> None:
    expected = by_definition(case)
    assert out.shape == case.q.shape and out.dtype == case.q.dtype
    assert not bool(expected.isnan().any())
    fp8 = case.kv.dtype == FP8
    # float8 pools are computed in float16, whatever the query's type is.
    tolerance = max(TOLERANCE[out.dtype], TOLERANCE[torch.float16] if fp8 else 0)
    size = float(expected.abs().max()) if fp8 else 1.0
    torch.testing.assert_close(
        out.cpu().double(), expected, rtol=tolerance, atol=tolerance * max(size, 1e-6)
    )
