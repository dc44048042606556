# SPDX-License-Identifier: Apache-2.0
"""Rows for samplers and logits processors: requests in their rows, and the life of a batch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from stratakv.engine.batch.batch_update import AddedRow, BatchUpdate, MovedRow
from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.sampling.copies import to_host
from stratakv.engine.sampling.logprob_tensors import position_entries, position_tensors

VOCAB = 12


class Output(list[int]):
    """An output list that a weak reference can watch."""


def row_of(
    row: int, wishes: dict[str, Any], prompt: Sequence[int] = (1,), output: Sequence[int] = ()
) -> AddedRow:
    params = SamplingParams(max_tokens=10_000, **wishes)
    return AddedRow(row, params, np.array(prompt, np.int32), Output(output))


def added(*rows: AddedRow) -> BatchUpdate:
    return BatchUpdate(len(rows), (), rows, ())


def position_logprobs(
    logprobs: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> list[PositionLogprobs]:
    """One entry for each row of `logprobs`: its own token and its count of the likeliest."""
    found = position_tensors(logprobs, token_ids, counts)
    return position_entries(to_host([*itertools.chain(*found)]), counts)


class RandomBatch:
    """Requests that come, move and leave; `rows` is what a reader of the updates should have."""

    def __init__(self, rng: random.Random, max_rows: int, vocab_size: int) -> None:
        self.rows: dict[int, AddedRow] = {}
        self._rng = rng
        self._max_rows = max_rows
        self._vocab_size = vocab_size

    def change(self, wishes: Sequence[dict[str, Any]]) -> BatchUpdate:
        """One step: some leave, some come with one of `wishes`, some move into another row."""
        rng = self._rng
        taken = sorted(self.rows)
        removed = sorted(rng.sample(taken, rng.randint(0, len(taken) // 2)), reverse=True)
        for row in removed:
            del self.rows[row]
        new = rng.sample(range(self._max_rows), rng.randint(0, 3))  # also where one is
        arrivals = [self._arrival(row, rng.choice(wishes)) for row in new]
        self.rows.update((one.row, one) for one in arrivals)
        moved = [self._move() for _ in range(rng.randint(0, 3)) if self.rows]
        return BatchUpdate(len(self.rows), removed, arrivals, moved)

    def clear(self) -> BatchUpdate:
        removed = sorted(self.rows, reverse=True)
        self.rows.clear()
        return BatchUpdate(0, removed, (), ())

    def grow(self) -> None:
        """What a step samples: one token more for some, two for a few."""
        for one in self.rows.values():
            one.output_token_ids.extend(self._tokens(self._rng.choice([0, 1, 1, 1, 2])))

    def now(self) -> BatchUpdate:
        """The batch as if all of it had come at once."""
        return added(*self.rows.values())

    def _arrival(self, row: int, wishes: dict[str, Any]) -> AddedRow:
        rng = self._rng
        output = self._tokens(rng.choice([0, 0, 0, 4]))  # some return after preemption
        return row_of(row, wishes, self._tokens(rng.randint(1, 6)), output)

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocab_size) for _ in range(count)]

    def _move(self) -> MovedRow:
        source = self._rng.choice(sorted(self.rows))
        target = self._rng.choice([row for row in range(self._max_rows) if row != source])
        self.rows[target] = self.rows.pop(source)._replace(row=target)
        return MovedRow(source, target)
