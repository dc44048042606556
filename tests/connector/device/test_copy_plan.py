# SPDX-License-Identifier: Apache-2.0
"""Jobs as copies: what is merged, what is cut, which way is taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratakv.connector.device.base import Stream
from stratakv.connector.device.copy_plan import (
    Geometry,
    Way,
    check_pairs,
    choose_locked,
    choose_pageable,
    cut,
    make_batch,
    make_pairs,
    split_locked,
)
from stratakv.kernels.copy.copy_engine import Batch
from stratakv.tiers.errors import InvalidBlock

POOL, SLAB = 1 << 40, 1 << 45
PAGE = 4096
Copies = list[tuple[int, int, int]]


def geometry(*, slot_bytes: int = PAGE, piece_slots: int = 100) -> Geometry:
    return Geometry(POOL, 50, SLAB, 60, PAGE, slot_bytes, piece_slots)


def copies(
    where: Geometry, stream: Stream, block_ids: list[int], slots: list[int]
) -> list[tuple[int, int, int]]:
    """Blocks, slots and lengths of the copies; bytes that lie elsewhere fail."""
    batch = make_batch(where, stream, make_pairs(block_ids, slots))
    ends = (batch.sources, batch.targets) if stream is Stream.STORE else (
        batch.targets, batch.sources
    )  # fmt: skip
    assert not ((ends[0] - POOL) % PAGE).any() and not ((ends[1] - SLAB) % where.slot_bytes).any()
    blocks, places = (ends[0] - POOL) // PAGE, (ends[1] - SLAB) // where.slot_bytes
    table = (blocks.tolist(), places.tolist(), (batch.sizes // PAGE).tolist())
    return list(zip(*table, strict=True))


@pytest.mark.parametrize("stream", list(Stream))
@pytest.mark.parametrize(
    ("block_ids", "slots", "expected"),
    [
        ([], [], []),
        ([7], [3], [(7, 3, 1)]),
        ([4, 5, 6, 9], [0, 1, 2, 3], [(4, 0, 3), (9, 3, 1)]),
        ([6, 5, 4], [2, 1, 0], [(4, 0, 3)]),  # in the order in which a pool evicts
        ([4, 5, 6], [2, 1, 0], [(4, 2, 1), (5, 1, 1), (6, 0, 1)]),
        ([8, 2, 9, 3], [40, 10, 41, 11], [(2, 10, 2), (8, 40, 2)]),
        ([1, 2, 4], [5, 6, 7], [(1, 5, 2), (4, 7, 1)]),
    ],
)
def test_neighbours_are_one_copy(
    stream: Stream, block_ids: list[int], slots: list[int], expected: Copies
) -> None:
    assert copies(geometry(), stream, block_ids, slots) == expected


def test_no_copy_reaches_into_two_locked_pieces() -> None:
    where = geometry(piece_slots=4)
    got = copies(where, Stream.STORE, list(range(10)), list(range(2, 12)))
    assert got == [(0, 2, 2), (2, 4, 4), (6, 8, 4)]


def test_slots_with_a_gap_behind_the_page_are_never_joined() -> None:
    where = geometry(slot_bytes=2 * PAGE)
    assert copies(where, Stream.LOAD, [1, 2], [3, 4]) == [(1, 3, 1), (2, 4, 1)]


@given(st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 5), st.booleans())
def test_copies_say_the_same_as_the_pairs(
    block_ids: list[int], slots: list[int], piece_slots: int, has_gap: bool
) -> None:
    where = geometry(slot_bytes=PAGE * (1 + has_gap), piece_slots=piece_slots)
    told = copies(where, Stream.STORE, block_ids, slots)
    pairs = {block + i: slot + i for block, slot, length in told for i in range(length)}
    assert pairs == dict(zip(block_ids, slots, strict=True))
    assert all(slot // piece_slots == (slot + n - 1) // piece_slots for _, slot, n in told)


@pytest.mark.parametrize(
    ("block_ids", "slots", "message"),
    [
        ([50], [0], "block ids go from 0 to 49, not 50 to 50"),
        ([0, -1], [0, 1], "block ids go from 0 to 49, not -1 to 0"),
        ([0], [60], "slot ids go from 0 to 59, not 60 to 60"),
        ([1, 2], [3], "2 blocks cannot go to 1 slots"),
        ([1, 1], [3, 4], "a block is named twice"),
        ([1, 2], [4, 4], "a slot is named twice"),
    ],
)
def test_pairs_that_are_refused(block_ids: list[int], slots: list[int], message: str) -> None:
    with pytest.raises(InvalidBlock, match=message):
        check_pairs(geometry(), block_ids, slots)


def test_what_is_not_locked_yet_is_set_apart() -> None:
    pairs = make_pairs([4, 3, 2, 1], [12, 11, 10, 9])
    locked, rest = split_locked(pairs, 11)
    assert (locked, rest) == ([(1, 9), (2, 10)], [(3, 11), (4, 12)])
    for num_locked, lengths in ((0, (0, 4)), (60, (4, 0))):
        assert tuple(map(len, split_locked(pairs, num_locked))) == lengths


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 25))
def test_groups_hold_all_bytes_in_order(sizes: list[int], most: int) -> None:
    starts = np.cumsum([1, *sizes[:-1]])
    groups = list(cut(Batch(starts, starts + 1000, sizes), most))
    assert all(sum(size for _, _, size in group) <= most for group in groups)
    assert all(sum(size for _, _, size in group) == most for group in groups[:-1])
    seen = [source + i for group in groups for source, _, size in group for i in range(size)]
    assert seen == list(range(1, 1 + sum(sizes)))
    assert all(target == source + 1000 for group in groups for source, target, _ in group)


@pytest.mark.parametrize(
    ("rates", "way"),
    [
        ({Way.BATCHED: 50, Way.SINGLE: 50}, Way.BATCHED),
        ({Way.BATCHED: 48, Way.SINGLE: 50}, Way.BATCHED),  # about as fast, and cheaper to submit
        ({Way.BATCHED: 40, Way.SINGLE: 50}, Way.SINGLE),
        ({Way.SINGLE: 50}, Way.SINGLE),
        ({Way.BATCHED: 50, Way.SINGLE: 20, Way.KERNEL: 70}, Way.BATCHED),  # not worth the time
        ({Way.BATCHED: 5, Way.SINGLE: 6, Way.KERNEL: 40}, Way.KERNEL),
    ],
)
def test_the_way_to_locked_memory(rates: dict[Way, float], way: Way) -> None:
    assert choose_locked(rates) is way


@pytest.mark.parametrize(
    ("staged", "pageable", "way"),
    [(9, 5, Way.STAGED), (5, 9, Way.PAGEABLE), (10, 9.6, Way.PAGEABLE)],
)
def test_the_way_to_ordinary_memory(staged: float, pageable: float, way: Way) -> None:
    rates = {Way.STAGED: staged, Way.PAGEABLE: pageable, Way.BATCHED: 50.0}
    assert choose_pageable(rates) is way
