# SPDX-License-Identifier: Apache-2.0
"""The changes of the persistent batch in one step, for code that has data for each row.

Readers apply the three lists in this order: removed rows, added rows, moved rows. An added row
replaces the row at its index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..request.request import TokenArray
from ..request.sampling_params import SamplingParams

IntArray = npt.NDArray[np.int64]


class AddedRow(NamedTuple):
    """A request that was put into a row. `output_token_ids` is the request's own list, which grows,
    so a reader always has the newest tokens."""

    row: int
    params: SamplingParams
    prompt_token_ids: TokenArray
    output_token_ids: list[int]
    has_prompt_tokens: bool = True  # False: a prompt of embeddings, whose token ids are invalid
    num_likeliest: int = 0  # likeliest tokens with each output token; overrides `logprobs`


class MovedRow(NamedTuple):
    """The move of a request to another row. After the move, the source row is empty and the target
    row's old content is overwritten."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    batch_size: int  # rows in use after the changes
    removed: Sequence[int]  # descending
    added: Sequence[AddedRow]
    moved: Sequence[MovedRow]


class BatchUpdateBuilder:
    """Collects the changes of one step: all removals first, then additions and moves.

    New requests get removed rows, the lowest first, which keeps the batch dense. A removed row that
    is reused is not reported as removed, since the added request replaces its content."""

    def __init__(self) -> None:
        self._reset()

    def remove(self, row: int) -> None:
        """Record an emptied row. Raise RuntimeError if removed rows have been read in this step."""
        if self._removals_read:
            raise RuntimeError(
                f"row {row} is removed too late: removed rows have been read in this step, and "
                "their order is fixed from then on"
            )
        self._removed.append(row)

    def add(self, added: AddedRow) -> None:
        self._added.append(added)

    def move(self, source: int, target: int) -> None:
        self._moved.append(MovedRow(source, target))

    def peek_removed(self) -> int | None:
        self._sort_removed()
        return self._removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        self._sort_removed()
        return self._removed.pop() if self._removed else None

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the step's changes, or None without changes, and empty the builder."""
        self._sort_removed()
        update = None
        if self._removed or self._added or self._moved:
            removed, added, moved = tuple(self._removed), tuple(self._added), tuple(self._moved)
            update = BatchUpdate(batch_size, removed, added, moved)
        self._reset()
        return update

    def _reset(self) -> None:
        self._removed: list[int] = []
        self._added: list[AddedRow] = []
        self._moved: list[MovedRow] = []
        self._removals_read = False

    def _sort_removed(self) -> None:
        if not self._removals_read:
            # Descending, so that `pop` takes the lowest row from the end.
            self._removed.sort(reverse=True)
            self._removals_read = True
