# SPDX-License-Identifier: Apache-2.0
"""Plans the attention of one step from the scheduled rows; all layers share the plan.

The planning takes a few numpy calls for the whole batch, and a Python loop over chunks and buckets,
but not over tokens.

    count > 1, nothing computed     fresh chunk
    count > 1, something computed   context chunk
    count = 1                       decode: sorted by length into buckets whose shortest request has
                                    at least half the blocks of the longest, so that padding never
                                    doubles the work

With a sliding window, only the part of the context that the window reaches is read. The read part
of the context begins in the first block that the window reaches, and lengths are counted from the
beginning of this block.

    blocks of the table   | before, not read | b | b | b | b |
    tokens                                   |   | window  |n|    n: computed in this step"""

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

SMALL_BUCKET_BLOCKS = 8  # below this, a separate bucket costs more than padding


@dataclass(slots=True)
class _Chunk:
    """A context chunk that is not yet part of a `GatherGroup`."""

    blocks: npt.NDArray[np.int32]
    start: int  # row of the step
    computed: int  # earlier tokens in these blocks
    count: int


@dataclass(slots=True)
class _Bucket:
    """Several decodes, padded to the same number of blocks."""

    blocks: npt.NDArray[np.int32]  # [batch, width]
    starts: IntArray  # [batch] rows of the step
    lengths: IntArray  # [batch] tokens in these blocks, including the new one


