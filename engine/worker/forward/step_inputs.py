# SPDX-License-Identifier: Apache-2.0
"""What one forward pass computes, in host memory: the form in which the batch hands it on.

Requests that compute one token come first, then those that compute several, so that attention finds
decodes and chunks each in one piece.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...batch.batch_update import IntArray
from ..block_table import BlockTable


@dataclass(frozen=True, slots=True)
class StepInputs:
    """`[requests]` arrays in the order of the step, `[tokens]` arrays request by request."""

    table: BlockTable
    rows: IntArray  # [requests] of the batch and its block table
    computed: IntArray  # [requests] tokens whose K and V are there
    counts: IntArray  # [requests] tokens to compute after them
    token_ids: IntArray  # [tokens]
    positions: IntArray  # [tokens]
    slots: IntArray  # [tokens] where their K and V go; -1: nowhere
    wanted: IntArray  # rows of the step whose hidden states are asked for

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decodes(self) -> int:
        """Requests that compute one token; they come first."""
        return int(np.count_nonzero(self.counts == 1))


def step_order(rows: IntArray, counts: IntArray) -> IntArray:
    """The order of a step: one token before several, then by row."""
    return np.lexsort((rows, counts > 1))
