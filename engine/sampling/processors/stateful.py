# SPDX-License-Identifier: Apache-2.0
"""A logits processor that keeps an object for each request that asks for something.

The form of most of them: they may change which token is the likeliest, and a row without a state
is left alone. A subclass says what a request's state is and what it does to the logits.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Generic, TypeVar

from ...batch.batch_update import AddedRow, BatchUpdate
from ..row_states import RowStates
from .base import LogitsProcessor, ProcessorContext

State = TypeVar("State")


class StatefulProcessor(LogitsProcessor, Generic[State]):
    """`self._states.of(rows)` are the states among the rows of an `apply`."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._states: RowStates[State] = RowStates(context.max_rows, self._state_of)

    @property
    def is_argmax_invariant(self) -> bool:
        return False

    @property
    def is_active(self) -> bool:
        return bool(self._states)

    def update_state(self, update: BatchUpdate) -> None:
        self._states.update(update)

    @abstractmethod
    def _state_of(self, added: AddedRow) -> State | None:
        """What is kept of a request; None for one that asks for nothing."""
