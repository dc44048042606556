# SPDX-License-Identifier: Apache-2.0
"""Embeddings of prompts: pooled hidden states, collected over the steps that compute them.

    last    the hidden state of the prompt's last token
    mean    the mean over all of its tokens; each chunk adds to a sum in float64

The states are those behind the last norm. After a preemption a prompt is computed again from its
first token, and its sum starts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..batch.batch_update import IntArray
from ..config.engine_config import MEAN
from ..sampling.copies import HostCopies, begin_to_host
from ..scheduler.output import ModelRunnerOutput
from .input_batch import InputBatch, WorkerRequest


@dataclass(slots=True)
class PoolingWish:
    """A request that asks for its embedding, until it ends."""

    request: WorkerRequest
    total: Tensor | None = None  # float64 [hidden]: the sum over the first `num_summed` tokens
    num_summed: int = 0
    pooled: HostCopies | None = None  # of the whole prompt

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class PooledPiece(NamedTuple):
    """The positions `start` to `stop` (exclusive) of one prompt whose states are needed."""

    wish: PoolingWish
    start: int
    stop: int
    first_row: int  # of `start` among the tokens of the step

    @property
    def hidden_rows(self) -> IntArray:
        return np.arange(self.first_row, self.first_row + self.stop - self.start)


class PoolingCollector:
    """The open wishes for embeddings. Each step calls `plan_pooled_pieces`, then
    `add_hidden_states`, then `deliver`."""

    def __init__(self) -> None:
        self._wishes: dict[str, PoolingWish] = {}

    def add(self, request: WorkerRequest) -> None:
        """Add a new request, if it asks for its embedding. One that already has output got it
        before its preemption."""
        if request.pooling and not request.output_token_ids:
            self._wishes[request.request_id] = PoolingWish(request)

    def remove_pooling(self, request_id: str) -> None:
        """Drop the wish of a request that has ended; a request without one is ignored."""
        self._wishes.pop(request_id, None)

    def plan_pooled_pieces(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> list[PooledPiece]:
        """Return the pieces that are needed of a step, which computes `counts` tokens of each of
        these rows of the batch after `computed` ones. Raises RuntimeError if a mean lacks tokens
        before them, which were not computed."""
        if not self._wishes:
            return []
        first_rows = np.cumsum(counts) - counts
        row_index = {row: index for index, row in enumerate(rows.tolist())}
        pieces = []
        for request_id, wish in self._wishes.items():
            index = row_index.get(batch.row_of.get(request_id, -1))
            if index is None:
                continue
            begin = start = int(computed[index])
            stop = min(start + int(counts[index]), wish.num_tokens)
            if wish.request.pooling != MEAN:
                start = wish.num_tokens - 1
            elif start not in (0, wish.num_summed) and start < stop:
                raise RuntimeError(
                    f"the mean of {request_id} needs the states of all tokens, and after the first "
                    f"{wish.num_summed} come those from {start} on"
                )
            if begin <= start < stop:
                first_row = int(first_rows[index]) + start - begin
                pieces.append(PooledPiece(wish, start, stop, first_row))
        return pieces

    def add_hidden_states(self, pieces: Sequence[PooledPiece], hidden: Tensor) -> None:
        """Add the hidden states of the pieces' rows, one piece after the other."""
        offset = 0
        for wish, start, stop, _ in pieces:
            part = hidden[offset : offset + stop - start].sum(0, dtype=torch.float64)
            offset += stop - start
            if wish.request.pooling == MEAN:
                wish.total = part if start == 0 or wish.total is None else wish.total + part
                wish.num_summed = stop
                part = wish.total / wish.num_tokens
            if stop == wish.num_tokens:
                wish.pooled = begin_to_host([part])

    def deliver(self, requests: Iterable[WorkerRequest], result: ModelRunnerOutput) -> None:
        """Add to the result the embeddings of those of `requests` that got their first token in
        this step, which samples for all of them. If the scheduler drops one because the request was
        sent back, it is made again. Another request may have taken the id of one since."""
        for request in requests if self._wishes else ():
            wish = self._wishes.get(request.request_id)
            if wish is None or wish.request is not request or wish.pooled is None:
                continue
            if result.sampled_token_ids.get(request.request_id):
                (vector,) = wish.pooled.wait()
                result.embeddings[request.request_id] = vector.numpy().astype("<f8").tobytes()
                wish.pooled = None
