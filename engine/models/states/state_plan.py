# SPDX-License-Identifier: Apache-2.0
"""StatePlan: the rows of a step that change the state of each request, and the slots that they read
and write.

    few rows, with a save after each    ──► batches: row 0 of all sequences, then row 1 of all, …
    all other sequences                 ──► pieces, which end at the saves

A decode is a sequence with one row and a save after it, so all decodes of a step are one batch.
Draft tokens to verify have a save after each row too, since any prefix of the drafts may be
accepted. The plan is made once per step and is the same for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .running_states import RunningStates

# The longest sequence, in rows, whose rows are computed one by one.
MOST_SINGLE_ROWS = 16


class StateSequence(NamedTuple):
    """The rows [start, end) of a step, which belong to one request.

    The state before the first row is read from the slot `source`; None means a state of zeros.
    `saves` has (row, slot) pairs, with ascending rows in (start, end]. The state after all rows
    before `row` is written to `slot`. `source` may be one of the slots in `saves`. Other sequences
    of the step must not use the slots of this sequence."""

    start: int
    end: int
    source: int | None
    saves: tuple[tuple[int, int], ...]


class RowBatch(NamedTuple):
    """A row of each of several sequences; the rows of a batch are computed together."""

    rows: Tensor | None  # int64 [batch]; None: all rows of the step, in order
    sources: Tensor  # int64 [batch]: slots to read; unused for `fresh` rows
    slots: Tensor  # int64 [batch]: where the new states are written
    fresh: Tensor | None  # int64: indices in the batch whose state begins with zeros


class Piece(NamedTuple):
    """The rows [start, end) of a sequence."""

    start: int
    end: int
    slot: int | None  # slot for the state after the rows; None: not written


class LongSequence(NamedTuple):
    """A sequence that is computed separately from other sequences."""

    source: int | None
    pieces: tuple[Piece, ...]

    @property
    def rows(self) -> slice:
        return slice(self.pieces[0].start, self.pieces[-1].end)


class StatePlan:
    """The sequences of a step, divided into batches of rows and separately computed sequences."""

    __slots__ = ("batches", "long", "num_rows", "sequences")

    def __init__(
        self, sequences: Sequence[StateSequence], num_rows: int, device: torch.device
    ) -> None:
        """`num_rows` is the number of rows in the step. Raises ValueError for a sequence with
        invalid rows."""
        self.sequences, self.num_rows = tuple(sequences), num_rows
        self.long: list[LongSequence] = []
        single: list[StateSequence] = []
        for sequence in self.sequences:
            _check_sequence(sequence, num_rows)
            if _is_single(sequence):
                single.append(sequence)
            else:
                self.long.append(LongSequence(sequence.source, _pieces_of(sequence)))
        self.batches: list[RowBatch] = []
        while single:
            number = len(self.batches)
            self.batches.append(_batch_of(single, number, num_rows, device))
            single = [each for each in single if len(each.saves) > number + 1]


class StateStep(NamedTuple):
    """The plan of a step, and the states that the step changes."""

    plan: StatePlan
    running: RunningStates


def _check_sequence(sequence: StateSequence, num_rows: int) -> None:
    start, end, _, saves = sequence
    if not 0 <= start < end <= num_rows:
        raise ValueError(f"rows {start} to {end} are not within a step of {num_rows} rows")
    before = start
    for row, _ in saves:
        if not before < row <= end:
            raise ValueError(
                f"the saves of rows {start} to {end} must have ascending rows behind {start} and "
                f"up to {end}, not {[row for row, _ in saves]}"
            )
        before = row


def _is_single(sequence: StateSequence) -> bool:
    """Whether the sequence has a save after each row, and at most MOST_SINGLE_ROWS rows."""
    count = sequence.end - sequence.start
    return len(sequence.saves) == count <= MOST_SINGLE_ROWS


def _pieces_of(sequence: StateSequence) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    start = sequence.start
    for row, slot in sequence.saves:
        pieces.append(Piece(start, row, slot))
        start = row
    if start < sequence.end:
        pieces.append(Piece(start, sequence.end, None))
    return tuple(pieces)


def _batch_of(
    sequences: list[StateSequence], number: int, num_rows: int, device: torch.device
) -> RowBatch:
    """Make a batch that has row number `number` of each sequence."""
    rows = [each.start + number for each in sequences]
    slots = [each.saves[number][1] for each in sequences]
    fresh: list[int] = []
    if number:
        sources = [each.saves[number - 1][1] for each in sequences]
    else:
        sources = [each.source or 0 for each in sequences]
        fresh = [place for place, each in enumerate(sequences) if each.source is None]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return RowBatch(
        rows=None if rows == list(range(num_rows)) else on_device(rows),
        sources=on_device(sources),
        slots=on_device(slots),
        fresh=on_device(fresh) if fresh else None,
    )
