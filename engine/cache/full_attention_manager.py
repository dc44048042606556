# SPDX-License-Identifier: Apache-2.0
"""The rules of cache groups whose layers attend to everything before a token: nothing is given back
before the request ends, and a hit is a prefix without gaps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .group_manager import GroupManager, num_free
from .kv_block import KVCacheBlock


class FullAttentionManager(GroupManager):
    """See there."""

    def first_needed(self, num_tokens: int) -> int:
        return 0

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        return next((i for i in range(most_blocks) if not is_there(i)), most_blocks)

    def num_missing(
        self, table: Sequence[KVCacheBlock], num_tokens: int, hits: Sequence[KVCacheBlock]
    ) -> int:
        # Hits that others hold cost nothing.
        return max(0, -(-num_tokens // self._block_size) - len(table) - len(hits)) + num_free(hits)

    def num_reserved(self, table: Sequence[KVCacheBlock], num_tokens: int) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(table))

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        return max(0, -(-num_tokens // self._block_size) - len(hits)) + num_free(hits)

    def num_given_back(self, table: Sequence[KVCacheBlock], first: int) -> int:
        return 0

    def prune(self, table: list[KVCacheBlock], first: int) -> list[KVCacheBlock]:
        return []

    def can_go_on(self, table: Sequence[KVCacheBlock], num_computed: int) -> bool:
        return True
