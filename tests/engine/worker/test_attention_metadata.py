# SPDX-License-Identifier: Apache-2.0
"""Plans of attention: masks, buckets, padding, slots that are not ours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stratakv.engine.models.attention import TILE_ROWS, AttentionPlan, Tile
from stratakv.engine.worker.block_table import BlockTable
from stratakv.engine.worker.forward import attention_metadata
from stratakv.engine.worker.forward.attention_metadata import (
    SMALL_BUCKET_BLOCKS,
    AttentionPlanner,
    ranges,
)
from stratakv.tiers.block import BlockLayout

LAYOUT = BlockLayout(num_layers=2, block_size=4, num_kv_heads=1, head_dim=8, kv_dtype="float64")
MAX_LEN = 2000


def plan(
    computed: list[int], counts: list[int], max_group_blocks: int | None = None
) -> AttentionPlan:
    table = BlockTable(len(computed), MAX_LEN // 4, 4)
    block = 1
    for row, (before, count) in enumerate(zip(computed, counts, strict=True)):
        needed = -(-(before + count) // 4)
        table.add_row(list(range(block, block + needed)), row)
        block += needed
    planner = AttentionPlanner(LAYOUT, torch.float64, MAX_LEN)
    if max_group_blocks is not None:
        planner.max_group_blocks = max_group_blocks
    rows, before_, counts_ = np.arange(len(computed)), np.array(computed), np.array(counts)
    slots = table.slot_mapping(np.repeat(rows, counts_), ranges(before_, counts_))
    return planner.plan_attention(table, rows, before_, counts_, slots)


def test_ranges():
    assert ranges(np.array([5, 0, 9]), np.array([2, 0, 3])).tolist() == [5, 6, 9, 10, 11]
    assert ranges(np.empty(0, np.int64), np.empty(0, np.int64)).tolist() == []


def test_each_kind_of_work_finds_its_place():
    made = plan(computed=[0, 6, 9, 3, 0], counts=[3, 5, 1, 1, 2])
    assert [(f.start, f.end) for f in made.fresh] == [(0, 3), (10, 12)]
    assert len(made.groups) == 1
    [chunk], [decode] = made.groups[0].chunks, made.groups[0].decodes
    [tile] = chunk.tiles
    assert (tile.start, tile.end, tile.keys) == (3, 8, 11)
    # 3 blocks of the chunk come first, then two rows of 3 blocks, the second padded by two.
    assert (chunk.offset, decode.offset, decode.keys) == (0, 12, 12)
    assert decode.rows.tolist() == [8, 9]
    blocks = (made.groups[0].block_rows[:9] // 4).tolist()
    assert blocks == [2, 3, 4, 5, 6, 7, 8, 0, 0]
    # Positions 10 and 11 of the first decode; the second ends with its block, and what follows is
    # the null block.
    assert made.groups[0].stale is not None
    assert made.groups[0].stale.tolist() == [12 + 10, 12 + 11]
    seen = (decode.mask[:, 0, 0] == 0).sum(dim=1)
    assert seen.tolist() == [10, 4]


def test_a_decode_alone_needs_no_mask():
    made = plan(computed=[9], counts=[1])
    [chunk] = made.groups[0].chunks
    assert [(t.keys, t.mask) for t in chunk.tiles] == [(10, None)]
    assert made.groups[0].stale is None


@pytest.mark.parametrize(("computed", "count"), [(1, 2), (7, TILE_ROWS), (300, 2 * TILE_ROWS + 30)])
def test_tiles_see_exactly_the_tokens_before_them(computed, count):
    [chunk] = plan([computed], [count]).groups[0].chunks
    rows = [(t.start, t.end) for t in chunk.tiles]
    assert rows[0][0] == 0 and rows[-1][1] == count
    assert all(a[1] == b[0] for a, b in itertools.pairwise(rows))
    for tile in chunk.tiles:
        assert tile.mask is not None and tile.mask.shape == (tile.end - tile.start, tile.keys)
        position = computed + torch.arange(tile.start, tile.end)[:, None]
        assert torch.equal(tile.mask == 0, torch.arange(tile.keys) <= position)
        assert (tile.mask[tile.mask != 0] == -torch.inf).all()


@given(st.lists(st.integers(1, MAX_LEN - 1), min_size=1, max_size=30), st.integers(500, 3000))
def test_padding_stays_below_the_work(lengths, room):
    made = plan(lengths, [1] * len(lengths), max_group_blocks=room)
    served = 0
    for group in made.groups:
        blocks = len(group.block_rows) // 2
        assert blocks <= room
        work = [c.tiles[0].keys // -4 * -1 for c in group.chunks]
        for decode in group.decodes:
            width = decode.keys // 4
            for row in decode.rows.tolist():
                used = -(-(lengths[row] + 1) // 4)
                assert used * 2 >= width or width <= SMALL_BUCKET_BLOCKS
                work.append(width)
        served += len(work)
        assert sum(work) == blocks
    assert served == len(lengths)


def test_slots_of_other_ranks_are_not_written():
    planner = AttentionPlanner(LAYOUT, torch.float64, MAX_LEN)
    table = BlockTable(1, 8, 4)
    table.add_row([3, 4], 0)
    slots = np.array([12, -1, 13, -1, -1, 18])
    made = planner.plan_attention(table, np.array([0]), np.array([0]), np.array([6]), slots)
    assert made.written is not None and made.written.tolist() == [0, 2, 5]
    assert made.blocks.tolist() == [3, 3, 4]
    assert made.offsets.tolist() == [0, 1, 2]


def seen_places(made: AttentionPlan, num_rows: int) -> list[set[int]]:
    """For each row of a step the slots that it sees, and rows of the step as -1, -2, ..."""
    seen: list[set[int]] = [set() for _ in range(num_rows)]

    def add(row: int, places: list[int], mask: torch.Tensor | None) -> None:
        assert not seen[row], "each row is computed once"
        kept = torch.ones(len(places)) if mask is None else mask.exp()
        seen[row] = {place for place, is_kept in zip(places, kept.tolist(), strict=True) if is_kept}

    def add_tiles(tiles: list[Tile], places: list[int]) -> None:
        for tile in tiles:
            keys = places[tile.first : tile.first + tile.keys]
            for i in range(tile.end - tile.start):
                add(tile.start + i, keys, None if tile.mask is None else tile.mask[i])

    for fresh in made.fresh:
        own = [-1 - row for row in range(fresh.start, fresh.end)]
        if fresh.tiles is None:
            for i in range(len(own)):
                add(fresh.start + i, own[: i + 1], None)
        else:
            add_tiles(fresh.tiles, own)
    for group in made.groups:
        blocks = group.block_rows[: len(group.block_rows) // 2] // (2 * LAYOUT.num_layers)
        slots = (blocks[:, None] * 4 + torch.arange(4)).reshape(-1)
        if group.stale is not None:
            slots[group.stale] = -(10**6)  # zeroed: nobody may see them
        for chunk in group.chunks:
            add_tiles(chunk.tiles, slots[chunk.offset :].tolist())
        for batch in group.decodes:
            for i, row in enumerate(batch.rows.tolist()):
                begin = batch.offset + i * batch.keys
                add(row, slots[begin : begin + batch.keys].tolist(), batch.mask[i, 0, 0])
    return seen


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 70), st.sampled_from([1, 1, 2, 9, 30])), max_size=6),
    st.one_of(st.none(), st.integers(2, 40)),
    st.sampled_from([1, 8, 1000]),
)
def test_rows_see_their_window_and_nothing_else(
    work: list[tuple[int, int]], window: int | None, room: int
) -> None:
    work = [(3, 2), *work]
    table, places = BlockTable(len(work), 30, 4), []
    block = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_metadata, "TILE_ROWS", 8)
        planner = AttentionPlanner(LAYOUT, torch.float64, MAX_LEN, window)
        planner.max_group_blocks = max(planner.max_group_blocks * (room > 8), room, 30)
        for row, (before, count) in enumerate(work):
            needed = -(-(before + count) // 4)
            gone = 0 if window is None else max(0, before - window + 1) // 4
            table.add_row([0] * gone + list(range(block + gone, block + needed)), row)
            places.append(range(4 * block, 4 * (block + needed)))
            block += needed
        computed, counts = (np.array(column) for column in zip(*work, strict=True))
        rows = np.arange(len(work))
        slots = table.slot_mapping(np.repeat(rows, counts), ranges(computed, counts))
        made = planner.plan_attention(table, rows, computed, counts, slots)
    seen = iter(seen_places(made, int(counts.sum())))
    start = 0
    for row, (before, count) in enumerate(work):
        for position in range(before, before + count):
            first = 0 if window is None else max(0, position - window + 1)
            wanted = set(places[row][first : position + 1])
            if before == 0 and count > 1:  # its own rows
                wanted = {-1 - start - i for i in range(first, position + 1)}
            assert next(seen) == wanted
        start += count
