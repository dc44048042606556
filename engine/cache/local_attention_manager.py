# SPDX-License-Identifier: Apache-2.0
"""The block tables of a cache group whose layers see only tokens nearby: those of a sliding window,
or of the chunk that a token lies in (`LayerAttention.first_seen` tells which).

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

from .group_manager import GroupTables, num_free
from .kv_block import KVCacheBlock


class LocalAttentionManager(GroupTables):
    """See `GroupManager`."""

    def first_needed(self, num_tokens: int) -> int:
        return self.attention.first_seen(num_tokens) // self._block_size

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

    def num_missing(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        table = self.table(request_id)
        blocks = -(-num_tokens // self._block_size)
        more = max(0, blocks - len(table) - len(hits)) + num_free(hits)
        # What it gives back it can take again.
        held = sum([not block.is_null for block in table])
        return min(more, max(0, self.most_blocks(num_tokens) - held))

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        # A block that another request reads too is not free once this one has given it back.
        table = self.table(request_id)
        own = sum([block.ref_cnt == 1 for block in self._unneeded(table, len(table))])
        more = max(0, -(-num_tokens // self._block_size) - len(table))
        return min(more, max(0, self.most_blocks(num_tokens) - own))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        more = max(0, -(-num_tokens // self._block_size) - len(hits))
        taken = num_free(hits)
        # Who holds one of the hits alone cannot count on getting it back any more.
        newly_shared = sum([block.ref_cnt == 1 for block in hits])
        most = max(0, self.most_blocks(num_tokens) - taken)
        return taken + newly_shared + min(more, most)

    def need(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: Sequence[KVCacheBlock],
        num_spare: int,
    ) -> tuple[int, int]:
        first = self.first_needed(num_computed)
        table = self.table(request_id)
        held = max(first, len(table) + len(hits))
        count = max(0, -(-num_slots // self._block_size) - held)
        given_back = sum([block.ref_cnt == 1 for block in self._unneeded(table, first)])
        return count, count + num_free(hits[first:]) - given_back

    def attach(self, request_id: str, num_computed: int, hits: Sequence[KVCacheBlock]) -> None:
        first, pool = self.first_needed(num_computed), self._pool
        null = pool.null_block
        if hits:
            read = hits[first:]
            self._begin(request_id, [null] * (len(hits) - len(read)) + list(read))
            pool.touch([block for block in read if not block.is_null])
            return
        table = self._tables.get(request_id, [])
        unneeded = self._unneeded(table, first)
        if unneeded:
            end = min(first, len(table))
            table[end - len(unneeded) : end] = [null] * len(unneeded)
            pool.free_blocks(unneeded)  # the first one is the least likely to be asked for

    def extend(
        self, request_id: str, new: list[KVCacheBlock], num_computed: int
    ) -> list[KVCacheBlock]:
        table = self._tables.setdefault(request_id, [])
        num_null = self.first_needed(num_computed) - len(table)
        added = [self._pool.null_block] * num_null + new if num_null > 0 else new
        table.extend(added)
        return added

    def can_go_on(self, request_id: str, num_computed: int) -> bool:
        first, end = self.first_needed(num_computed), -(-num_computed // self._block_size)
        return not any(block.is_null for block in self.table(request_id)[first:end])

    def _unneeded(self, table: Sequence[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        """The blocks before `first` that the request still holds, in their order: they lie side by
        side, since all before them are null blocks."""
        end = start = min(first, len(table))
        while start and not table[start - 1].is_null:
            start -= 1
        return list(table[start:end])
