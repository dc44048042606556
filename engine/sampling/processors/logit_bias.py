# SPDX-License-Identifier: Apache-2.0
"""Biases: numbers that a request adds to the logits of tokens it names.

Knows nothing of probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ...batch.batch_update import AddedRow
from ...worker.block_table import IntArray
from ..copies import to_device
from .entries import entries_of
from .stateful import StatefulProcessor


class Biases(NamedTuple):
    """Token ids and what is added to each."""

    token_ids: IntArray
    values: npt.NDArray[np.float64]


class LogitBias(StatefulProcessor[Biases]):
    """Adds. A token named twice gets both numbers."""

    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        asked = self._states.of(rows)
        if asked:
            parts = [(index, biases.token_ids) for index, biases in asked]
            entries = entries_of(parts, logits.device)
            added = np.concatenate([biases.values for _, biases in asked])
            values = to_device(added, logits.device)
            logits.index_put_(tuple(entries), values.to(logits.dtype), accumulate=True)
        return logits

    def _state_of(self, added: AddedRow) -> Biases | None:
        totals: dict[int, float] = {}
        for token, value in added.params.logit_bias:
            if 0 <= token < self.context.vocab_size:
                totals[token] = totals.get(token, 0.0) + value
        if not totals:
            return None
        return Biases(np.array(list(totals), np.int64), np.array(list(totals.values()), np.float64))
