# SPDX-License-Identifier: Apache-2.0
"""Which free blocks to store next: those that are reused first."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from .kv_block import FreeBlockQueue, KVCacheBlock


class ColdBlocks:
    """Blocks in front of a free queue, to be stored before they are reused.

        head | offered | offered | new | new | ... | tail
             |<------------- window -------------->|

    A step takes blocks from the front, and the window moves on over others. The queue's owner
    reports its changes, so it is walked only when enough may have come into the window.
    """

    __slots__ = ("_queue", "_window", "num_unseen", "was_late")

    def __init__(self, queue: FreeBlockQueue) -> None:
        self._queue = queue
        self._window = 0
        # Blocks that came into the window since the walk, at most. The pool adds one for each that
        # left the queue.
        self.num_unseen = len(queue)
        self.was_late = False  # a block was evicted that had not been offered

    def added(self, count: int) -> None:
        """Count `count` blocks that came to the end of the queue, where a short queue has them in
        the window."""
        if self._queue.num_free - count < self._window:
            self.num_unseen += count

    def collect_cold(
        self, count: int, within: int, least: int, uncomputed: Container[KVCacheBlock]
    ) -> list[KVCacheBlock]:
        """See `BlockPool.take_cold`; the caller marks them as offered."""
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
