# SPDX-License-Identifier: Apache-2.0
"""The rules of cache groups whose layers see only tokens nearby: those of a sliding window, or of
the chunk that a token lies in (`LayerAttention.first_seen` tells which).

Blocks that no later token reads are given back when the request next takes some, so that it holds
what the first token of a step sees, and the step:

    window 6, blocks of 4, 13 tokens computed, 5 to come
    | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 | 13 14 15 | 16 17 |
      null      null      first read at 8 = 13 - 6 + 1

A hit needs the blocks that its last window lies in, whatever is missing before them. A table that
begins with a hit, or with a load, has null blocks before these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..models.layer_attention import LayerAttention
from .group_manager import GroupManager, num_free
from .kv_block import KVCacheBlock


class LocalAttentionManager(GroupManager):
    """See there. `null` is the pool's null block."""

    def __init__(
        self,
        group_id: int,
        attention: LayerAttention,
        block_size: int,
        most_step_tokens: int,
        null: KVCacheBlock,
    ) -> None:
        super().__init__(group_id, attention, block_size, most_step_tokens)
        self._null = null
        self._size = attention.num_tokens
        self._is_window = attention.window is not None

    def first_needed(self, num_tokens: int) -> int:
        # As `LayerAttention.first_seen`, which a step would ask for hundreds of requests.
        size = self._size
        first = num_tokens - size + 1 if self._is_window else num_tokens - num_tokens % size
        return first // self._block_size if first > 0 else 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        """From the end: each block is asked for once at most."""
        length = most_blocks
        while length:
            first = self.first_needed(length * self._block_size)
            gap = next((i for i in range(length - 1, first - 1, -1) if not is_there(i)), None)
            if gap is None:
                break
            length = gap  # every length up to here needs the missing block too
        return length

    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        blocks = -(-num_tokens // self._block_size)
        more = max(0, blocks - len(table) - len(hits)) + num_free(hits)
        # What it gives back it can take again.
        held = sum([not block.is_null for block in table])
        return min(more, max(0, self.most_blocks(num_tokens) - held))

    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        # A block that another request reads too is not free once this one has given it back.
        own = self.num_given_back(table, len(table))
        more = max(0, -(-num_tokens // self._block_size) - len(table))
        return min(more, max(0, self.most_blocks(num_tokens) - own))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        more = max(0, -(-num_tokens // self._block_size) - len(hits))
        taken = num_free(hits)
        # Who holds one of the hits alone cannot count on getting it back any more.
        newly_shared = sum([block.ref_cnt == 1 for block in hits])
        most = max(0, self.most_blocks(num_tokens) - taken)
        return taken + newly_shared + min(more, most)

    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        return sum([block.ref_cnt == 1 for block in table[self._first_held(table, first) : first]])

    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        end = first if first < len(table) else len(table)
        if not end or table[end - 1].is_null:
            return []  # most often: the window has not passed the end of a block
        start = self._first_held(table, end - 1)
        unread = table[start:end]
        table[start:end] = [self._null] * len(unread)
        return unread  # the first one is the least likely to be asked for

    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        first, end = self.first_needed(num_computed), -(-num_computed // self._block_size)
        return not any(block.is_null for block in table[first:end])

    def _first_held(self, table: Sequence[KVCacheBlock], end: int) -> int:
        """Where the blocks before `end` begin that the request still holds: they lie side by side,
        since all before them are null blocks."""
        start = end if end < len(table) else len(table)
        while start and not table[start - 1].is_null:
            start -= 1
        return start
