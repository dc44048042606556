# SPDX-License-Identifier: Apache-2.0
"""The batches and pieces that the sequences of a step make, and sequences that are refused."""

from __future__ import annotations

import pytest
import torch

from stratakv.engine.models.states.state_plan import (
    MOST_SINGLE_ROWS,
    Piece,
    StatePlan,
    StateSequence,
)

CPU = torch.device("cpu")


def plan_of(*sequences: StateSequence) -> StatePlan:
    return StatePlan(sequences, max(each.end for each in sequences), CPU)


def lists(plan: StatePlan) -> list[tuple[list[int] | None, list[int], list[int], list[int]]]:
    return [
        (
            None if batch.rows is None else batch.rows.tolist(),
            batch.sources.tolist(),
            batch.slots.tolist(),
            [] if batch.fresh is None else batch.fresh.tolist(),
        )
        for batch in plan.batches
    ]


def test_decodes_are_one_batch():
    plan = plan_of(
        StateSequence(0, 1, 5, ((1, 5),)),
        StateSequence(1, 2, None, ((2, 3),)),
        StateSequence(2, 3, 7, ((3, 4),)),
    )
    assert not plan.long
    assert lists(plan) == [(None, [5, 0, 7], [5, 3, 4], [1])]


def test_drafts_go_row_by_row_beside_decodes():
    """Rows behind the first read what the row before has saved."""
    plan = plan_of(
        StateSequence(0, 3, 5, ((1, 6), (2, 5), (3, 7))),
        StateSequence(3, 4, 9, ((4, 9),)),
        StateSequence(4, 6, None, ((5, 1), (6, 2))),
    )
    assert not plan.long
    assert lists(plan) == [
        ([0, 3, 4], [5, 9, 0], [6, 9, 1], [2]),
        ([1, 5], [6, 1], [5, 2], []),
        ([2], [5], [7], []),
    ]


def test_others_end_their_pieces_where_a_save_lies():
    plan = plan_of(
        StateSequence(0, 9, None, ((4, 2), (7, 3))),
        StateSequence(9, 10, 5, ()),
        StateSequence(10, 12, 6, ((12, 6),)),
    )
    assert not plan.batches
    assert [each.source for each in plan.long] == [None, 5, 6]
    assert [each.pieces for each in plan.long] == [
        (Piece(0, 4, 2), Piece(4, 7, 3), Piece(7, 9, None)),
        (Piece(9, 10, None),),
        (Piece(10, 12, 6),),
    ]
    assert plan.long[0].rows == slice(0, 9)


@pytest.mark.parametrize("count", [MOST_SINGLE_ROWS, MOST_SINGLE_ROWS + 1])
def test_many_rows_are_no_drafts(count):
    plan = plan_of(StateSequence(0, count, 0, tuple((n + 1, n) for n in range(count))))
    assert (len(plan.batches), len(plan.long)) == ((count, 0), (0, 1))[count > MOST_SINGLE_ROWS]


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        (StateSequence(2, 2, 0, ()), "rows 2 to 2 are not within a step of 4 rows"),
        (StateSequence(1, 5, 0, ()), "rows 1 to 5 are not within a step of 4 rows"),
        (StateSequence(-1, 2, 0, ()), "rows -1 to 2 are not within"),
        (StateSequence(1, 4, 0, ((1, 0),)), r"ascending rows behind 1 and up to 4, not \[1\]"),
        (StateSequence(1, 4, 0, ((3, 0), (2, 1))), r"ascending rows .*, not \[3, 2\]"),
        (StateSequence(1, 3, 0, ((4, 0),)), r"up to 3, not \[4\]"),
    ],
)
def test_sequences_that_are_refused(sequence, words):
    with pytest.raises(ValueError, match=words):
        StatePlan([sequence], 4, CPU)
