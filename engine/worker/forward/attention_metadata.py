# SPDX-License-Identifier: Apache-2.0
"""Lays down the attention of one step, once for all layers, from the rows that are scheduled.

Work here is a few numpy calls for the whole batch, and Python by chunk and by bucket, never by
token.

    count > 1, nothing computed     fresh chunk
    count > 1, something computed   context chunk
    count = 1                       decode: sorted by length into buckets whose shortest request has
                                    at least half the blocks of the longest, so that padding never
                                    doubles the work
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ....tiers.block import BlockLayout
from ...batch.batch_update import IntArray
from ...models.attention import (
    GATHER_BYTES,
    TILE_ROWS,
    AttentionPlan,
    ContextChunk,
    DecodeBatch,
    FreshChunk,
    GatherGroup,
    Tile,
)
from ..block_table import BlockTable

SMALL_BUCKET_BLOCKS = 8  # below it a bucket of its own costs more than the padding


@dataclass(slots=True)
class _Chunk:
    """A context chunk that waits for its place in a group."""

    blocks: npt.NDArray[np.int32]
    start: int  # row of the step
    computed: int
    count: int


@dataclass(slots=True)
class _Bucket:
    """Decodes that are padded to the same number of blocks."""

    blocks: npt.NDArray[np.int32]  # [batch, width]
    starts: IntArray  # [batch] rows of the step
    lengths: IntArray  # [batch] tokens, the new one included


class AttentionPlanner:
    """Makes the plans for one pool and one block table."""

    def __init__(self, layout: BlockLayout, dtype: torch.dtype, max_model_len: int) -> None:
        self._block_size = layout.block_size
        self._rows_per_block = 2 * layout.num_layers
        self._dtype = dtype
        self._masks = _CausalMasks(dtype, max_model_len)
        fits = GATHER_BYTES * layout.num_layers // layout.page_bytes
        # One request is never cut, so the longest one must fit.
        self.max_group_blocks = max(fits, -(-max_model_len // layout.block_size), 1)

    def plan(
        self,
        table: BlockTable,
        rows: IntArray,
        computed: IntArray,
        counts: IntArray,
        slots: IntArray,
    ) -> AttentionPlan:
        """`rows` of the batch compute `counts` tokens each after `computed` ones; the step's tokens
        lie in that order, and `slots` (one for each token) is where their K and V go."""
        ends = np.cumsum(counts)
        starts = ends - counts
        single = counts == 1
        fresh = [
            FreshChunk(int(starts[i]), int(ends[i]))
            for i in np.flatnonzero(~single & (computed == 0))
        ]
        work: list[_Chunk | _Bucket] = []
        for i in np.flatnonzero(~single & (computed > 0)):
            length = int(computed[i] + counts[i])
            blocks = table.array[rows[i], : -(-length // self._block_size)]
            work.append(_Chunk(blocks, int(starts[i]), int(computed[i]), int(counts[i])))
        decodes = np.flatnonzero(single)
        if len(decodes):
            lengths = computed[decodes] + 1
            work += self._buckets(table, rows[decodes], starts[decodes], lengths)
        return AttentionPlan(*self._places(slots), fresh, self._groups(work))

    def _places(self, slots: IntArray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Block and offset of each slot; slots of -1 are left out."""
        written = None
        if len(slots) and slots.min() < 0:
            kept = np.flatnonzero(slots >= 0)
            slots, written = slots[kept], torch.from_numpy(kept)
        blocks, offsets = np.divmod(slots, self._block_size)
        return torch.from_numpy(blocks), torch.from_numpy(offsets), written

    def _buckets(
        self, table: BlockTable, rows: IntArray, starts: IntArray, lengths: IntArray
    ) -> list[_Chunk | _Bucket]:
        counts = -(-lengths // self._block_size)
        order = np.argsort(-counts, kind="stable")
        sizes = counts[order]  # descending
        work: list[_Chunk | _Bucket] = []
        first = 0
        while first < len(order):
            width = int(sizes[first])
            shortest = (width + 1) // 2 if width > SMALL_BUCKET_BLOCKS else 1
            end = int(np.searchsorted(-sizes, -shortest, side="right"))
            end = min(end, first + max(1, self.max_group_blocks // width))
            members = order[first:end]
            first = end
            if len(members) == 1:  # alone there is nothing to pad, so no mask either
                i = members[0]
                blocks = table.array[rows[i], :width]
                work.append(_Chunk(blocks, int(starts[i]), int(lengths[i]) - 1, 1))
                continue
            used = np.arange(width) < counts[members, None]
            ids = np.where(used, table.array[rows[members], :width], 0)
            work.append(_Bucket(ids, starts[members], lengths[members]))
        return work

    def _groups(self, work: list[_Chunk | _Bucket]) -> list[GatherGroup]:
        """Pack the work into as few gathers as their buffer allows."""
        groups: list[GatherGroup] = []
        pending: list[_Chunk | _Bucket] = []
        size = 0
        for item in work:
            if pending and size + item.blocks.size > self.max_group_blocks:
                groups.append(self._group(pending))
                pending, size = [], 0
            pending.append(item)
            size += item.blocks.size
        if pending:
            groups.append(self._group(pending))
        return groups

    def _group(self, work: list[_Chunk | _Bucket]) -> GatherGroup:
        first = np.concatenate([item.blocks.reshape(-1) for item in work]).astype(np.int64)
        first *= self._rows_per_block
        group = GatherGroup(torch.from_numpy(np.concatenate([first, first + 1])), None)
        stale: list[IntArray] = []
        offset = 0
        for item in work:
            if isinstance(item, _Chunk):
                group.chunks.append(ContextChunk(offset, self._tiles(item)))
            else:
                keys = item.blocks.shape[1] * self._block_size
                group.decodes.append(self._decode(item, offset, keys))
                stale.append(self._stale(item, offset, keys))
            offset += item.blocks.size * self._block_size
        beyond = np.concatenate(stale) if stale else np.empty(0, np.int64)
        if len(beyond):
            group.stale = torch.from_numpy(beyond)
        return group

    def _tiles(self, chunk: _Chunk) -> list[Tile]:
        tiles = []
        for done in range(0, chunk.count, TILE_ROWS):
            rows = min(TILE_ROWS, chunk.count - done)
            context = chunk.computed + done
            mask = self._masks.tile(rows, context) if rows > 1 else None
            start = chunk.start + done
            tiles.append(Tile(start, start + rows, context + rows, mask))
        return tiles

    def _decode(self, bucket: _Bucket, offset: int, keys: int) -> DecodeBatch:
        lengths = torch.from_numpy(bucket.lengths)[:, None]
        mask = torch.zeros((len(bucket.lengths), keys), dtype=self._dtype)
        mask.masked_fill_(torch.arange(keys) >= lengths, float("-inf"))
        return DecodeBatch(offset, keys, torch.from_numpy(bucket.starts), mask[:, None, None])

    def _stale(self, bucket: _Bucket, offset: int, keys: int) -> IntArray:
        """Gathered tokens between a request's length and the end of its last block. What follows is
        the null block."""
        counts = -bucket.lengths % self._block_size
        begins = offset + np.arange(len(counts)) * keys + bucket.lengths
        return ranges(begins, counts)


class _CausalMasks:
    """Masks for the rows of a tile after any context, all views of one tensor.

    Its row i is 0 up to and with column `width + i` and -inf behind, so that the view of the
    columns from `width - context` on is the mask after `context` tokens.
    """

    def __init__(self, dtype: torch.dtype, max_context: int) -> None:
        self._dtype = dtype
        self._max_context = max_context
        self._width = 0
        self._mask = self._make(0)

    def tile(self, rows: int, context: int) -> torch.Tensor:
        """`[rows, context + rows]`; at most TILE_ROWS rows."""
        if context > self._width:
            # Twice what is asked for, so that a growing request does not rebuild it at every step.
            self._width = max(context, min(2 * context, self._max_context))
            self._mask = self._make(self._width)
        return self._mask[:rows, self._width - context : self._width + rows]

    def _make(self, width: int) -> torch.Tensor:
        mask = torch.zeros((TILE_ROWS, width + TILE_ROWS), dtype=self._dtype)
        later = torch.ones((TILE_ROWS, TILE_ROWS), dtype=torch.bool).triu(1)
        mask[:, width:].masked_fill_(later, float("-inf"))
        return mask


def ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """The concatenation of `begins[i] … begins[i] + counts[i] - 1`."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    shifts: IntArray = np.repeat(begins - (ends - counts), counts)
    return np.arange(total, dtype=np.int64) + shifts
