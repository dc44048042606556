# SPDX-License-Identifier: Apache-2.0
"""Attention on the CPU over gathered blocks of the KV pool.

An `AttentionPlan` is built once for a step, is used for every layer, and has these parts:

    fresh chunk     a prompt's first tokens: attend to the step's own K and V
    context chunk   tokens after cached ones: tiles of rows against the gathered K and V
    decode batch    one token for each of several requests of similar length: one padded call

Layers with a window gather only the blocks that the window reaches.

All chunks and decodes of a step share one gather for each layer if the gathered K and V take at
most `GATHER_BYTES`. A larger gather is split into pieces that stay in the processor's cache until
attention reads them; the split halved the time of a step with 64 requests of 1,000 tokens.

Old data in the slots after a request's last token never changes a result. Chunks end at the
request's last token. Decode batches set the slots after the last token to zero in the gathered
copy; a mask alone would let NaN through, since 0 * NaN is NaN. Block tables are padded with the
null block, which holds zeros."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ...tiers.block import BlockLayout

GATHER_BYTES = 8 * 1024**2  # K and V together; 2 to 16 MiB took equal time
TILE_ROWS = 256  # rows of one masked call; smaller tiles compute fewer masked scores


@dataclass(slots=True)
class FreshChunk:
    """The rows `start … end` of the step, which are the first tokens of a request."""

    start: int
    end: int
    tiles: list[Tile] | None = None  # tiles of the chunk; None: a row attends to all earlier rows


@dataclass(slots=True)
class Tile:
    """Rows `start … end` of the step, which belong to one request. The rows attend to `keys` tokens
    of the request, beginning with token `first` of its K and V."""

    start: int
    end: int
    first: int
    keys: int
    mask: Tensor | None  # [rows, keys] of 0 and -inf; None: no key is masked


@dataclass(slots=True)
class ContextChunk:
    """The rows of a request with cached tokens; its K and V begin at token `offset` of the gathered
    copy."""

    offset: int
    tiles: list[Tile]


@dataclass(slots=True)
class DecodeBatch:
    """Decoding requests, with a row for each. Their K and V are `[len(rows), keys]` tokens of the
    gathered copy, from token `offset` on."""

    offset: int
    keys: int
    rows: Tensor  # int64 [batch]: rows of the step
    mask: Tensor  # [batch, 1, 1, keys] of 0 and -inf


@dataclass(slots=True)
class GatherGroup:
    """The blocks that one gather copies, and the chunks and decodes that read them."""

    block_rows: Tensor  # int64 [2 * blocks]: rows of layer 0, of K, then of V
    stale: Tensor | None  # int64: gathered tokens outside their request's length or window
    chunks: list[ContextChunk] = field(default_factory=list)
    decodes: list[DecodeBatch] = field(default_factory=list)


@dataclass(slots=True)
class AttentionPlan:
    """The attention plan of a step, for all layers of a cache group that have the same window."""

    blocks: Tensor  # int64 [written]: blocks of the new K and V
    offsets: Tensor  # int64 [written]: slots within `blocks`
    written: Tensor | None  # int64 [written]: rows whose K and V are written; None: all
    fresh: list[FreshChunk]
    groups: list[GatherGroup]


class PagedAttention:
    """The attention of one model over one KV pool, with a buffer for gathered K and V.

    The buffer is allocated once: page faults of fresh memory would take longer than the copy."""

    def __init__(
        self,
        pool: Tensor,
        layout: BlockLayout,
        num_heads: int,
        max_group_blocks: int,
        scale: float,
        softcap: float | None = None,
    ) -> None:
        """`pool` is `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, contiguous.
        `max_group_blocks` is the largest number of blocks in one `GatherGroup`. Scores are
        multiplied by `scale`; with a `softcap`, a score s then becomes `softcap * tanh(s /
        softcap)`."""
        self._layers = [(pool[:, i, 0], pool[:, i, 1]) for i in range(layout.num_layers)]
        row = layout.block_size * layout.num_kv_heads * layout.head_dim
        self._block_rows = pool.view(-1, row)
        self._gathered = torch.zeros((2 * max_group_blocks, row), dtype=pool.dtype)
        self._kv_heads, self._head_dim = layout.num_kv_heads, layout.head_dim
        self._num_heads = num_heads
        self._scale, self._softcap = scale, softcap

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan) -> Tensor:
        """Write `k` and `v` `[tokens, kv heads, head_dim]` to the pool, then compute attention for
        `q` `[tokens, heads, head_dim]`. Return the result `[tokens, heads * head_dim]`."""
        self._write_pool(k, v, layer, plan)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for chunk in plan.fresh:
            if chunk.tiles is not None:
                self._run_tiles(q, k, v, chunk.start, chunk.tiles, out)
                continue
            rows = slice(chunk.start, chunk.end)
            out[rows] = self._attend(q[rows], k[rows], v[rows], None, is_causal=True)
        for group in plan.groups:
            keys, values = self._gather(layer, group)
            for context in group.chunks:
                self._run_tiles(q, keys, values, context.offset, context.tiles, out)
            for batch in group.decodes:
                out[batch.rows] = self._attend_decode(q[batch.rows], keys, values, batch)
        return out.view(len(q), -1)

    def _write_pool(self, k: Tensor, v: Tensor, layer: int, plan: AttentionPlan) -> None:
        if plan.written is not None:
            k, v = k[plan.written], v[plan.written]
        keys, values = self._layers[layer]
        place = (plan.blocks, plan.offsets)
        keys.index_put_(place, k)
        values.index_put_(place, v)

    def _gather(self, layer: int, group: GatherGroup) -> tuple[Tensor, Tensor]:
        """Gather K and V of the group's blocks, each `[tokens, kv heads, head_dim]`."""
        rows = group.block_rows + 2 * layer if layer else group.block_rows
        target = self._gathered[: len(rows)]
        torch.index_select(self._block_rows, 0, rows, out=target)
        both = target.view(2, -1, self._kv_heads, self._head_dim)
        if group.stale is not None:
            both.index_fill_(1, group.stale, 0)
        return both[0], both[1]

    def _run_tiles(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        offset: int,
        tiles: list[Tile],
        out: Tensor,
    ) -> None:
        """Compute attention for the tiles of a request whose K and V begin at token `offset`."""
        for tile in tiles:
            rows = slice(tile.start, tile.end)
            seen = slice(offset + tile.first, offset + tile.first + tile.keys)
            out[rows] = self._attend(q[rows], keys[seen], values[seen], tile.mask)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        """Compute attention for one request: `k` and `v` are `[tokens, kv heads, head_dim]`."""
        attended = self._product(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            mask,
            is_causal=is_causal,
        )
        return attended[0].transpose(0, 1)

    def _attend_decode(self, q: Tensor, keys: Tensor, values: Tensor, batch: DecodeBatch) -> Tensor:
        """Compute attention for one token of each request. The query heads that share a K head are
        passed as rows of one head, so K and V are read once for all these query heads."""
        count = len(q)
        span = slice(batch.offset, batch.offset + count * batch.keys)
        shape = (count, batch.keys, self._kv_heads, self._head_dim)
        attended = self._product(
            q.view(count, self._kv_heads, -1, self._head_dim),
            keys[span].view(shape).transpose(1, 2),
            values[span].view(shape).transpose(1, 2),
            batch.mask,
        )
        return attended.reshape(count, self._num_heads, self._head_dim)

    def _product(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Compute attention, and return `[requests, heads, rows, head_dim]`. Several heads of `q`
        may share a K head."""
        is_grouped = q.shape[1] != k.shape[1]
        if self._softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=is_causal, scale=self._scale, enable_gqa=is_grouped
            )
        groups = q.view(len(q), k.shape[1], -1, *q.shape[2:])
        scores = groups @ k.transpose(-1, -2)[:, :, None] * (self._scale / self._softcap)
        scores = scores.tanh_() * self._softcap
        if is_causal:
            rows, keys = scores.shape[-2:]
            scores.masked_fill_(torch.ones(rows, keys, dtype=torch.bool).triu_(1), -torch.inf)
        elif mask is not None:
            scores += mask.unsqueeze(-3) if mask.dim() > 2 else mask
        weights = scores.softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        return (weights @ v[:, :, None]).view(q.shape)
