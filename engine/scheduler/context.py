# SPDX-License-Identifier: Apache-2.0
"""The context of a scheduler: what all its parts work with, and hand on to their own parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...connector.base import KVConnectorScheduler
from ..cache.kv_cache_manager import KVCacheManager
from ..config.engine_config import SchedulerConfig
from ..observer import Observer
from .policies import SchedulingPolicy


@dataclass(frozen=True, slots=True)
class SchedulerContext:
    """The settings, the pool, the tiers and the policy of one scheduler, its counts and its
    observer."""

    config: SchedulerConfig
    manager: KVCacheManager
    connector: KVConnectorScheduler
    policy: SchedulingPolicy
    observer: Observer = field(default_factory=Observer)  # which by itself hears nothing
    counts: Counter[str] = field(default_factory=Counter)  # since start, by name

    def count_reused(self, tokens: Mapping[str, int], position: int) -> None:
        """Count tokens from `position` on that a request need not compute: those of each source,
        in their order."""
        counts = self.counts
        for source, num_tokens in tokens.items():
            if num_tokens:
                counts[f"reused_tokens_{source}"] += num_tokens
                sum_of_positions = num_tokens * position + num_tokens * (num_tokens - 1) // 2
                counts[f"reused_positions_{source}"] += sum_of_positions
                position += num_tokens
