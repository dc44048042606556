# SPDX-License-Identifier: Apache-2.0
"""Changes of the batch one by one, as seed 002 goes through them in appendices N, R2 and S2; where
that document miscounts, with the right outcome. Random lives are in `test_row_states.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stratakv.engine.batch.batch_update import AddedRow, BatchUpdate, MovedRow
from stratakv.engine.sampling.processors.base import LogitsProcessor, ProcessorContext
from stratakv.engine.sampling.processors.builtin import LogitBias, MinP

from .batches import VOCAB, row_of

CONTEXT = ProcessorContext(max_rows=5, vocab_size=VOCAB, eos_token_ids=(2,))
ONE: dict[str, Any] = {"logit_bias": {10: 0.5, 11: -0.25}}
OTHER: dict[str, Any] = {"logit_bias": {5: 1.0}}


def update(
    processor: LogitsProcessor,
    size: int,
    *,
    removed: tuple[int, ...] = (),
    added: tuple[AddedRow, ...] = (),
    moved: tuple[MovedRow, ...] = (),
) -> None:
    processor.update_state(BatchUpdate(size, removed, added, moved))


def biases(processor: LogitsProcessor) -> dict[int, dict[int, float]]:
    """What is added to each row's logits, of those to which something is."""
    if not processor.is_active:
        return {}
    result = processor.apply(torch.zeros(5, VOCAB), np.arange(5)).tolist()
    found = {row: {i: x for i, x in enumerate(values) if x} for row, values in enumerate(result)}
    return {row: values for row, values in found.items() if values}


@pytest.fixture
def two() -> LogitBias:
    """Rows 0 and 1 with biases (N.1)."""
    processor = LogitBias(CONTEXT)
    assert biases(processor) == {}
    update(processor, 2, added=(row_of(0, ONE), row_of(1, OTHER)))
    assert biases(processor) == {0: {10: 0.5, 11: -0.25}, 1: {5: 1.0}}
    return processor


def test_a_request_that_is_removed_leaves_nothing(two: LogitBias) -> None:  # N.2
    update(two, 1, removed=(1,))
    assert biases(two) == {0: {10: 0.5, 11: -0.25}}
    update(two, 0, removed=(0,))
    assert not two.is_active


def test_two_requests_change_rows_by_way_of_an_empty_one(two: LogitBias) -> None:  # N.3
    update(two, 2, moved=(MovedRow(0, 4), MovedRow(1, 0), MovedRow(4, 1)))
    assert biases(two) == {0: {5: 1.0}, 1: {10: 0.5, 11: -0.25}}


def test_a_request_that_moves_leaves_its_row_empty(two: LogitBias) -> None:  # N.4
    update(two, 2, moved=(MovedRow(1, 3),))
    assert biases(two) == {0: {10: 0.5, 11: -0.25}, 3: {5: 1.0}}
    update(two, 1, moved=(MovedRow(0, 3),))  # what the target held is gone
    assert biases(two) == {3: {10: 0.5, 11: -0.25}}


def test_a_request_without_wishes_replaces_one_that_had_some(two: LogitBias) -> None:  # N.5
    update(two, 2, added=(row_of(0, {}),))
    assert biases(two) == {1: {5: 1.0}}
    update(two, 2, removed=(1,), added=(row_of(1, {}),))
    assert not two.is_active


def test_biases_of_several_rows_are_added_in_one_go() -> None:  # S2.1
    processor = LogitBias(CONTEXT)
    update(processor, 3, added=(row_of(0, ONE), row_of(1, {}), row_of(2, OTHER)))
    logits = torch.arange(3.0 * VOCAB).reshape(3, VOCAB)
    expected = logits.clone()
    expected[0, 10] += 0.5
    expected[0, 11] -= 0.25
    expected[2, 5] += 1.0
    assert torch.equal(processor.apply(logits, np.arange(3)), expected)


def kept(processor: LogitsProcessor) -> list[int]:
    """How many tokens min-p leaves in each row, of logits 0, -1, -2 and so on."""
    logits = -torch.arange(VOCAB, dtype=torch.float64).repeat(5, 1)
    return (processor.apply(logits, np.arange(5)) > -torch.inf).sum(dim=1).tolist()


def test_removed_added_and_moved_in_one_step_are_counted_once() -> None:  # R2.1
    """The document clears row 1, which was added after it was removed, and counts one of three
    requests in the end."""
    processor = MinP(CONTEXT)
    update(processor, 3, added=tuple(
        row_of(row, {"min_p": min_p}) for row, min_p in enumerate((0.1, 0.0, 0.05))
    ))  # fmt: skip
    assert kept(processor) == [3, VOCAB, 3, VOCAB, VOCAB]
    update(
        processor, 4, removed=(1,), added=(row_of(1, {"min_p": 0.2}), row_of(3, {})),
        moved=(MovedRow(2, 3),),
    )  # fmt: skip
    assert kept(processor) == [3, 2, VOCAB, 3, VOCAB]
    update(processor, 1, removed=(1, 0))
    assert processor.is_active and kept(processor) == [VOCAB, VOCAB, VOCAB, 3, VOCAB]
    update(processor, 0, removed=(3,))
    assert not processor.is_active
