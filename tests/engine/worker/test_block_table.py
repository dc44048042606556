# SPDX-License-Identifier: Apache-2.0
"""Block tables: rows, slots, kernel blocks, groups, context parallelism."""

from __future__ import annotations

import numpy as np
import pytest

from stratakv.engine.worker.block_table import (
    BlockTable,
    ContextParallel,
    MultiGroupBlockTable,
    split_blocks,
)


def table(rows: list[list[int]], block_size: int, **options: object) -> BlockTable:
    made = BlockTable(len(rows), 8, block_size, **options)  # type: ignore[arg-type]
    for row, blocks in enumerate(rows):
        made.add_row(blocks, row)
    return made


def test_slot_mapping_of_the_worked_example():
    made = table([[5, 8], [2, 3, 10], [12]], 4)
    slots = made.slot_mapping(np.array([0, 0, 1, 1, 1, 2]), np.array([3, 7, 2, 5, 9, 1]))
    assert slots.tolist() == [23, 35, 10, 13, 41, 49]
    assert slots.dtype == np.int64


def test_slots_do_not_overflow_32_bits():
    made = table([[2**31 - 1]], 256)
    assert made.slot_mapping(np.array([0]), np.array([255])).tolist() == [2**39 - 1]


def test_rows_grow_are_replaced_moved_and_swapped():
    made = table([[1, 2], [3], [4, 5, 6]], 4)
    made.append_row([7, 8], 1)
    made.append_row([], 1)
    assert made.row(1).tolist() == [3, 7, 8]
    made.add_row([9], 1)
    assert made.row(1).tolist() == [9]
    made.swap_row(0, 2)
    assert [made.row(i).tolist() for i in range(3)] == [[4, 5, 6], [9], [1, 2]]
    made.move_row(2, 0)
    assert made.row(0).tolist() == [1, 2]
    made.append_row([11], 0)
    assert made.row(2).tolist() == [1, 2]


def test_a_row_that_is_full_refuses_more():
    made = table([[1] * 8], 4)
    with pytest.raises(ValueError, match="row 0 takes 8 blocks, and 9 are given"):
        made.append_row([2], 0)
    assert made.row(0).tolist() == [1] * 8


def test_allocated_blocks_are_split_into_kernel_blocks():
    assert split_blocks(np.array([0, 1, 2], np.int32), 2).tolist() == [0, 1, 2, 3, 4, 5]
    made = table([[0, 1, 2], [7]], 32, kernel_block_size=16)
    assert made.row(0).tolist() == [0, 1, 2, 3, 4, 5]
    assert made.row(1).tolist() == [14, 15]
    # The slots are those of the allocated blocks: both name the same place.
    positions = np.arange(32)
    slots = made.slot_mapping(np.ones(32, np.int64), positions)
    assert slots.tolist() == (7 * 32 + positions).tolist()


def test_a_kernel_block_must_divide_a_block():
    with pytest.raises(ValueError, match="kernel block size 12 must divide the block size 32"):
        BlockTable(1, 1, 32, kernel_block_size=12)


@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_context_parallel_ranks_share_every_position_once(interleave):
    size, block_size, length = 4, 4, 64
    positions = np.arange(length)
    rows = np.zeros(length, np.int64)
    owners = []
    for rank in range(size):
        parallel = ContextParallel(rank, size, interleave)
        slots = table([[3, 9, 5, 6]], block_size, parallel=parallel).slot_mapping(rows, positions)
        held = slots >= 0
        owners.append(held)
        # Every rank fills its blocks without a gap, in the order of the table.
        expected = (np.array([3, 9, 5, 6])[:, None] * block_size + np.arange(block_size)).ravel()
        assert slots[held].tolist() == expected.tolist()
        assert set(slots[~held].tolist()) == {-1}
    assert np.sum(owners, axis=0).tolist() == [1] * length
    first = [int(np.argmax([o[p] for o in owners])) for p in range(2 * interleave)]
    assert first == [0] * interleave + [1] * interleave


def test_context_parallel_by_hand():
    """Two ranks, runs of two: rank 1 holds positions 2, 3, 6, 7 of the first (virtual) block."""
    made = table([[5, 2]], 4, parallel=ContextParallel(1, 2, 2))
    slots = made.slot_mapping(np.zeros(10, np.int64), np.arange(10))
    assert slots.tolist() == [-1, -1, 20, 21, -1, -1, 22, 23, -1, -1]


def test_a_rank_outside_its_group_is_refused():
    with pytest.raises(ValueError, match="rank < size"):
        ContextParallel(2, 2)


def test_groups_change_together_and_map_apart():
    groups = MultiGroupBlockTable([BlockTable(3, 4, 4), BlockTable(3, 4, 8)])
    groups.add_row(([1, 2], [3]), 0)
    groups.append_row(([4], [5]), 0)
    groups.add_row(([6], [7]), 1)
    groups.swap_row(0, 1)
    groups.move_row(1, 2)
    assert [groups[g].row(2).tolist() for g in (0, 1)] == [[1, 2, 4], [3, 5]]
    slots = groups.slot_mapping(np.array([0, 2]), np.array([1, 9]))
    assert [s.tolist() for s in slots] == [[25, 17], [57, 41]]


def test_groups_refuse_blocks_for_another_number_of_groups():
    groups = MultiGroupBlockTable([BlockTable(1, 4, 4), BlockTable(1, 4, 4)])
    with pytest.raises(ValueError, match="shorter"):
        groups.append_row(([1],), 0)
