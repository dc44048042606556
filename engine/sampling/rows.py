# SPDX-License-Identifier: Apache-2.0
"""What the sampler itself keeps for each row of the batch, kept in step by BatchUpdates alone.

Knows nothing of logits, of logits processors or of requests beyond their parameters and output
lists.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..batch.batch_update import AddedRow, BatchUpdate
from ..worker.block_table import IntArray
from .row_states import RowStates, RowValues

NO_LOGPROBS = -1

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class Seeded(NamedTuple):
    """A request that draws by its own seed."""

    seed: int
    output_token_ids: list[int]


class SamplingRows:
    """Parameters by row: numbers as arrays, seeds for the rows that have one."""

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        def top_k(added: AddedRow) -> int:
            asked = added.params.top_k
            return asked if 0 < asked < vocab_size else vocab_size

        self._temperature = RowValues(max_rows, np.float64(0.0), _temperature)
        self._top_k = RowValues(max_rows, np.int64(vocab_size), top_k)
        self._top_p = RowValues(max_rows, np.float64(1.0), lambda added: added.params.top_p)
        self._logprobs = RowValues(max_rows, np.int64(NO_LOGPROBS), _num_logprobs)
        self.seeded = RowStates(max_rows, _seeded)

    @property
    def temperature(self) -> npt.NDArray[np.float64]:
        return self._temperature.values

    @property
    def top_k(self) -> IntArray:
        """The vocabulary's size where every token is kept."""
        return self._top_k.values

    @property
    def top_p(self) -> npt.NDArray[np.float64]:
        return self._top_p.values

    @property
    def num_logprobs(self) -> IntArray:
        """How many likeliest tokens are asked for, NO_LOGPROBS where nothing is."""
        return self._logprobs.values

    def update(self, update: BatchUpdate) -> None:
        """Take in one step's changes: removed, added, moved."""
        for numbers in (self._temperature, self._top_k, self._top_p, self._logprobs):
            numbers.update(update)
        self.seeded.update(update)


def _temperature(added: AddedRow) -> float:
    # Below, a division in float32 would be by zero; such draws are greedy anyway.
    temperature = added.params.temperature
    return temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0


def _num_logprobs(added: AddedRow) -> int:
    asked = added.params.logprobs
    return NO_LOGPROBS if asked is None else asked


def _seeded(added: AddedRow) -> Seeded | None:
    params = added.params
    if params.seed is None or params.is_greedy:
        return None
    return Seeded(params.seed, added.output_token_ids)
