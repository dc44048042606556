# SPDX-License-Identifier: Apache-2.0
"""Block tables: rows, slots, groups."""

from __future__ import annotations

import random

import numpy as np
import pytest

from stratakv.engine.worker.block_table import BlockTable, MultiGroupBlockTable


def table(rows: list[list[int]], block_size: int) -> BlockTable:
    made = BlockTable(len(rows), 8, block_size)
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


def test_rows_grow_are_replaced_and_moved():
    made = table([[1, 2], [3], [4, 5, 6]], 4)
    made.append_row([7, 8], 1)
    made.append_row([], 1)
    assert made.view_row(1).tolist() == [3, 7, 8]
    made.add_row([9], 1)
    assert made.view_row(1).tolist() == [9]
    made.move_row(2, 0)
    assert [made.view_row(i).tolist() for i in range(3)] == [[4, 5, 6], [9], [4, 5, 6]]
    made.append_row([11], 0)
    assert made.view_row(2).tolist() == made.block_ids(2) == [4, 5, 6]


def test_a_row_that_is_full_refuses_more():
    made = table([[1] * 8], 4)
    with pytest.raises(ValueError, match="row 0 takes 8 blocks, and 9 are given"):
        made.append_row([2], 0)
    assert made.view_row(0).tolist() == [1] * 8


def test_groups_change_together_and_map_apart():
    groups = MultiGroupBlockTable([BlockTable(3, 4, 4), BlockTable(3, 4, 8)])
    groups.add_row(([1, 2], [3]), 0)
    groups.append_row(([4], [5]), 0)
    groups.add_row(([6], [7]), 1)
    groups.move_row(0, 2)
    assert [groups[g].view_row(2).tolist() for g in (0, 1)] == [[1, 2, 4], [3, 5]]
    slots = groups.slot_mapping(np.array([0, 2]), np.array([1, 9]))
    assert [s.tolist() for s in slots] == [[5, 17], [25, 41]]


def test_groups_refuse_blocks_for_another_number_of_groups():
    groups = MultiGroupBlockTable([BlockTable(1, 4, 4), BlockTable(1, 4, 4)])
    with pytest.raises(ValueError, match="shorter"):
        groups.append_row(([1],), 0)


@pytest.mark.parametrize("seed", range(5))
def test_a_copy_that_follows_the_changes_has_every_row(seed: int):
    rng = random.Random(seed)
    made, copies = table([[] for _ in range(6)], 4), [np.zeros((6, 8), np.int32) for _ in range(2)]
    for _ in range(60):
        for _ in range(rng.randint(0, 3)):
            row = rng.randrange(6)
            room = 8 - len(made.view_row(row))
            change = rng.choice(["add", "append", "move"])
            if change == "add":
                made.add_row(rng.choices(range(1, 99), k=rng.randint(0, 8)), row)
            elif change == "append":
                made.append_row(rng.choices(range(1, 99), k=rng.randint(0, room)), row)
            else:
                made.move_row(row, rng.randrange(6))
        reader = rng.randrange(2)
        rows, places, blocks = made.take_changes(reader)
        copy = copies[reader]
        copy[rows, places] = blocks
        for row in range(6):
            assert copy[row, : made.num_entries[row]].tolist() == made.block_ids(row)
    assert not any(map(len, made.take_changes(reader))), "each change is told once"


def test_blocks_are_split_into_those_that_attention_reads():
    made = BlockTable(2, 3, 8, 4)
    made.add_row([5, 0, 2], 0)
    assert made.view_row(0).tolist() == [10, 11, 0, 1, 4, 5]
    assert made.block_ids(0) == [5, 0, 2]
    positions = np.array([0, 5, 17, 23])
    slots = made.slot_mapping(np.zeros(4, np.int64), positions)
    assert slots.tolist() == [5 * 8, 5 * 8 + 5, 2 * 8 + 1, 2 * 8 + 7], "as in whole blocks"
    made.move_row(0, 1)
    made.add_row([7], 0)
    assert (made.block_ids(0), made.block_ids(1)) == ([7], [5, 0, 2])
    with pytest.raises(ValueError, match="row 1 takes 3 blocks, and 4 are given"):
        made.append_row([1], 1)
    with pytest.raises(ValueError, match="cannot be read as blocks of 3; take a divisor of 8"):
        BlockTable(1, 1, 8, 3)
