# SPDX-License-Identifier: Apache-2.0
"""A store that is opened smaller, or whose disk goes, read by somebody who wanted to break it."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierDown
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.disk.space import plan_slots
from stratakv.tiers.ssd.folder import shrinking
from stratakv.tiers.ssd.index import index_file
from stratakv.tiers.ssd.index.index_file import IndexFile, Row

from ..tiers.blocks import SMALL, make_keys
from ..tiers.ssd.stores import capacity_for
from ..tiers.store_contract import SECONDS, fetch, put, wait_until

SLOTS, FEWER = 20, 10
RECORD_BYTES = plan_slots(SMALL.slot_bytes, SLOTS).record_bytes


def open_store(path: Path, slots: int = SLOTS) -> SsdStore:
    return SsdStore(path, SMALL, capacity_for(slots))


def rows_of(path: Path) -> list[Row]:
    index = IndexFile(path / "index", 0)
    try:
        return list(index.iter_rows())
    finally:
        index.close()


def test_a_row_that_was_to_be_removed_is_not_lost_sight_of(tmp_path: Path) -> None:
    """An older row of a block, left by a removal that failed, was forgotten by shrinking, and
    brought the block back after it was dropped."""
    path = tmp_path / "ssd"
    key, other = make_keys(2)
    store = open_store(path)
    assert all(put(store, [key]))
    store.close(SECONDS)
    [older] = rows_of(path)
    record = (path / "blocks").read_bytes()[:RECORD_BYTES]
    store = open_store(path)
    store.drop([key])
    assert store.wait_forgotten(SECONDS)
    assert all(put(store, [other])) and all(put(store, [key]))
    store.drop([other])
    assert store.wait_forgotten(SECONDS)
    store.close(SECONDS)
    assert older.slot == 0 and [row.slot for row in rows_of(path)] == [1]
    with (path / "blocks").open("r+b") as blocks:  # as if the disk had refused the removal
        blocks.write(record)
    index = IndexFile(path / "index", 0)
    index.put([older])
    index.close()

    store = open_store(path, SLOTS - 1)
    assert store.lookup([key]) == [Answer.HIT]
    store.drop([key])
    assert store.wait_forgotten(SECONDS)
    store.close(SECONDS)
    store = open_store(path, SLOTS - 1)
    assert store.lookup([key]) == [Answer.MISS]
    store.close(SECONDS)


def test_rows_beyond_the_end_go_in_several_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB bounds what one commit may change; a very large store could never be made smaller."""
    monkeypatch.setattr(index_file, "_ROWS_PER_COMMIT", 3)
    index = IndexFile(tmp_path / "index", 2**20)
    keys = make_keys(11)
    index.put([Row(slot, key, 1, 1 + slot) for slot, key in enumerate(keys)])
    for end in (11, 10, 4, 0):
        index.delete_from(end)
        assert [row.slot for row in index.iter_rows()] == list(range(end))
    index.close()


def bad_reads(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> Callable[[], None]:
    """Reads of these slots fail while records are moved; a call ends that."""
    real = os.pread

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        if size == RECORD_BYTES and is_bad(offset // RECORD_BYTES):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, size, offset)

    monkeypatch.setattr(shrinking.os, "pread", pread)
    return lambda: monkeypatch.setattr(shrinking.os, "pread", real)


def test_a_bad_sector_costs_its_own_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It kept the store from being opened at all, for ever."""
    path = tmp_path / "ssd"
    keys = make_keys(SLOTS)
    store = open_store(path)
    assert all(put(store, keys))
    hot = keys[-FEWER:]
    store.touch(hot)
    store.close(SECONDS)
    slots = {row.key: row.slot for row in rows_of(path)}
    bad = max(hot, key=slots.__getitem__)
    assert slots[bad] >= FEWER
    bad_reads(monkeypatch, lambda slot: slot == slots[bad])
    store = open_store(path, FEWER)
    left = [key for key in hot if key != bad]
    assert None not in fetch(store, left)
    assert store.lookup([bad]) == [Answer.MISS]
    store.close(SECONDS)


def test_a_disk_that_goes_in_the_middle_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ssd"
    keys = make_keys(SLOTS)
    store = open_store(path)
    assert all(put(store, keys))
    hot = keys[-FEWER:]
    store.touch(hot)
    store.close(SECONDS)
    heal = bad_reads(monkeypatch, lambda _slot: True)
    for _ in range(2):
        with pytest.raises(TierDown, match="cannot use"):
            open_store(path, FEWER)
    heal()
    store = open_store(path, FEWER)
    assert None not in fetch(store, hot)
    store.close(SECONDS)


def test_a_disk_that_held_a_thread_is_taken_in_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files of a store that could not be closed in time stayed open for ever, and with them its
    lock, so that the store was in use by the process that waited for it."""
    opened: list[SsdStore] = []

    def open_it(create: bool) -> SsdStore:
        store = SsdStore(tmp_path / "ssd", SMALL, capacity_for(SLOTS), create=create)
        opened.append(store)
        return store

    keys = make_keys(5)
    watched = ReopeningStore(
        "ssd", SMALL, open_it, open_it(True), look_seconds=0.01, first_pause_seconds=0.01
    )
    assert all(put(watched, keys))
    [store] = opened
    real, asked = store._reader.close, 0

    def hang(deadline: float) -> bool:
        nonlocal asked
        asked += 1
        return real(deadline) and asked > 3

    monkeypatch.setattr(store._reader, "close", hang)
    monkeypatch.setattr(store, "has_lost_disk", lambda: True)
    wait_until(lambda: watched.opened not in (None, store))
    assert asked > 3 and not store.has_open_files
    assert None not in fetch(watched, keys)
    watched.close(SECONDS)
