# SPDX-License-Identifier: Apache-2.0
"""The builder of batch updates: order, reuse of rows, frozen results."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from stratakv.engine.batch.batch_update import AddedRow, BatchUpdateBuilder, MovedRow
from stratakv.engine.request.sampling_params import SamplingParams


def added(row: int) -> AddedRow:
    return AddedRow(row, SamplingParams(), np.array([1], np.int32), [])


def test_nothing_changed_is_none():
    assert BatchUpdateBuilder().get_and_reset(3) is None


def test_removed_rows_are_reported_in_descending_order():
    builder = BatchUpdateBuilder()
    for row in (3, 7, 5):
        builder.remove(row)
    update = builder.get_and_reset(5)
    assert update is not None and list(update.removed) == [7, 5, 3]


def test_the_lowest_row_is_reused_first_and_then_no_longer_removed():
    builder = BatchUpdateBuilder()
    for row in (7, 3, 5):
        builder.remove(row)
    assert builder.peek_removed() == 3
    assert [builder.pop_removed(), builder.pop_removed()] == [3, 5]
    builder.add(added(3))
    builder.move(8, 5)
    builder.move(2, 1)
    update = builder.get_and_reset(8)
    assert update is not None
    assert list(update.removed) == [7]
    assert [one.row for one in update.added] == [3]
    assert list(update.moved) == [MovedRow(8, 5), MovedRow(2, 1)]
    assert builder.pop_removed() is None


@pytest.mark.parametrize("read", ["peek_removed", "pop_removed"])
def test_a_removal_after_reading_is_refused(read):
    builder = BatchUpdateBuilder()
    getattr(builder, read)()
    with pytest.raises(RuntimeError, match="row 4 is removed too late"):
        builder.remove(4)
    builder.get_and_reset(0)
    builder.remove(4)  # a new step


def test_an_update_cannot_be_changed_and_outlives_its_builder():
    builder = BatchUpdateBuilder()
    builder.add(added(0))
    update = builder.get_and_reset(1)
    assert update is not None
    with pytest.raises(dataclasses.FrozenInstanceError):
        update.batch_size = 2  # type: ignore[misc]
    builder.add(added(1))
    assert [one.row for one in update.added] == [0]
    assert isinstance(update.added, tuple)
