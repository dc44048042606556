# SPDX-License-Identifier: Apache-2.0
"""How much of a device's memory a model leaves to its pool: measured, and checked on the way.

The largest step that a model may meet is run without a pool. Attention is left out of it: its
kernels take no memory but their result, which is counted. Knows nothing of CUDA.
"""

from __future__ import annotations

import logging
from typing import Protocol

import torch
from torch import Tensor

from ....tiers.block import BlockLayout
from ...models.decoder import Decoder
from ...sampling.logprobs import raw_logprobs
from .device_config import Placement
from .pool_sizing import MemoryUse, check_free, pool_blocks

logger = logging.getLogger(__name__)


class MemoryMeter(Protocol):
    """What a device says of its memory."""

    def total_bytes(self) -> int: ...

    def free_bytes(self) -> int: ...

    def held_bytes(self) -> int:
        """By torch's allocator, of this process."""

    def peak_bytes(self) -> int:
        """The most that it held since `reset_peak`."""

    def reset_peak(self) -> None: ...


class _NoAttention:
    """Takes the memory of a result and computes none."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int, plan: None) -> Tensor:
        return torch.zeros((len(q), q[0].numel()), dtype=q.dtype, device=q.device)


class PoolSizer:
    """Made before the weights are loaded, asked after."""

    def __init__(self, placement: Placement, meter: MemoryMeter) -> None:
        """Raises ConfigError where the share of the memory is not free."""
        self._placement, self._meter = placement, meter
        self._free_before_bytes = meter.free_bytes()
        check_free(meter.total_bytes(), self._free_before_bytes, placement.memory_share)

    def blocks(
        self,
        model: Decoder,
        layout: BlockLayout,
        *,
        max_model_len: int,
        max_tokens: int,
        max_requests: int,
    ) -> int:
        """The blocks of the pool; raises ConfigError where one request does not fit."""
        use = self.measure(model, max_tokens, max_requests)
        blocks = pool_blocks(use, layout, max_model_len, self._placement.memory_share)
        logger.info(
            "GPU memory: %.2f GiB of weights, %.2f GiB for steps, %d blocks of K and V (%.2f GiB)",
            use.weight_bytes / 2**30,
            (use.peak_bytes - use.weight_bytes) / 2**30,
            blocks,
            blocks * layout.page_bytes / 2**30,
        )
        return blocks

    @torch.inference_mode()
    def measure(self, model: Decoder, max_tokens: int, max_requests: int) -> MemoryUse:
        """Run a prompt step of `max_tokens`, and `max_requests` logits with log-probabilities."""
        meter, device = self._meter, self._placement.device
        meter.reset_peak()
        weight_bytes = meter.held_bytes()
        ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        rows = ids[: min(max_requests, max_tokens)]
        logits = model.logits(model.forward(ids, ids, _NoAttention(), None, rows))
        raw_logprobs(logits.float())
        return MemoryUse(
            total_bytes=meter.total_bytes(),
            free_before_bytes=self._free_before_bytes,
            free_after_bytes=meter.free_bytes(),
            held_after_bytes=meter.held_bytes(),
            weight_bytes=weight_bytes,
            peak_bytes=meter.peak_bytes(),
        )
