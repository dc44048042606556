# SPDX-License-Identifier: Apache-2.0
"""The parts below the store: slots in memory, neighbours in a run, and the room for the index."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from stratakv.tiers.block import BlockLayout
from stratakv.tiers.ssd.disk.io_pool import runs
from stratakv.tiers.ssd.disk.slot_file import SlotFile
from stratakv.tiers.ssd.disk.space import plan_space
from stratakv.tiers.ssd.index.index_file import IndexFile, Row
from stratakv.tiers.ssd.index.slot_index import Entry, SlotIndex

from ..blocks import ODD, SMALL, make_keys
from .stores import batch_of


def test_runs_are_neighbours_and_not_too_long() -> None:
    assert runs([], 4) == []
    assert runs([3, 4, 5, 9, 11, 12], 4) == [range(3), range(3, 4), range(4, 6)]
    assert runs(list(range(10)), 4) == [range(4), range(4, 8), range(8, 10)]
    assert runs([5, 5, 6], 4) == [range(1), range(1, 3)]


SMALLER = BlockLayout(4, 16, 8, 128, "bfloat16")  # 256 KiB


def test_a_run_fits_one_call(tmp_path: Path) -> None:
    for layout in (SMALL, ODD, BlockLayout(32, 16, 8, 128, "bfloat16"), SMALLER):
        file = SlotFile(tmp_path / "blocks", layout, 4)
        assert file.run_slots * (2 if layout.page_bytes % 4096 == 0 else 3) <= 1024
        assert file.run_slots == 1 or file.run_bytes <= 2 * 1024**2
        file.close()
    # Four blocks of 256 KiB go together, header pages included.
    assert file.run_slots == 4
    assert file.run_bytes == 4 * (256 * 1024 + 4096)


def test_of_two_rows_for_a_key_the_newer_one_counts() -> None:
    """A removal that failed before a restart leaves the older row behind."""
    key, other = make_keys(2)
    for rows in (
        [Row(0, key, 7, 1), Row(1, key, 9, 2), Row(3, other, 8, 3)],
        [Row(0, key, 7, 2), Row(1, key, 9, 1), Row(3, other, 8, 3)],
    ):
        index = SlotIndex(4, [batch_of(rows)])
        assert len(index) == 2
        entries = index.pin([key, other])
        assert [entry.slot for entry in entries if entry] == [1, 3]
        assert [entry.slot for entry in index.take_leaving()] == [0]
        assert index.allocate(4) == [2]  # slot 0 is free only after its row is gone


@pytest.mark.parametrize("reader_first", [True, False])
def test_a_slot_is_free_after_its_row_and_its_reader_are_gone(reader_first: bool) -> None:
    key = make_keys(1)[0]
    index = SlotIndex(1, [batch_of([Row(0, key, 1, 1)])])
    entry = index.pin([key])[0]
    assert entry is not None
    assert index.make_room(1) == 0  # it is being read
    assert index.remove_entry(entry)
    assert not index.remove_entry(entry)
    leaving = index.take_leaving()
    steps = [lambda: index.unpin(entry), lambda: index.free_entries(leaving)]
    for step in steps if reader_first else reversed(steps):
        assert index.allocate(1) == []
        step()
    assert index.allocate(1) == [0]


@pytest.mark.parametrize("slots", [1, 300, 3000])
def test_the_index_never_outgrows_its_room(tmp_path: Path, rng: random.Random, slots: int) -> None:
    """Rows in the worst order, and commits as large as the writer makes them: no MapFullError."""
    capacity = 1_000_000
    while plan_space(SMALL, capacity).num_slots < slots:
        capacity = capacity * 11 // 10
    plan = plan_space(SMALL, capacity)
    index = IndexFile(tmp_path / "index", plan.index_bytes)
    order = list(range(plan.num_slots))
    rng.shuffle(order)
    key = make_keys(1)[0]
    for start in range(0, len(order), 100):
        index.put(Row(slot, key, 1, 1) for slot in order[start : start + 100])
    for _ in range(10):
        gone = rng.sample(order, (len(order) + 3) // 4)
        index.delete(gone)
        index.put(Row(slot, key, 2, 2) for slot in {*gone, *rng.sample(order, len(order) // 2)})
    index.delete(order)
    index.put(Row(slot, key, 3, 3) for slot in order)
    assert len(list(index.iter_rows())) == plan.num_slots
    assert (tmp_path / "index" / "data.mdb").stat().st_size <= plan.index_bytes
    index.close()


def test_a_row_of_a_failed_commit_is_one_that_leaves() -> None:
    """A block dropped during a commit that failed was said to be gone, though its row may be on the
    disk."""
    index = SlotIndex(4)
    (slot,) = index.allocate(1)
    index.keep_leaving([Entry(make_keys(1)[0], slot, 77)])
    assert index.has_leaving_after(76)
    assert not index.has_leaving_after(77)


def test_what_was_dropped_unpublished_is_known_until_its_record_is_gone() -> None:
    """Its slot is not told of while another block is written there, nor once one is."""
    index, (key, other) = SlotIndex(2), make_keys(2)
    [slot] = index.allocate(1)
    index.note_dropped(Entry(key, slot, 7))
    assert index.dropped_keys() == ([key], True)
    assert index.take_dropped(0) == []
    index.give_back([slot])
    assert index.take_dropped(0) == [slot]
    assert index.allocate(1) == [slot]
    index.note_dropped(Entry(key, slot, 8))
    index.publish([Entry(other, slot, 9)])
    assert index.dropped_keys() == ([], True)
    assert index.take_dropped(0) == []


def test_the_plan_uses_what_it_is_given() -> None:
    for layout in (SMALL, ODD, BlockLayout(6, 16, 4, 32, "float32")):
        for capacity in (10**6, 2**24, 20 * 2**30, 10**13):
            plan = plan_space(layout, capacity)
            assert plan.total_bytes <= capacity
            assert plan.total_bytes > capacity - 2 * plan.record_bytes - 8 * 4096
    assert plan.slot_file_bytes > 0.98 * capacity  # 96 KiB blocks: the index is about 1 %


def test_a_slot_is_not_free_before_its_last_reader_is_done() -> None:
    key = make_keys(1)[0]
    index = SlotIndex(1)
    [slot] = index.allocate(1)
    index.publish([Entry(key, slot, 1)])
    readers = [entry for _ in range(2) for entry in index.pin([key]) if entry is not None]
    assert index.forget_key(key)
    index.free_entries(index.take_leaving())
    for reader in readers:
        assert index.allocate(1) == []
        index.unpin(reader)
    assert index.allocate(2) == [slot]
