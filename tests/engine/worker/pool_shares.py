# SPDX-License-Identifier: Apache-2.0
"""Pools of one model in two shares of a device's memory."""

from __future__ import annotations

from dataclasses import replace

from stratakv.engine.worker.model_runner import ModelRunner
from stratakv.engine.worker.pool_demand import PoolDemand
from stratakv.engine.worker.runtime.placement import Placement
from stratakv.engine.worker.runtime.runtimes import MemoryMeter, PoolSizer


def pools_of_two_shares(
    runner: ModelRunner, placement: Placement, meter: MemoryMeter
) -> tuple[int, int]:
    """Blocks in a share of 0.2 and in one of 0.4."""
    demand = PoolDemand(runner.groups, 4096)
    sizes = {"max_model_len": 1024, "max_tokens": 4096, "max_requests": 16}
    small, large = (
        PoolSizer(replace(placement, memory_share=share), meter).blocks(
            runner.model, demand, **sizes
        )
        for share in (0.2, 0.4)
    )
    return small, large
