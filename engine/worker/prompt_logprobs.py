# SPDX-License-Identifier: Apache-2.0
"""PromptLogprobsCollector: the log-probabilities of prompts, computed in the steps that compute the
prompts.

The logits at a position give the probabilities of the next token. So a chunk gives the
log-probabilities (entries) of the tokens after its positions; the prompt's last position gives
none, since the sampler uses its logits.

    position        0     1     2     3     4
    prompt          a     b     c     d     e
    chunk                [1     2     3)
    its entries                 c     d         entries[0] stays None

Entries are stored by position. If a prompt is computed again after a preemption, its entries are
overwritten."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..batch.batch_update import IntArray
from ..request.logprobs import PromptLogprobs
from ..sampling.copies import to_device
from ..sampling.logprob_tensors import prompt_logprobs
from ..scheduler.output import ModelRunnerOutput
from .input_batch import InputBatch, WorkerRequest

# Rows at once: float32 logits of a whole prompt of 4,096 tokens with 128,000 words take 2 GB.
LOGITS_ROWS = 256


@dataclass(frozen=True, slots=True)
class PromptWish:
    """A request for prompt log-probabilities that have not been delivered yet."""

    request: WorkerRequest
    count: int  # number of likeliest tokens at each position
    entries: PromptLogprobs


class PromptPiece(NamedTuple):
    """Positions `start` to `stop` (exclusive) of one prompt, computed in this step."""

    wish: PromptWish
    start: int
    stop: int
    first_row: int  # row of `start` among the tokens of the step

    @property
    def hidden_rows(self) -> IntArray:
        return np.arange(self.first_row, self.first_row + self.stop - self.start)


class PromptLogprobsCollector:
    """The requests whose prompt log-probabilities have not been delivered. Each step calls
    `plan_prompt_pieces`, then `add_hidden_states`, then `deliver`."""

    def __init__(self, logits: Callable[[Tensor], Tensor]) -> None:
        """`logits` computes `[rows, vocab]` from hidden states `[rows, hidden]`."""
        self._logits = logits
        self._wishes: dict[str, PromptWish] = {}

    @property
    def is_active(self) -> bool:
        """Whether the prompt log-probabilities of some request have not been delivered yet."""
        return bool(self._wishes)

    def add(self, request: WorkerRequest) -> None:
        """Add a new request that requests prompt log-probabilities. A request that already has
        output tokens got its entries before it was preempted."""
        count = request.params.prompt_logprobs
        if count is not None and not request.output_token_ids:
            entries: PromptLogprobs = [None] * len(request.prompt_token_ids)
            self._wishes[request.request_id] = PromptWish(request, count, entries)

    def remove_logprobs(self, request_id: str) -> None:
        """Drop an ended request. A request without undelivered entries is ignored."""
        self._wishes.pop(request_id, None)

    def plan_prompt_pieces(
        self, batch: InputBatch, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> list[PromptPiece]:
        """Return the pieces of prompts in a step in which each of `rows` of the batch computes
        `counts` tokens after its `computed` tokens."""
        first_rows = np.cumsum(counts) - counts
        row_index = {row: index for index, row in enumerate(rows.tolist())}
        pieces = []
        for request_id, wish in self._wishes.items():
            index = row_index.get(batch.row_of.get(request_id, -1))
            if index is None:
                continue
            start = int(computed[index])
            stop = min(start + int(counts[index]), len(wish.entries) - 1)
            if start < stop:
                pieces.append(PromptPiece(wish, start, stop, int(first_rows[index])))
        return pieces

    def add_hidden_states(self, pieces: Sequence[PromptPiece], hidden: Tensor) -> int:
        """Compute entries from the hidden states of the pieces' rows, which are in the order of the
        pieces. Return the number of these rows."""
        offset = 0
        for wish, start, stop, _ in pieces:
            for begin in range(start, stop, LOGITS_ROWS):
                end = min(begin + LOGITS_ROWS, stop)
                tokens = wish.request.prompt_token_ids[begin + 1 : end + 1].astype(np.int64)
                logits = self._logits(hidden[offset : offset + end - begin])
                made = prompt_logprobs(logits, to_device(tokens, logits.device), wish.count)
                wish.entries[begin + 1 : end + 1] = made
                offset += end - begin
        return offset

    def deliver(self, requests: Iterable[WorkerRequest], result: ModelRunnerOutput) -> None:
        """Add entries to the result, for those of `requests` (sampled in this step) that got their
        first token. Another request with the same id gets no entries."""
        for request in requests:
            request_id = request.request_id
            wish = self._wishes.get(request_id)
            if wish is None or wish.request is not request:
                continue
            if result.sampled_token_ids.get(request_id):
                result.prompt_logprobs[request_id] = self._wishes.pop(request_id).entries
