# SPDX-License-Identifier: Apache-2.0
"""Attention of a model by the kernels of `kernels/`: write new K and V, then attend to the pool.

    rows of q, k, v   0 … num_decodes    one row for each request: paged decode
                      the rest           several rows for each request: paged prefill

Nothing here looks at what is in a tensor, so nothing waits for a device, and a plan over buffers
that stay can be recorded in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ....kernels.attention.paged_decode import paged_decode
from ....kernels.attention.paged_prefill import paged_prefill
from ....kernels.choice import AUTO
from ....kernels.write.write_kv import write_kv
from ....tiers.block import BlockLayout


@dataclass(frozen=True, slots=True)
class Decodes:
    """Requests with one new token each."""

    block_tables: Tensor  # int32 [requests, max_blocks]
    seq_lens: Tensor  # int32 [requests], the new token included; 0: nobody, zeros come out


@dataclass(frozen=True, slots=True)
class Chunks:
    """Requests with several new tokens."""

    block_tables: Tensor  # int32 [requests, max_blocks]
    seq_lens: Tensor  # int32 [requests], the new tokens included
    query_starts: Tensor  # int32 [requests + 1], from 0: rows behind those of the decodes
    max_query_len: int


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """One step, the same for every layer of a cache group with the same window."""

    slots: Tensor  # int64 [tokens]; -1: not written
    decodes: Decodes | None
    chunks: Chunks | None
    window: int | None = None  # positions that a token sees, its own among them; None: all


class KernelAttention:
    """Attention of one model over one pool."""

    def __init__(
        self,
        pool: Tensor,
        layout: BlockLayout,
        *,
        scale: float,
        kv_scales: Tensor | None = None,
        strict: bool = False,
        kernel: str = AUTO,
    ) -> None:
        """`pool` is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`; scores
        are multiplied by `scale`; `kv_scales` are those of a float8 pool. Under `strict` a kernel
        that cannot run is refused instead of replaced by its plain twin."""
        self._layers = [pool[:, layer] for layer in range(layout.num_layers)]
        self._scale = scale
        self._kv_scales = kv_scales
        self._strict, self._kernel = strict, kernel

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: KernelPlan) -> Tensor:
        """Attend `q` `[tokens, heads, head_dim]` after writing `k` and `v` `[tokens, kv heads,
        head_dim]` to the pool; `[tokens, heads * head_dim]`."""
        kv = self._layers[layer]
        write_kv(
            k, v, kv, plan.slots,
            kv_scales=self._kv_scales, kernel=self._kernel, strict=self._strict,
        )  # fmt: skip
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        first_chunk = 0
        if plan.decodes is not None:
            first_chunk = len(plan.decodes.seq_lens)
            self._decode(q[:first_chunk], kv, plan.decodes, plan.window, out[:first_chunk])
        if plan.chunks is not None:
            self._prefill(q[first_chunk:], kv, plan.chunks, plan.window, out[first_chunk:])
        return out.view(len(q), -1)

    def _decode(
        self, q: Tensor, kv: Tensor, decodes: Decodes, window: int | None, out: Tensor
    ) -> None:
        paged_decode(
            q,
            kv,
            decodes.block_tables,
            decodes.seq_lens,
            scale=self._scale,
            window=window,
            kv_scales=self._kv_scales,
            out=out,
            kernel=self._kernel,
            strict=self._strict,
        )

    def _prefill(
        self, q: Tensor, kv: Tensor, chunks: Chunks, window: int | None, out: Tensor
    ) -> None:
        paged_prefill(
            q,
            kv,
            chunks.block_tables,
            chunks.seq_lens,
            chunks.query_starts,
            max_query_len=chunks.max_query_len,
            scale=self._scale,
            window=window,
            kv_scales=self._kv_scales,
            out=out,
            kernel=self._kernel,
            strict=self._strict,
        )
