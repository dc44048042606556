# SPDX-License-Identifier: Apache-2.0
"""Recurrence: the rule by which each token changes the recurrent part of a state, and its
computation for the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from .state_plan import StatePlan

# Most rows of one scan; the limit bounds the memory of matrices with an entry per pair of rows.
MOST_ROWS = 1024


class Recurrence(Protocol):
    """A rule by which tokens change states. `rows` are the tokens' inputs, in the state's dtype."""

    def take_row(self, state: Tensor, rows: Sequence[Tensor], /) -> Tensor:
        """Change each `state` `[batch, *shape]` by one row, in place. Return the outputs `[batch,
        heads, head_dim]`."""

    def scan_rows(self, state: Tensor, rows: Sequence[Tensor], /) -> tuple[Tensor, Tensor]:
        """Compute the rows of one sequence. Return the outputs `[rows, heads, head_dim]` and the
        state after the last row. `state` `[*shape]`, the state before the first row, is not
        changed; `rows` may be overwritten."""


def run_recurrence(
    recurrence: Recurrence,
    rows: Sequence[Tensor],
    plan: StatePlan,
    states: Tensor,
    shape: tuple[int, int],
) -> Tensor:
    """Compute the outputs `[rows, *shape]` of all rows of a step; outputs of rows that belong to no
    sequence are zeros. `plan` says which slots of `states` `[slots, *state]` are read, and which
    are written."""
    out = states.new_zeros((plan.num_rows, *shape))
    for batch in plan.batches:
        state = states.index_select(0, batch.sources)
        if batch.fresh is not None:
            state[batch.fresh] = 0
        chosen = rows if batch.rows is None else [each[batch.rows] for each in rows]
        found = recurrence.take_row(state, chosen)
        states[batch.slots] = state
        if batch.rows is None:
            return found
        out[batch.rows] = found
    for sequence in plan.long:
        if sequence.source is None:
            state = states.new_zeros(states.shape[1:])
        else:
            state = states[sequence.source]
        for piece in sequence.pieces:
            for start in range(piece.start, piece.end, MOST_ROWS):
                own = slice(start, min(start + MOST_ROWS, piece.end))
                out[own], state = recurrence.scan_rows(state, [each[own] for each in rows])
            if piece.slot is not None:
                states[piece.slot] = state
    return out


def split_chunks(rows: Tensor, length: int) -> Tensor:
    """Reshape `[rows, heads, size]` to `[heads, chunks, length, size]`, padded with rows of
    zeros."""
    if missing := -len(rows) % length:
        rows = F.pad(rows, (0, 0, 0, 0, 0, missing))
    chunks = rows.reshape(-1, length, *rows.shape[1:])
    # Made contiguous, since otherwise each product would copy the rows of a chunk again.
    return chunks.permute(2, 0, 1, 3).contiguous()
