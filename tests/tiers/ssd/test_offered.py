# SPDX-License-Identifier: Apache-2.0
"""Blocks that are offered before they are on the disk: their order, and when they are due."""

from __future__ import annotations

import pytest

from stratakv.tiers.ssd.index import row_writer
from stratakv.tiers.ssd.index.row_writer import ROWS_PER_COMMIT, OfferedBlocks
from stratakv.tiers.ssd.index.slot_index import Entry

from ..blocks import make_keys


def entries(count: int, first_slot: int = 0) -> list[Entry]:
    return [
        Entry(key, first_slot + i, 100 + first_slot + i) for i, key in enumerate(make_keys(count))
    ]


def test_the_newest_batch_comes_first_and_each_head_first() -> None:
    blocks = OfferedBlocks()
    older, newer = entries(3), entries(2, 10)
    blocks.add(older)
    blocks.add(newer)
    assert len(blocks) == 5
    assert blocks.drain_entries() == newer + older
    assert not blocks and blocks.drain_entries() == []


def test_they_are_due_a_while_after_the_first_or_when_they_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 50.0
    monkeypatch.setattr(row_writer.time, "monotonic", lambda: now)
    blocks = OfferedBlocks()
    assert not blocks.is_due()
    blocks.add(entries(1))
    now += row_writer.SYNC_SECONDS / 2
    blocks.add(entries(1, 5))
    assert not blocks.is_due() and blocks.seconds_left() == row_writer.SYNC_SECONDS / 2
    now += row_writer.SYNC_SECONDS / 2
    assert blocks.is_due() and blocks.seconds_left() == 0.0
    blocks.drain_entries()
    assert not blocks.is_due()
    blocks.add(entries(ROWS_PER_COMMIT))
    assert blocks.is_due(), "the time begins anew, but they are as many as a commit takes"


def test_a_slot_that_left_is_not_committed_for_what_it_held() -> None:
    blocks = OfferedBlocks()
    first, second = entries(2)
    blocks.add([first, second])
    again = first._replace(generation=999)
    blocks.slots_left([again, second])
    assert blocks.drain_entries() == [first], "another block's slot is another's"
