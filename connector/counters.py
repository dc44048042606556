# SPDX-License-Identifier: Apache-2.0
"""Counters of the connector's copies, look-ups and failures, in plain numbers since the start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..tiers.base import IO_SECONDS, Histogram
from .messages import LoadReport

# Histogram bounds: the size of one copy job, in bytes.
_SIZES = (1e5, 1e6, 5e6, 10e6, 20e6, 40e6, 60e6, 80e6, 100e6, 150e6, 200e6)


@dataclass(slots=True)
class OffloadCounters:
    """The counters of one connector since the start."""

    loads: int = 0  # loads that brought at least one block
    stores: int = 0  # copy jobs
    stored_blocks: int = 0
    seconds_loaded: float = 0.0  # the duration of all loads, with or without blocks
    tokens_loaded: dict[str, int] = field(default_factory=dict)  # by tier
    failures: dict[str, int] = field(default_factory=dict)  # by reason
    # Successful copies between the pool and the slab.
    load_bytes: int = 0
    load_copy_seconds: float = 0.0
    load_sizes: Histogram = field(default_factory=lambda: Histogram(_SIZES))
    store_bytes: int = 0
    store_copy_seconds: float = 0.0
    store_sizes: Histogram = field(default_factory=lambda: Histogram(_SIZES))
    store_wait_seconds: float = 0.0  # seconds that steps waited for stores
    allocation_failures: int = 0  # stores with a block for which the slab had no slot
    # Blocks that were looked up and found, by tier; each prompt is counted once.
    lookup_queries: dict[str, int] = field(default_factory=dict)
    lookup_hits: dict[str, int] = field(default_factory=dict)

    # Requests that waited for another engine to compute their prompt, by how the wait ended.
    prefill_waits: dict[str, int] = field(default_factory=dict)
    prefill_wait_seconds: Histogram = field(
        default_factory=lambda: Histogram((*IO_SECONDS, 30.0, 60.0))
    )

    # Blocks that were dropped from every tier because they may be wrong, by cause.
    blocks_dropped: dict[str, int] = field(default_factory=dict)

    def count_failure(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1

    def count_prefill_wait(self, end: str, seconds: float) -> None:
        self.prefill_waits[end] = self.prefill_waits.get(end, 0) + 1
        self.prefill_wait_seconds.observe_value(seconds)

    def count_dropped(self, cause: str, num_blocks: int) -> None:
        self.blocks_dropped[cause] = self.blocks_dropped.get(cause, 0) + num_blocks

    def count_load(self, report: LoadReport, num_bytes: int = 0) -> None:
        """Count a load that has ended, and its last copy of `num_bytes` bytes (0: no copy)."""
        if num_bytes:
            self.count_load_copy(num_bytes)
        self.seconds_loaded += report.seconds
        if not report.num_loaded_tokens:
            return
        self.loads += 1
        for tier, tokens in report.tokens_by_tier.items():
            self.tokens_loaded[tier] = self.tokens_loaded.get(tier, 0) + tokens

    def count_load_copy(self, num_bytes: int) -> None:
        """Count a successful copy from the slab to the pool."""
        self.load_bytes += num_bytes
        self.load_sizes.observe_value(num_bytes)

    def count_store(self, num_blocks: int, num_bytes: int) -> None:
        """Count a successful copy from the pool to the slab."""
        self.stores += 1
        self.stored_blocks += num_blocks
        self.store_bytes += num_bytes
        self.store_sizes.observe_value(num_bytes)

    def count_lookup(self, tiers: Sequence[str], found: Sequence[str], num_asked: int) -> None:
        """Count a look-up of `num_asked` blocks in `tiers`, from the fastest down. `found` names
        the tier of each leading block; the look-up ends at the first block that no tier has."""
        reached = min(len(found) + 1, num_asked)
        for tier in tiers:
            hits = found.count(tier)
            self.lookup_queries[tier] = self.lookup_queries.get(tier, 0) + reached
            self.lookup_hits[tier] = self.lookup_hits.get(tier, 0) + hits
            reached -= hits
