# SPDX-License-Identifier: Apache-2.0
"""The promise of a logits processor: it changes the logits of a whole batch at once.

    made once for a sampler ──► update_state with every BatchUpdate ──► apply in every step

State is kept by row of the persistent batch and follows requests through BatchUpdates alone
(`RowStates` and `RowValues` in row_states.py do that). A processor knows nothing of schedulers or
of other processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ...batch.batch_update import BatchUpdate
from ...worker.block_table import IntArray


@dataclass(frozen=True, slots=True)
class ProcessorContext:
    """What a processor may know of the engine."""

    max_rows: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()


class LogitsProcessor(ABC):
    """One kind of change.

    A caller may rely on: rows it has not asked for stay as they are; a row whose request asked for
    nothing comes back unchanged, bit for bit; what a row becomes depends on its own request alone,
    not on its index nor on other rows; nothing is kept of a removed row; token ids of a request
    that lie outside the vocabulary are ignored.

    A processor may rely on: one thread calls it; every BatchUpdate arrives before the next `apply`;
    an output list only grows while its request holds a row, and has every token sampled before;
    a request that returns after preemption is added again. It must not change that list, nor keep
    `logits` or `rows` after `apply`.
    """

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @property
    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token always stays the likeliest; never changes. Such a processor
        is applied to rows that draw at random only, after the temperature."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether any row may need `apply` now; it is left out otherwise."""

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Take in one step's changes: rows removed, then added, then moved."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        """Change `logits` `[len(rows), vocab]`, float32 or float64, in place or not, and return
        them, of the same shape and type. `rows` are the rows of the batch that they belong to, in
        any order and not always all of them. A logit of -inf is a banned token and must stay so."""
