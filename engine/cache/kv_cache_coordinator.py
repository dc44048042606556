# SPDX-License-Identifier: Apache-2.0
"""The coordinator: the cache groups of a model, treated as one.

Today all groups attend to everything, so a prefix is a hit if every group has its blocks; other
kinds of group will bring managers of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..request import Request
from .block_pool import BlockPool, group_suffix
from .full_attention_manager import FullAttentionManager
from .kv_block import BlockIds, KVCacheBlock

# One list of blocks for each cache group.
GroupBlocks = tuple[list[KVCacheBlock], ...]


class KVCacheCoordinator:
    """Calls every group in turn; the order of the groups is the order of all tuples."""

    def __init__(self, pool: BlockPool, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self._pool = pool
        self._group_ids = tuple(range(num_groups))
        self._groups = tuple(FullAttentionManager(pool, block_size, i) for i in self._group_ids)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` takes in all groups when nothing is shared."""
        return sum(group.num_blocks_for(num_tokens) for group in self._groups)

    def find_longest_prefix(
        self, digests: Sequence[bytes], max_tokens: int
    ) -> tuple[GroupBlocks, int]:
        """Blocks of the longest known prefix of at most `max_tokens`, and its tokens."""
        wanted = digests[: max_tokens // self.block_size]
        hits = self._pool.get_cached_prefix(wanted, self._group_ids)
        return hits, len(hits[0]) * self.block_size

    def num_missing(self, request_id: str, num_tokens: int) -> list[int]:
        """For each group, blocks to add to what the request holds until `num_tokens` fit."""
        return [group.num_missing(request_id, num_tokens) for group in self._groups]

    def attach(self, request_id: str, hits: GroupBlocks) -> None:
        """Begin the tables of a request with hits."""
        for group, blocks in zip(self._groups, hits, strict=True):
            group.attach(request_id, blocks)

    def allocate(self, request_id: str, counts: Sequence[int]) -> GroupBlocks:
        """Add new blocks, `counts[i]` to group i; the caller has checked that there are as many."""
        added = tuple([self._pool.get_new_blocks(count) for count in counts])
        for group, blocks in zip(self._groups, added, strict=True):
            group.extend(request_id, blocks)
        return added

    def cache(self, request: Request, num_tokens: int, computed: bool = False) -> None:
        """Name the full blocks among the first `num_tokens`."""
        for group in self._groups:
            group.cache(request, num_tokens, computed)

    def name_tail(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """Name the blocks that the last of the first `num_tokens` lies in."""
        for group in self._groups:
            group.name_tail(request_id, num_tokens, digest)

    def drop_names(self, request_id: str, digests: Sequence[bytes]) -> None:
        """Make every block of a request unfindable, and all others with one of these names."""
        for group in self._groups:
            self._pool.drop_names(group.table(request_id))
            self._pool.drop_keys(digests, group.group_id)

    def keys(self, digests: Sequence[bytes]) -> list[bytes]:
        """The names of the blocks of every group, head first in each, as the pool keeps them."""
        return [d + group_suffix(i) for i in self._group_ids for d in digests]

    def revoke(self, request_id: str, num_tokens: int, counts: Sequence[int]) -> None:
        """Take names and the last `counts[i]` blocks of group i back; see
        `KVCacheManager.revoke`."""
        groups = self._groups
        self._pool.revoke_names([b for g in groups for b in g.named_beyond(request_id, num_tokens)])
        for group, count in zip(groups, counts, strict=True):
            group.take_back(request_id, num_tokens, count)

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back."""
        for group in self._groups:
            group.free(request_id)

    def rename(self, request_id: str, holder: str) -> None:
        """All tables of a request are another holder's from now on."""
        for group in self._groups:
            group.rename(request_id, holder)

    def offer(self, request_id: str) -> None:
        """Give the named blocks of a request to `BlockPool.take_fresh`."""
        for group in self._groups:
            self._pool.offer(group.table(request_id))

    def block_ids(self, request_id: str) -> BlockIds:
        """The block table of each group."""
        return tuple([[b.block_id for b in g.table(request_id)] for g in self._groups])
