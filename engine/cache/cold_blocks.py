# SPDX-License-Identifier: Apache-2.0
"""Finds the free blocks that will be reused first, so that the tiers can store them before then."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from .kv_block import FreeBlockQueue, KVCacheBlock


class ColdBlocks:
    """Finds, in a free queue, the next blocks to be reused, which the tiers store beforehand.

        head | offered | offered | new | new | ... | tail
             |<------------- window -------------->|

    A step takes blocks from the front of the queue, which moves later blocks into the window. The
    pool reports every change of the queue, so `collect_cold` walks the queue only if enough blocks
    in the window may be new."""

    __slots__ = ("_queue", "_window", "num_unseen", "was_late")

    def __init__(self, queue: FreeBlockQueue) -> None:
        self._queue = queue
        self._window = 0
        # The most blocks that can have come into the window since the last walk over the queue. The
        # pool adds 1 for each block that leaves the queue.
        self.num_unseen = len(queue)
        self.was_late = False  # a block was evicted that had not been offered

    def added(self, count: int) -> None:
        """Record that `count` blocks were added at the end of the queue, perhaps in the window."""
        if self._queue.num_free - count < self._window:
            self.num_unseen += count

    def collect_cold(
        self, count: int, within: int, least: int, uncomputed: Container[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """Return the blocks for `BlockPool.take_cold`, which then marks them as offered."""
        self._window = within
        if self.was_late:
            self.was_late, least = False, 1
        if self.num_unseen < least:
            return []
        cold: list[KVCacheBlock] = []
        self.num_unseen = 0
        for block in islice(self._queue, within):
            if block.block_hash is None or block.is_offered:
                continue
            if block in uncomputed:
                self.num_unseen += 1
                continue
            if len(cold) == count:
                self.num_unseen = within
                break
            cold.append(block)
        if len(cold) < least:
            self.num_unseen += len(cold)
            return []
        return cold
