# SPDX-License-Identifier: Apache-2.0
"""Measures how long blocks stay in the pool, for a sample of the blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from ...tiers.base import Histogram
from .kv_block import KVCacheBlock

MAX_SAMPLED_BLOCKS = 64

_SECONDS = (
    0.001, 0.01, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
    3600.0,
)  # fmt: skip


class Residency:
    """Histograms of the seconds that blocks stay in the pool: age and idle time at eviction, and
    time between two uses. A use is an allocation or a prefix hit.

    Only every n-th block is sampled, so that a step with thousands of blocks costs little."""

    def __init__(
        self, blocks: Sequence[KVCacheBlock], clock: Callable[[], float] = time.monotonic
    ) -> None:
        stride = -(-len(blocks) // MAX_SAMPLED_BLOCKS)
        self._followed = frozenset(blocks[::stride])
        self._clock = clock
        self._born: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self.lifetime = Histogram(_SECONDS)
        self.idle_before_evict = Histogram(_SECONDS)
        self.reuse_gap = Histogram(_SECONDS)

    def taken(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Record the allocation of free blocks, which evicts the cached ones among them."""
        followed = self._followed.intersection(blocks)
        if not followed:
            return
        now = self._clock()
        for block in followed:
            block_id = block.block_id
            if block.block_hash is not None:
                self.lifetime.observe_value(now - self._born[block_id])
                self.idle_before_evict.observe_value(now - self._used[block_id])
            self._born[block_id] = self._used[block_id] = now

    def touched(self, blocks: Iterable[KVCacheBlock]) -> None:
        followed = self._followed.intersection(blocks)
        if not followed:
            return
        now = self._clock()
        for block in followed:
            self.reuse_gap.observe_value(now - self._used[block.block_id])
            self._used[block.block_id] = now

    def stats(self) -> dict[str, Any]:
        return {
            "lifetime": asdict(self.lifetime),
            "idle_before_evict": asdict(self.idle_before_evict),
            "reuse_gap": asdict(self.reuse_gap),
        }
