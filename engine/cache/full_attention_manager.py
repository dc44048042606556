# SPDX-License-Identifier: Apache-2.0
"""The block tables of a cache group whose layers attend to everything before a token: nothing is
given back before the request ends, and a hit is a prefix without gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .group_manager import GroupTables, num_free
from .kv_block import KVCacheBlock


class FullAttentionManager(GroupTables):
    """See `GroupManager`."""

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        return next((i for i in range(most_blocks) if not is_there(i)), most_blocks)

    def num_missing(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        blocks = -(-num_tokens // self._block_size)
        # Hits that others hold cost nothing.
        return max(0, blocks - len(self.table(request_id)) - len(hits)) + num_free(hits)

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(self.table(request_id)))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(hits)) + num_free(hits)

    def need(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: Sequence[KVCacheBlock],
        num_spare: int,
    ) -> tuple[int, int]:
        held = len(self._tables.get(request_id, ())) + len(hits)
        count = max(0, -(-num_slots // self._block_size) - held)
        # Only if it could matter are the hits that sit in the free queue counted.
        if hits and count + len(hits) > num_spare:
            return count, count + num_free(hits)
        return count, count

    def attach(self, request_id: str, num_computed: int, hits: Sequence[KVCacheBlock]) -> None:
        if hits:
            self._begin(request_id, list(hits))
            self._pool.touch(hits)

    def extend(
        self, request_id: str, new: list[KVCacheBlock], num_computed: int
    ) -> list[KVCacheBlock]:
        self._tables.setdefault(request_id, []).extend(new)
        return new

    def can_go_on(self, request_id: str, num_computed: int) -> bool:
        return True
