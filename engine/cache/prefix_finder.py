# SPDX-License-Identifier: Apache-2.0
"""Prefix finders: find the longest prefix hit of a request in the pool, over all cache groups.

    unitary   for one group manager
    hybrid    for several group managers; a hit needs blocks of every group

The hybrid finder starts with the longest possible length. Each group in turn shortens the length to
the group's own longest hit within it, and the search ends when no group shortens it further. The
result is the longest common hit, because no group shortens the length below a common hit."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...connector.page_keys import group_suffix
from ..models.layer_attention import LayerAttention
from .block_pool import BlockPool
from .group_manager import GroupManager
from .kv_block import GroupBlocks, KVCacheBlock


class PrefixFinder(ABC):
    """Finds the longest prefix hit in the pool; changes nothing."""

    def __init__(
        self,
        pool: BlockPool,
        groups: tuple[GroupManager, ...],
        block_size: int,
    ) -> None:
        """`groups` must not share blocks with one another."""
        self.block_size = block_size
        self._pool = pool
        self._groups = groups
        self._full_ids = tuple(g.group_id for g in groups if g.attention.is_full)

    @abstractmethod
    def find(self, digests: Sequence[bytes]) -> tuple[GroupBlocks, int]:
        """Return the blocks and the token count of the longest cached prefix. `digests` are the
        digests of the wanted blocks, first block first. The null block stands for blocks that no
        later token reads."""

    def _longest_local(
        self, groups: tuple[GroupManager, ...], digests: Sequence[bytes], most: int
    ) -> int:
        """Return the longest hit, in blocks, of groups with the same kind of attention."""
        suffixes = [group_suffix(group.group_id) for group in groups]
        pool = self._pool

        def is_there(index: int) -> bool:
            digest = digests[index]
            return all(pool.has(digest + suffix) for suffix in suffixes)

        return groups[0].longest_hit(is_there, most)

    def _local_blocks(
        self, group: GroupManager, digests: Sequence[bytes], length: int
    ) -> list[KVCacheBlock]:
        """Return a group's blocks for a hit of `length` blocks; unread blocks are null blocks."""
        pool, suffix = self._pool, group_suffix(group.group_id)
        first = group.first_needed(length * self.block_size)
        found = [pool.cached_block(digest + suffix) for digest in digests[first:length]]
        return [pool.null_block] * first + found


class UnitaryPrefixFinder(PrefixFinder):
    """The finder for one group, or for several groups that share all blocks."""

    def find(self, digests: Sequence[bytes]) -> tuple[GroupBlocks, int]:
        if self._full_ids:
            [found] = self._pool.get_cached_prefix(digests, self._full_ids)
            return (found,), len(found) * self.block_size
        group = self._groups[0]
        length = self._longest_local((group,), digests, len(digests))
        return (self._local_blocks(group, digests, length),), length * self.block_size


class HybridPrefixFinder(PrefixFinder):
    """The finder for several groups that do not share blocks."""

    def __init__(
        self,
        pool: BlockPool,
        groups: tuple[GroupManager, ...],
        block_size: int,
    ) -> None:
        super().__init__(pool, groups, block_size)
        kinds: dict[LayerAttention, list[GroupManager]] = {}
        for group in groups:
            if not group.attention.is_full:
                kinds.setdefault(group.attention, []).append(group)
        # Groups with equal attention need the same blocks, and are searched together.
        self._local = tuple(map(tuple, kinds.values()))

    def find(self, digests: Sequence[bytes]) -> tuple[GroupBlocks, int]:
        prefixes: GroupBlocks = ()
        most = len(digests)
        if self._full_ids:
            # With full attention, every shorter prefix of a hit is a hit too, so that the other
            # groups only shorten the hit.
            prefixes = self._pool.get_cached_prefix(digests, self._full_ids)
            most = len(prefixes[0])
        length = self._agreed(digests, most)
        for prefix in prefixes:
            del prefix[length:]
        if not self._local:
            return prefixes, length * self.block_size
        full = iter(prefixes)
        blocks = [
            next(full) if group.attention.is_full else self._local_blocks(group, digests, length)
            for group in self._groups
        ]
        return tuple(blocks), length * self.block_size

    def _agreed(self, digests: Sequence[bytes], most: int) -> int:
        """Return the longest hit, in blocks, of all groups with local attention."""
        length = most
        while True:
            before = length
            for groups in self._local:
                length = self._longest_local(groups, digests, length)
            if length == before or len(self._local) == 1:
                return length
