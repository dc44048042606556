# SPDX-License-Identifier: Apache-2.0
"""What the sampler keeps for each row of the batch, kept in step by BatchUpdates alone.

Knows nothing of logits or of requests beyond their parameters and output lists.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..sampling_params import SamplingParams
from ..worker.batch_update import AddedRow, BatchUpdate, MoveKind

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)


class MinTokens(NamedTuple):
    """Ids that must not be sampled before the output has `minimum` tokens."""

    minimum: int
    banned: npt.NDArray[np.int64]
    output_token_ids: list[int]


class Seeded(NamedTuple):
    """A request that draws by its own seed."""

    seed: int
    output_token_ids: list[int]


class SamplingRows:
    """Parameters by row, as arrays; rare ones as dictionaries of the rows that have them."""

    def __init__(self, max_rows: int, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.temperature: npt.NDArray[np.float64] = np.zeros(max_rows)
        self.top_k: npt.NDArray[np.int64] = np.full(max_rows, vocab_size)  # vocab_size: all
        self.top_p: npt.NDArray[np.float64] = np.ones(max_rows)
        self.min_tokens: dict[int, MinTokens] = {}
        self.seeded: dict[int, Seeded] = {}
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids

    def update(self, update: BatchUpdate) -> None:
        """Take in one step's changes: removed, added, moved."""
        for row in update.removed:
            self._drop(row)
        for added in update.added:
            self._drop(added.row)
            self._add(added)
        for source, target, kind in update.moved:
            self._move(source, target, swap=kind is MoveKind.SWAP)

    def _add(self, added: AddedRow) -> None:
        row, params = added.row, added.params
        # Below, a division in float32 would be by zero; such draws are greedy anyway.
        is_random = params.temperature >= _SMALLEST_TEMPERATURE
        self.temperature[row] = params.temperature if is_random else 0.0
        self.top_k[row] = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        self.top_p[row] = params.top_p
        if params.seed is not None and not params.is_greedy:
            self.seeded[row] = Seeded(params.seed, added.output_token_ids)
        banned = self._ending_ids(params)
        if params.min_tokens > 0 and len(banned):
            self.min_tokens[row] = MinTokens(params.min_tokens, banned, added.output_token_ids)

    def _ending_ids(self, params: SamplingParams) -> npt.NDArray[np.int64]:
        """Ids that would end the request."""
        ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            ids.update(self._eos_token_ids)
        return np.array(sorted(i for i in ids if 0 <= i < self._vocab_size), np.int64)

    def _drop(self, row: int) -> None:
        self.temperature[row] = 0.0
        self.top_k[row] = self._vocab_size
        self.top_p[row] = 1.0
        self.min_tokens.pop(row, None)
        self.seeded.pop(row, None)

    def _move(self, source: int, target: int, *, swap: bool) -> None:
        for array in (self.temperature, self.top_k, self.top_p):
            array[[source, target]] = array[[target, source]]
        _exchange(self.min_tokens, source, target)
        _exchange(self.seeded, source, target)
        if not swap:
            self._drop(source)


def _exchange(states: dict[int, MinTokens] | dict[int, Seeded], first: int, second: int) -> None:
    one, other = states.pop(first, None), states.pop(second, None)
    if one is not None:
        states[second] = one  # type: ignore[assignment]
    if other is not None:
        states[first] = other  # type: ignore[assignment]
