# SPDX-License-Identifier: Apache-2.0
"""The promise of a logits processor: it changes the logits of a whole batch at once.

    made once for a sampler ──► update_state with every BatchUpdate ──► apply in every step

State is kept by row of the persistent batch and follows requests through BatchUpdates alone. A
processor knows nothing of schedulers or of other processors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from ...sampling_params import SamplingParams
from ...worker.batch_update import BatchUpdate
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
    nothing comes back unchanged; nothing is kept of a removed row.
    """

    @classmethod  # noqa: B027 - most have no rule of their own
    def validate_params(cls, params: SamplingParams) -> None:
        """Raise ValueError, naming the field, for what this processor cannot do."""

    def __init__(self, context: ProcessorContext) -> None:
        self.context = context

    @property
    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the likeliest token always stays the likeliest. Such a processor is applied to
        rows that draw at random only, after the temperature."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """Whether any row asks for something now; `apply` is left out otherwise."""

    @abstractmethod
    def update_state(self, update: BatchUpdate) -> None:
        """Take in one step's changes: rows removed, then added, then moved."""

    @abstractmethod
    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        """Change `logits` `[len(rows), vocab]`, float32 or float64, in place or not, and return
        them. `rows` are the rows of the batch that they belong to."""
