# SPDX-License-Identifier: Apache-2.0
"""One seam between a step and the attention that computes it.

    gather     torch's attention over gathered blocks: the CPU (`GatherForward`, here)
    kernels    the kernels of `kernels/` over buffers that stay: `kernel_forward.py`

Both are given the same steps and give the same hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from ....tiers.block import BlockLayout
from ...models.attention import PagedAttention
from ...models.decoder import Decoder
from .attention_metadata import AttentionPlanner
from .step_inputs import StepInputs

Launch = Callable[[], Tensor]


class StepForward(Protocol):
    """A model over one pool."""

    def prepare(self, step: StepInputs) -> Launch:
        """Lay the step down. What is returned computes it, once and before the next `prepare`:
        hidden states `[len(step.wanted), hidden]`."""


class GatherForward:
    """Attention of torch over gathered blocks; tensors share the memory of the step's arrays."""

    def __init__(
        self,
        model: Decoder,
        pool: Tensor,
        layout: BlockLayout,
        dtype: torch.dtype,
        max_model_len: int,
    ) -> None:
        self._model = model
        self.planner = AttentionPlanner(layout, dtype, max_model_len)
        self._attention = PagedAttention(
            pool, layout, model.spec.num_heads, self.planner.max_group_blocks
        )

    def prepare(self, step: StepInputs) -> Launch:
        plan = self.planner.plan(step.table, step.rows, step.computed, step.counts, step.slots)

        def launch() -> Tensor:
            return self._model.forward(
                torch.from_numpy(step.token_ids),
                torch.from_numpy(step.positions),
                self._attention,
                plan,
                torch.from_numpy(step.wanted),
            )

        return launch
