# SPDX-License-Identifier: Apache-2.0
"""The context of a scheduler: the objects that all parts of the scheduler share."""

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
    """The settings, pool manager, tier connector, policy, observer and counters of one
    scheduler."""

    config: SchedulerConfig
    manager: KVCacheManager
    connector: KVConnectorScheduler
    policy: SchedulingPolicy
    observer: Observer = field(default_factory=Observer)  # the default ignores all events
    counts: Counter[str] = field(default_factory=Counter)  # since start, by name

    def count_reused(self, tokens: Mapping[str, int], position: int) -> None:
        """Count the reused tokens of a request by source. The tokens begin at index `position` of
        the request, and the sources follow one another in the order of `tokens`."""
        counts = self.counts
        for source, num_tokens in tokens.items():
            if num_tokens:
                counts[f"reused_tokens_{source}"] += num_tokens
                sum_of_positions = num_tokens * position + num_tokens * (num_tokens - 1) // 2
                counts[f"reused_positions_{source}"] += sum_of_positions
                position += num_tokens
