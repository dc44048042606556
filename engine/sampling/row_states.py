# SPDX-License-Identifier: Apache-2.0
"""State by row of the persistent batch. The state moves with the requests from row to row.

`RowValues` holds one number for every row, as an array; `RowStates` holds an object for the few
rows that need one. The content changes only by BatchUpdates; an emptied row has no state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..batch.batch_update import AddedRow, BatchUpdate, IntArray

NO_LOGPROBS = -1

_SMALLEST_TEMPERATURE = float(np.finfo(np.float32).tiny)

# A temporary array of 2**20 float64 takes 8 MiB. An array for a whole batch with a large vocabulary
# would take hundreds of MiB, allocated each time: a draw from 256 rows took five times as long.
LOGITS_CHUNK_CPU = 2**20
# An array of 64 MiB, for a GPU, where each part costs some thirty kernel launches.
LOGITS_CHUNK_GPU = 2**23


class Seeded(NamedTuple):
    """A request that is sampled with its own seed."""

    seed: int
    output_token_ids: list[int]


class SamplingRows:
    """The sampler's parameters by row: arrays of numbers, and the seeds of seeded rows."""

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
        """The number of tokens that top-k keeps, by row; the vocabulary's size keeps all tokens."""
        return self._top_k.values

    @property
    def top_p(self) -> npt.NDArray[np.float64]:
        return self._top_p.values

    @property
    def num_logprobs(self) -> IntArray:
        """The number of most likely tokens to report, by row; NO_LOGPROBS for a row without
        log-probabilities."""
        return self._logprobs.values

    def apply_batch_update(self, update: BatchUpdate) -> None:
        for numbers in (self._temperature, self._top_k, self._top_p, self._logprobs):
            numbers.update(update)
        self.seeded.update(update)


def _temperature(added: AddedRow) -> float:
    # A smaller temperature would be zero in float32; such draws are greedy anyway.
    temperature = added.params.temperature
    return temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0


def _num_logprobs(added: AddedRow) -> int:
    asked = added.num_likeliest or added.params.logprobs
    return NO_LOGPROBS if asked is None else asked


def _seeded(added: AddedRow) -> Seeded | None:
    params = added.params
    if params.seed is None or params.is_greedy:
        return None
    return Seeded(params.seed, added.output_token_ids)


Number = TypeVar("Number", np.float64, np.int64)
State = TypeVar("State")


class RowFollower(ABC):
    """A base class that applies BatchUpdates to data by row; subclasses define the data."""

    def update(self, update: BatchUpdate) -> None:
        """Apply the batch changes of one step: rows removed, then added, then moved."""
        for row in update.removed:
            self._clear_row(row)
        for added in update.added:
            self._clear_row(added.row)
            self._add(added)
        for source, target in update.moved:
            self._move_row_state(source, target)

    @abstractmethod
    def _add(self, added: AddedRow) -> None: ...

    @abstractmethod
    def _clear_row(self, row: int) -> None: ...

    @abstractmethod
    def _move_row_state(self, source: int, target: int) -> None:
        """Move the content of row `source` to row `target`, and empty `source`."""


class RowValues(RowFollower, Generic[Number]):
    """A number for each row: `value_of` the row's request, or `empty` without a request."""

    def __init__(
        self, max_rows: int, empty: Number, value_of: Callable[[AddedRow], float | int]
    ) -> None:
        self.values: npt.NDArray[Number] = np.full(max_rows, empty, empty.dtype)
        self._empty: Number = empty
        self._value_of = value_of

    def _add(self, added: AddedRow) -> None:
        self.values[added.row] = self._value_of(added)

    def _clear_row(self, row: int) -> None:
        self.values[row] = self._empty

    def _move_row_state(self, source: int, target: int) -> None:
        self.values[target] = self.values[source]
        self._clear_row(source)


class RowStates(RowFollower, Generic[State]):
    """An object for each row for whose request `state_of` does not return None. A RowStates without
    objects is falsy."""

    def __init__(self, max_rows: int, state_of: Callable[[AddedRow], State | None]) -> None:
        self._states: dict[int, State] = {}
        self._has_state: npt.NDArray[np.bool_] = np.zeros(max_rows, np.bool_)
        self._state_of = state_of

    def __bool__(self) -> bool:
        return bool(self._states)

    def of(self, rows: IntArray) -> list[tuple[int, State]]:
        """Return the states in `rows`, each with its index in `rows`. Rows without a state are not
        visited."""
        if not self._states:
            return []
        indices = np.flatnonzero(self._has_state[rows])
        states = map(self._states.__getitem__, rows[indices].tolist())
        return list(zip(indices.tolist(), states, strict=True))

    def put(self, row: int, state: State) -> None:
        self._states[row] = state
        self._has_state[row] = True

    def items(self) -> list[tuple[int, State]]:
        return list(self._states.items())

    def discard(self, row: int) -> None:
        """Drop the state of a row whose request is still in the batch."""
        self._clear_row(row)

    def _add(self, added: AddedRow) -> None:
        state = self._state_of(added)
        if state is not None:
            self.put(added.row, state)

    def _clear_row(self, row: int) -> None:
        self._states.pop(row, None)
        self._has_state[row] = False

    def _move_row_state(self, source: int, target: int) -> None:
        state = self._states.get(source)
        self._clear_row(source)
        self._clear_row(target)
        if state is not None:
            self.put(target, state)


def row_parts(num_rows: int, vocab_size: int, device_type: str = "cpu") -> Iterator[slice]:
    """Yield consecutive slices of all rows, each of at most LOGITS_CHUNK_* logits or one row."""
    at_once = LOGITS_CHUNK_CPU if device_type == "cpu" else LOGITS_CHUNK_GPU
    size = max(1, at_once // max(1, vocab_size))
    for start in range(0, num_rows, size):
        yield slice(start, min(num_rows, start + size))
