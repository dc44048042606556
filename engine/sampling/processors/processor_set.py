# SPDX-License-Identifier: Apache-2.0
"""The logits processors of one sampler, in the order in which they are applied.

Those that can change which token is likeliest come before the greedy choice, the others after the
temperature. Knows nothing of what each of them does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ...batch.batch_update import BatchUpdate
from ...worker.block_table import IntArray
from .bad_words import BadWords
from .base import LogitsProcessor, ProcessorContext
from .logit_bias import LogitBias
from .min_p import MinP
from .min_tokens import MinTokens
from .penalties import Penalties

# Penalties last of those before the choice: repetition looks at the sign that biases leave.
BUILT_IN: tuple[type[LogitsProcessor], ...] = (MinTokens, BadWords, LogitBias, Penalties, MinP)


class ProcessorSet:
    """Keeps all up to date and applies those that are active."""

    def __init__(self, processors: Iterable[LogitsProcessor]) -> None:
        self._all = tuple(processors)
        self._before_choice = [one for one in self._all if not one.is_argmax_invariant]
        self._after_temperature = [one for one in self._all if one.is_argmax_invariant]

    @classmethod
    def built_in(cls, context: ProcessorContext) -> ProcessorSet:
        return cls(processor(context) for processor in BUILT_IN)

    def update_state(self, update: BatchUpdate) -> None:
        for processor in self._all:
            processor.update_state(update)

    def before_choice(self, logits: Tensor, rows: IntArray) -> Tensor:
        """Bans, biases and penalties, which greedy rows obey too. May overwrite `logits`."""
        return _apply(self._before_choice, logits, rows)

    def after_temperature(self, logits: Tensor, rows: IntArray) -> Tensor:
        """What only a draw can notice. May overwrite `logits`."""
        return _apply(self._after_temperature, logits, rows)


def _apply(processors: Sequence[LogitsProcessor], logits: Tensor, rows: IntArray) -> Tensor:
    for processor in processors:
        if processor.is_active:
            logits = processor.apply(logits, rows)
    return logits
