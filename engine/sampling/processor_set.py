# SPDX-License-Identifier: Apache-2.0
"""ProcessorSet: applies an engine's logits processors to the rows of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...tiers.settings.values import ConfigError
from ..batch.batch_update import BatchUpdate, IntArray
from .processor_loading import LoadedProcessor
from .processors.base import Drafts, LogitsProcessor, ProcessorContext
from .processors.builtin import BadWords, LogitBias, MinP, MinTokens, Penalties
from .processors.guarded import GuardedProcessor
from .processors.thinking import ThinkingBudget
from .row_states import RowStates

# Penalties come after biases: the repetition penalty depends on the sign of the biased logit.
BUILT_IN: tuple[type[LogitsProcessor], ...] = (
    MinTokens, BadWords, LogitBias, Penalties, MinP, ThinkingBudget,
)  # fmt: skip


class LogitsRows(NamedTuple):
    """The batch row, draft offset and draft tokens of each row of logits, as in
    `LogitsProcessor.apply`."""

    rows: IntArray  # rows of the persistent batch
    offsets: IntArray | None = None
    drafts: Drafts | None = None

    def at(self, indices: IntArray) -> LogitsRows:
        """Return the rows of logits at `indices`, with their offsets and drafts."""
        if self.offsets is None or self.drafts is None:
            return LogitsRows(self.rows[indices])
        drafts = [self.drafts[index] for index in indices.tolist()]
        return LogitsRows(self.rows[indices], self.offsets[indices], drafts)


class ProcessorSet:
    """The logits processors of one sampler, in the order in which they are applied.

    Processors that can change the most likely token run before the greedy choice, all other
    processors after the temperature. All processors get every BatchUpdate; only active ones run."""

    def __init__(
        self,
        processors: Iterable[LogitsProcessor],
        context: ProcessorContext | None = None,
        loaded: Iterable[LoadedProcessor] = (),
    ) -> None:
        """`loaded` are processors of other packages, which are made with `context` and applied
        last. Raises ConfigError if a processor cannot be made."""
        others: list[GuardedProcessor] = []
        if context is not None:
            self._failed = RowStates[str](context.max_rows, lambda added: None)
            others = [_guard(*one, context, self._failed.put) for one in loaded]
        self._others = tuple(others)
        self._all = (*processors, *others)
        self._before_choice = [one for one in self._all if not one.is_argmax_invariant]
        # The thinking budget is applied last, so no other processor changes a forced end mark.
        self._before_choice.sort(key=lambda one: isinstance(one, ThinkingBudget))
        self._after_temperature = [one for one in self._all if one.is_argmax_invariant]

    @classmethod
    def built_in(
        cls, context: ProcessorContext, loaded: Iterable[LoadedProcessor] = ()
    ) -> ProcessorSet:
        return cls((processor(context) for processor in BUILT_IN), context, loaded)

    def failures(self, rows: IntArray) -> dict[int, str]:
        """Return the error text of each row for which a processor of another package has failed, by
        index in `rows`. A text is kept until another request takes the row."""
        return dict(self._failed.of(rows)) if self._others else {}

    def take_drafts(self, rows: IntArray) -> npt.NDArray[np.bool_]:
        """Return, as bool `[len(rows)]`, whether each row may have draft tokens. A row may have
        them if all processors that apply to the row support draft tokens."""
        may: npt.NDArray[np.bool_] = np.ones(len(rows), np.bool_)
        for processor in self._others:
            may[processor.refuses_drafts(rows)] = False
        return may

    def update_state(self, update: BatchUpdate) -> None:
        if self._others:
            self._failed.update(update)
        for processor in self._all:
            processor.update_state(update)

    def before_choice(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """Apply the processors that also affect greedy rows: bans, biases and penalties. May
        overwrite `logits`."""
        return _apply(self._before_choice, logits, rows)

    def after_temperature(self, logits: Tensor, rows: LogitsRows) -> Tensor:
        """Apply the processors that affect random sampling only. May overwrite `logits`."""
        return _apply(self._after_temperature, logits, rows)


def _guard(
    name: str,
    kind: type[LogitsProcessor],
    context: ProcessorContext,
    note_failure: Callable[[int, str], None],
) -> GuardedProcessor:
    try:
        return GuardedProcessor(name, kind, context, note_failure)
    except Exception as error:  # code of another package may raise anything
        raise ConfigError(
            f"the logits processor {name} cannot be made: {type(error).__name__}: {error}; its "
            "constructor takes a ProcessorContext"
        ) from error


def _apply(processors: Sequence[LogitsProcessor], logits: Tensor, rows: LogitsRows) -> Tensor:
    for processor in processors:
        if processor.is_active:
            logits = processor.apply(logits, *rows)
    return logits
