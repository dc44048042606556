# SPDX-License-Identifier: Apache-2.0
"""PoolingCollector: the embeddings of prompts, computed from the hidden states of the steps that
compute the prompts.

    last    the hidden state of the prompt's last token
    mean    the mean over all of its tokens; each chunk adds to a sum in float64

The hidden states are those after the last norm. After a preemption, a prompt is computed again from
its first token, and the sum is computed again too."""

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
    """A request for an embedding that has not ended."""

    request: WorkerRequest
    total: Tensor | None = None  # float64 [hidden]: the sum over the first `num_summed` tokens
    num_summed: int = 0
    pooled: HostCopies | None = None  # set when the whole prompt is computed

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids)


class PooledPiece(NamedTuple):
    """The positions from `start` to `stop` (exclusive) of one prompt, whose hidden states are
    needed."""

    wish: PoolingWish
    start: int
    stop: int
    first_row: int  # row of `start` among the tokens of the step

    @property
    def hidden_rows(self) -> IntArray:
        return np.arange(self.first_row, self.first_row + self.stop - self.start)


class PoolingCollector:
    """The requests for embeddings that have not ended. Each step calls `plan_pooled_pieces`, then
    `add_hidden_states`, then `deliver`."""

    def __init__(self) -> None:
        self._wishes: dict[str, PoolingWish] = {}

    def add(self, request: WorkerRequest) -> None:
        """Add a new request that requests its embedding. A request that already has output tokens
        got its embedding before it was preempted."""
        if request.pooling and not request.output_token_ids:
            self._wishes[request.request_id] = PoolingWish(request)

    def remove_pooling(self, request_id: str) -> None:
        """Drop an ended request. A request for no embedding is ignored."""
        self._wishes.pop(request_id, None)

    def plan_pooled_pieces(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> list[PooledPiece]:
        """Return the needed pieces of a step in which each of `rows` of the batch computes `counts`
        tokens after its `computed` tokens. Raises RuntimeError if hidden states of earlier tokens,
        which a mean needs, are missing."""
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
        """Add the hidden states of the pieces' rows, in the order of the pieces."""
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
        """Add embeddings to the result, for those of `requests` (the requests that the step
        samples) that got their first token in this step. If a request is preempted and the
        scheduler drops this token, its embedding is computed again. Another request with the same
        id gets no embedding."""
        for request in requests if self._wishes else ():
            wish = self._wishes.get(request.request_id)
            if wish is None or wish.request is not request or wish.pooled is None:
                continue
            if result.sampled_token_ids.get(request.request_id):
                (vector,) = wish.pooled.wait()
                result.embeddings[request.request_id] = vector.numpy().astype("<f8").tobytes()
                wish.pooled = None
