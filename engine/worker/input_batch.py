# SPDX-License-Identifier: Apache-2.0
"""The persistent batch: running requests in dense rows, changed by differences from step to step.

A step removes first, then adds, then calls `finish`, which closes the holes by moving the last rows
and returns the BatchUpdate. sampling state follows through the BatchUpdate.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..batch.batch_update import AddedRow, BatchUpdate, BatchUpdateBuilder
from ..cache.kv_block import BlockIds
from ..request import TokenArray
from ..sampling_params import SamplingParams
from .block_table import MultiGroupBlockTable


@dataclass(slots=True)
class WorkerRequest:
    """The worker's state of a request, in the batch or (preempted) out of it."""

    request_id: str
    prompt_token_ids: TokenArray
    params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class HeldRow(NamedTuple):
    """A request's row in the batch."""

    request: WorkerRequest
    block_ids: BlockIds
    num_computed: int


class InputBatch:
    """Rows `0 … len(batch)-1` are in use after `finish`."""

    def __init__(self, max_rows: int, max_model_len: int, tables: MultiGroupBlockTable) -> None:
        self.tables = tables
        self.max_model_len = max_model_len
        self.requests: list[WorkerRequest | None] = [None] * max_rows
        self.row_of: dict[str, int] = {}
        # Memory of rows that were never used is never touched, so it is not taken either.
        self.token_ids: npt.NDArray[np.int32] = np.zeros((max_rows, max_model_len), np.int32)
        self.num_tokens: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self.num_computed: npt.NDArray[np.int64] = np.zeros(max_rows, np.int64)
        self._builder = BatchUpdateBuilder()
        self._end = 0  # rows in use lie below it, with holes only during a step

    def __len__(self) -> int:
        return len(self.row_of)

    def remove(self, request_id: str) -> None:
        """Empty the request's row; a request that is not in the batch is ignored."""
        row = self.row_of.pop(request_id, None)
        if row is not None:
            self.requests[row] = None
            self._builder.remove(row)

    def add(self, request: WorkerRequest, block_ids: BlockIds, num_computed: int) -> int:
        """Take the lowest free row; raises ValueError for a request the batch has no room for."""
        if request.request_id in self.row_of:
            raise ValueError(f"request {request.request_id} is in the batch already")
        if request.num_tokens > self.max_model_len:
            raise ValueError(
                f"request {request.request_id} has {request.num_tokens} tokens and the batch holds "
                f"at most {self.max_model_len}"
            )
        row = self._free_row()
        self.requests[row] = request
        self.row_of[request.request_id] = row
        prompt_length, length = len(request.prompt_token_ids), request.num_tokens
        self.token_ids[row, :prompt_length] = request.prompt_token_ids
        self.token_ids[row, prompt_length:length] = request.output_token_ids
        self.num_tokens[row] = length
        self.num_computed[row] = num_computed
        self.tables.add_row(block_ids, row)
        self._builder.add(
            AddedRow(row, request.params, request.prompt_token_ids, request.output_token_ids)
        )
        return row

    def append_tokens(self, row: int, token_ids: Sequence[int]) -> None:
        """Add sampled tokens, to the row and to the request's own list."""
        request = self.requests[row]
        if request is None:
            raise ValueError(f"row {row} of the batch is empty")
        start = int(self.num_tokens[row])
        # The last token of a full context is delivered but never computed, so it needs no place.
        fits = token_ids[: max(0, self.max_model_len - start)]
        self.token_ids[row, start : start + len(fits)] = fits
        self.num_tokens[row] = start + len(token_ids)
        request.output_token_ids.extend(token_ids)

    def finish(self) -> BatchUpdate | None:
        """Close the holes; what changed since the last call, None for nothing."""
        size = len(self)
        while (hole := self._builder.peek_removed()) is not None and hole < size:
            while self.requests[self._end - 1] is None:
                self._end -= 1
            self._builder.pop_removed()
            self._move(self._end - 1, hole)
        self._end = size
        return self._builder.finish(size)

    def held_rows(self) -> list[HeldRow]:
        """The row of every request in the batch. After an update that broke off in the middle: of
        each that is whole. What that update was adding may be left out; the other rows are
        untouched."""
        held = []
        for request_id, row in self.row_of.items():
            request = self.requests[row]
            if request is not None and request.request_id == request_id:
                blocks = self.tables.block_ids(row)
                held.append(HeldRow(request, blocks, int(self.num_computed[row])))
        return held

    def refill(self, held: Iterable[HeldRow]) -> None:
        """Take the place of a step's removals: only these are in the batch, and the next
        BatchUpdate empties all rows and fills them anew."""
        self.requests = [None] * len(self.requests)
        self.row_of.clear()
        self._builder = BatchUpdateBuilder()
        self._end = len(self.requests)
        for row in range(self._end):
            self._builder.remove(row)
        for request, block_ids, num_computed in held:
            self.add(request, block_ids, num_computed)

    def _free_row(self) -> int:
        row = self._builder.pop_removed()
        if row is not None:
            return row
        if self._end == len(self.requests):
            raise ValueError(f"the batch is full with {self._end} requests")
        self._end += 1
        return self._end - 1

    def _move(self, source: int, target: int) -> None:
        request = self.requests[source]
        if request is None:
            raise ValueError(f"row {source} of the batch is empty")
        length = min(int(self.num_tokens[source]), self.max_model_len)
        self.token_ids[target, :length] = self.token_ids[source, :length]
        self.num_tokens[target] = self.num_tokens[source]
        self.num_computed[target] = self.num_computed[source]
        self.tables.move_row(source, target)
        self.requests[source], self.requests[target] = None, request
        self.row_of[request.request_id] = target
        self._builder.move(source, target)
