# SPDX-License-Identifier: Apache-2.0
"""Chooses which evicted and which cached blocks of vLLM's pool a step stores in the tiers.

With `stores_all`, blocks are stored one step after they were computed. Otherwise blocks are stored
when they are evicted, or near the front of vLLM's free queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .host_keys import CachedBlock
from .pool_watch import PoolWatch

# How many blocks at the front of vLLM's free queue may be copied before their eviction.
NEAR_BLOCKS = 256


class OutgoingBlocks:
    """Chooses the blocks of one pool to store. The class is not thread-safe."""

    def __init__(self, *, stores_all: bool) -> None:
        self._stores_all = stores_all
        self._coming: deque[CachedBlock] = deque()  # computed blocks to store
        self._void: set[CachedBlock] = set()  # blocks that were cached but never computed
        self._near: dict[int, bytes] = {}  # blocks near eviction already chosen: id → key

    @property
    def num_coming(self) -> int:
        """Return the number of blocks that later steps will store even without eviction."""
        return len(self._coming)

    def choose(
        self, watch: PoolWatch, output: Any, most_ahead: int
    ) -> tuple[list[CachedBlock], list[CachedBlock]]:
        """Return the blocks that the step overwrites, and up to `most_ahead` others to store."""
        newly_cached, evicted = watch.take_cached(), watch.take_evicted()
        # vLLM caches blocks when it schedules the step that computes them. If the same step
        # preempts the request, its blocks are not computed.
        preempted = (output.preempted_req_ids or set()) - output.num_scheduled_tokens.keys()
        if preempted:
            for each in newly_cached:
                if each.request_id in preempted:
                    self._void.update(each.blocks)
            newly_cached = [each for each in newly_cached if each.request_id not in preempted]
        if self._void:
            void = self._void.intersection(evicted)
            evicted = [block for block in evicted if block not in void]
            self._void -= void
        for block in evicted:
            self._near.pop(block.block_id, None)
        cold: list[CachedBlock] = []
        if self._stores_all:
            while self._coming and len(cold) < most_ahead:
                block = self._coming.popleft()
                if watch.has(block):  # the block was not evicted meanwhile
                    cold.append(block)
            # In the order of eviction, the tail of a sequence comes before its head.
            cold.reverse()
            self._coming.extend(block for each in newly_cached for block in each.blocks)
        elif most_ahead:
            new = {block for each in newly_cached for block in each.blocks} | self._void
            for block in watch.coldest(min(NEAR_BLOCKS, watch.num_blocks() // 4)):
                if len(cold) < most_ahead and block not in new and self._is_new_near(block):
                    cold.append(block)
        return evicted, cold

    def remove_uncached(self, blocks: Sequence[CachedBlock]) -> None:
        """Forget blocks that lost their keys without being evicted."""
        gone = set(blocks)
        self._coming = deque(block for block in self._coming if block not in gone)
        self._void -= gone
        for block in blocks:
            self._near.pop(block.block_id, None)

    def clear(self) -> None:
        self._coming.clear()
        self._near.clear()

    def _is_new_near(self, block: CachedBlock) -> bool:
        if self._near.get(block.block_id) == block.host_key:
            return False
        self._near[block.block_id] = block.host_key
        return True
