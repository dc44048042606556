# SPDX-License-Identifier: Apache-2.0
"""The core's measurements of its steps, and the settings that are reported with the metrics.

All values are plain Python objects, because the call `stats` returns them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...connector.costs.rates import PrefillRate
from ...tiers.base import Histogram
from ...tiers.block import BlockLayout
from ..config.engine_config import EngineConfig
from ..scheduler.output import ModelRunnerOutput, SchedulerOutput
from .prefill_savings import PrefillSavings, PromptCost

_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)


class CoreStats:
    """Counters of computed steps. Counting a step takes a few additions."""

    def __init__(
        self,
        config: EngineConfig,
        layout: BlockLayout,
        num_blocks: int,
        prefill: PrefillRate | None = None,
        num_groups: int = 1,
    ) -> None:
        self.savings = PrefillSavings(prefill)
        self._step_tokens = Histogram(_TOKENS)
        self._max_tokens = Histogram(_TOKENS)
        self._cache_config = _cache_config(config, layout, num_blocks, num_groups)
        self._offload_config = _offload_config(config, layout) if config.offload.enabled else None

    def note_step(
        self, step: SchedulerOutput, result: ModelRunnerOutput, seconds: float
    ) -> PromptCost | None:
        """Count a step that took the worker `seconds`. Return the cost of its prompts, or None if
        unknown."""
        if not step.total_num_scheduled_tokens:
            return None
        self._step_tokens.observe_value(step.total_num_scheduled_tokens)
        for request in step.new_requests:
            self._max_tokens.observe_value(request.sampling_params.max_tokens)
        if result.connector_output is not None:
            # The step's wait for blocks being stored is not computing.
            seconds -= result.connector_output.store_wait_seconds
        return self.savings.measure(step, seconds)

    def stats(self) -> dict[str, Any]:
        """Return all values as plain Python objects."""
        return {
            "seconds_per_token": self.savings.seconds_per_token,
            "saved_seconds": dict(self.savings.saved_seconds),
            "iteration_tokens": asdict(self._step_tokens),
            "request_max_tokens": asdict(self._max_tokens),
            "cache_config": self._cache_config,
            "offload_config": self._offload_config,
        }


def _cache_config(
    config: EngineConfig, layout: BlockLayout, num_blocks: int, num_groups: int
) -> dict[str, str]:
    """Return settings under vLLM's names; vLLM's "GPU blocks" are the blocks of the pool. The token
    count assumes that every layer keeps all tokens."""
    cache = config.cache
    return {
        "block_size": str(layout.block_size),
        "cache_dtype": layout.kv_dtype,
        "enable_prefix_caching": str(cache.enable_prefix_caching),
        "kv_cache_size_tokens": str((num_blocks - 1) // num_groups * layout.block_size),
        "num_cpu_blocks": str(_num_chunks(config, layout)),
        "num_gpu_blocks": str(num_blocks),
        "prefix_caching_hash_algo": cache.block_hash,
    }


def _offload_config(config: EngineConfig, layout: BlockLayout) -> dict[str, str]:
    """Return the tiers' settings. A chunk is the unit of transfer between tiers: one block."""
    offload = config.offload
    return {
        "blocks_per_chunk": "1",
        "cpu_bytes": str(offload.cpu.capacity_bytes),
        "kv_bytes_per_chunk": str(layout.slot_bytes),
        "num_chunks": str(_num_chunks(config, layout)),
        "ssd_bytes": str(offload.ssd.capacity_bytes if "ssd" in offload.tiers else 0),
        "tiers": ",".join(offload.tiers),
    }


def _num_chunks(config: EngineConfig, layout: BlockLayout) -> int:
    """Return the number of block slots in the CPU tier; 0 without tiers."""
    return config.offload.cpu.capacity_bytes // layout.slot_bytes if config.offload.enabled else 0