class AttentionPlanner:
    """Plans attention for the layers that have the same window, over one KV pool."""

    def __init__(
        self,
        layout: BlockLayout,
        dtype: torch.dtype,
        max_model_len: int,
        window: int | None = None,
    ) -> None:
        """`window` is the number of positions that a token sees, including its own (None: all)."""
        self._block_size = layout.block_size
        self._rows_per_block = 2 * layout.num_layers
        self._dtype = dtype
        # A window as long as the context has no effect.
        self._window = window if window is not None and window < max_model_len else None
        self._masks = _CausalMasks(dtype, max_model_len, self._window)
        fits = GATHER_BYTES * layout.num_layers // layout.page_bytes
        # A request is never split, so the longest one must fit.
        self.max_group_blocks = max(fits, -(-max_model_len // layout.block_size), 1)

    def plan_attention(
        self,
        table: BlockTable,
        rows: IntArray,
        computed: IntArray,
        counts: IntArray,
        slots: IntArray,
    ) -> AttentionPlan:
        """Plan a step in which each of `rows` of the batch has `computed` tokens already and
        computes `counts` tokens. The tokens of the step and the `slots` of their K and V are in the
        order of `rows`."""
        ends = np.cumsum(counts)
        starts = ends - counts
        single = counts == 1
        fresh = [
            self._fresh(int(starts[i]), int(ends[i]))
            for i in np.flatnonzero(~single & (computed == 0))
        ]
        work: list[_Chunk | _Bucket] = []
        for i in np.flatnonzero(~single & (computed > 0)):
            before, count = int(computed[i]), int(counts[i])
            work.append(self._chunk(table, int(rows[i]), int(starts[i]), before, count))
        decodes = np.flatnonzero(single)
        if len(decodes):
            lengths = computed[decodes] + 1
            work += self._buckets(table, rows[decodes], starts[decodes], lengths)
        return AttentionPlan(*self._places(slots), fresh, self._groups(work))

    def _fresh(self, start: int, end: int) -> FreshChunk:
        if self._window is None or end - start <= self._window:
            return FreshChunk(start, end)
        return FreshChunk(start, end, self._tiles(start, 0, end - start))

    def _chunk(self, table: BlockTable, row: int, start: int, computed: int, count: int) -> _Chunk:
        size = self._block_size
        first = 0 if self._window is None else max(0, computed - self._window + 1) // size
        blocks = table.array[row, first : -(-(computed + count) // size)]
        return _Chunk(blocks, start, computed - first * size, count)

    def _places(self, slots: IntArray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the block and the offset of each slot, without slots of -1. If there are such
        slots, the third value has the indices of the other slots; else it is None."""
        written = None
        if len(slots) and slots.min() < 0:
            kept = np.flatnonzero(slots >= 0)
            slots, written = slots[kept], torch.from_numpy(kept)
        blocks, offsets = np.divmod(slots, self._block_size)
        return torch.from_numpy(blocks), torch.from_numpy(offsets), written

    def _buckets(
        self, table: BlockTable, rows: IntArray, starts: IntArray, lengths: IntArray
    ) -> list[_Chunk | _Bucket]:
        size = self._block_size
        firsts = None
        if self._window is not None:
            firsts = np.maximum(lengths - self._window, 0) // size
            lengths = lengths - firsts * size
        counts = -(-lengths // size)
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
            if len(members) == 1:  # a single request needs neither padding nor a mask
                i = members[0]
                at = 0 if firsts is None else int(firsts[i])
                blocks = table.array[rows[i], at : at + width]
                work.append(_Chunk(blocks, int(starts[i]), int(lengths[i]) - 1, 1))
                continue
            places = np.arange(width)
            used = places < counts[members, None]
            if firsts is None:
                held = table.array[rows[members], :width]
            else:
                places = np.where(used, places + firsts[members, None], 0)
                held = table.array[rows[members, None], places]
            ids = np.where(used, held, 0)
            work.append(_Bucket(ids, starts[members], lengths[members]))
        return work

    def _groups(self, work: list[_Chunk | _Bucket]) -> list[GatherGroup]:
        """Divide the chunks and buckets into as few gathers as the buffer's size allows."""
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
                tiles = self._tiles(item.start, item.computed, item.count)
                group.chunks.append(ContextChunk(offset, tiles))
            else:
                keys = item.blocks.shape[1] * self._block_size
                group.decodes.append(self._make_decode_batch(item, offset, keys))
                stale += self._stale(item, offset, keys)
            offset += item.blocks.size * self._block_size
        beyond = np.concatenate(stale) if stale else np.empty(0, np.int64)
        if len(beyond):
            group.stale = torch.from_numpy(beyond)
        return group

    def _tiles(self, start: int, computed: int, count: int) -> list[Tile]:
        """Return the tiles of the `count` rows that begin at row `start`; the request has
        `computed` tokens before them."""
        tiles = []
        for done in range(0, count, TILE_ROWS):
            rows = min(TILE_ROWS, count - done)
            context = computed + done
            first = 0 if self._window is None else max(0, context - self._window + 1)
            mask = self._masks.tile(rows, context - first) if rows > 1 else None
            at = start + done
            tiles.append(Tile(at, at + rows, first, context + rows - first, mask))
        return tiles

    def _make_decode_batch(self, bucket: _Bucket, offset: int, keys: int) -> DecodeBatch:
        lengths = torch.from_numpy(bucket.lengths)[:, None]
        places = torch.arange(keys)
        mask = torch.zeros((len(bucket.lengths), keys), dtype=self._dtype)
        mask.masked_fill_(places >= lengths, float("-inf"))
        if self._window is not None:
            mask.masked_fill_(places < lengths - self._window, float("-inf"))
        return DecodeBatch(offset, keys, torch.from_numpy(bucket.starts), mask[:, None, None])

    def _stale(self, bucket: _Bucket, offset: int, keys: int) -> list[IntArray]:
        """Return the gathered tokens to ignore: those between a request's last token and the end of
        its last block, and those before its window. The null blocks that pad the request are not
        included."""
        rows = offset + np.arange(len(bucket.lengths)) * keys
        stale = [ranges(rows + bucket.lengths, -bucket.lengths % self._block_size)]
        if self._window is not None:
            stale.append(ranges(rows, np.maximum(bucket.lengths - self._window, 0)))
        return stale


class _CausalMasks:
    """Attention masks for the rows of a tile, for any number of tokens before the tile. All masks
    are views of one tensor.

    The tensor has `_width` columns for the tokens before the tile, then the columns of the tile.
    Row i is 0 up to and including column `_width + i`, and -inf after it. The mask for `context`
    tokens before the tile begins at column `_width - context`. With a window of w tokens, only the
    last w of these zeros stay 0, and the columns before them are -inf; `context` is then always
    less than the window."""

    def __init__(self, dtype: torch.dtype, max_context: int, window: int | None) -> None:
        self._dtype, self._window = dtype, window
        self._max_context = max_context if window is None else window - 1
        self._width = 0
        self._mask = self._make(0)

    def tile(self, rows: int, context: int) -> torch.Tensor:
        """Return the mask `[rows, context + rows]`; `rows` is at most TILE_ROWS."""
        if context > self._width:
            # Twice the needed width, so that a growing request does not rebuild it at every step.
            self._width = max(context, min(2 * context, self._max_context))
            self._mask = self._make(self._width)
        return self._mask[:rows, self._width - context : self._width + rows]

    def _make(self, width: int) -> torch.Tensor:
        mask = torch.zeros((TILE_ROWS, width + TILE_ROWS), dtype=self._dtype)
        later = torch.ones((TILE_ROWS, TILE_ROWS), dtype=torch.bool).triu(1)
        mask[:, width:].masked_fill_(later, float("-inf"))
        if self._window is not None:
            before = torch.ones_like(mask, dtype=torch.bool).tril(width - self._window)
            mask.masked_fill_(before, float("-inf"))
        return mask


def ranges(begins: IntArray, counts: IntArray) -> IntArray:
    """Return the concatenation of the ranges `begins[i] … begins[i] + counts[i] - 1`."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    shifts: IntArray = np.repeat(begins - (ends - counts), counts)
    return np.arange(total, dtype=np.int64) + shifts
