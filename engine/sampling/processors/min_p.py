# SPDX-License-Identifier: Apache-2.0
"""Min-p: tokens less likely than a share of the likeliest are never drawn.

The share is applied to probabilities after the temperature; between logits it is a difference, so
no softmax is needed. Knows nothing of top-k and top-p.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...batch.batch_update import AddedRow, BatchUpdate
from ...worker.block_table import IntArray
from ..copies import to_device
from ..row_states import RowValues
from .base import LogitsProcessor, ProcessorContext


class MinP(LogitsProcessor):
    """Bans what lies further below the best logit than `-log(min_p)`."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._log_shares = RowValues(context.max_rows, np.float64(-np.inf), _log_share)

    @property
    def is_argmax_invariant(self) -> bool:
        return True

    @property
    def is_active(self) -> bool:
        return bool((self._log_shares.values > -np.inf).any())

    def update_state(self, update: BatchUpdate) -> None:
        self._log_shares.update(update)

    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        log_shares = self._log_shares.values[rows]
        asked = np.flatnonzero(log_shares > -np.inf)
        if len(asked) == 0:
            return logits
        shares = to_device(log_shares[asked][:, None], logits.device).to(logits.dtype)
        if len(asked) == len(rows):
            return _keep_likely(logits, shares)
        index = to_device(asked, logits.device)
        logits[index] = _keep_likely(logits[index], shares)
        return logits


def _keep_likely(logits: Tensor, log_shares: Tensor) -> Tensor:
    floor = logits.amax(dim=-1, keepdim=True) + log_shares
    return logits.masked_fill_(logits < floor, -torch.inf)


def _log_share(added: AddedRow) -> float:
    share = added.params.min_p
    return math.log(share) if share > 0.0 else -math.inf
