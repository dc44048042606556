# SPDX-License-Identifier: Apache-2.0
"""The coordinators: the cache groups of a model, treated as one. Groups that share blocks
(`group_spec.pages_per_block`) have one manager, and count as one but for the ids of their pages.

    none      blocks are never found again
    unitary   one manager, which decides alone
    hybrid    a hit needs every group

A hybrid hit is found by going round: each group shortens the length to one that is a hit for it,
and the round ends when all agree. No longer hit is passed by, because a group takes the longest one
that is not above what the others left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, zip_longest

from ..models.layer_attention import LayerAttention
from ..request import Request
from .block_pool import BlockPool
from .full_attention_manager import FullAttentionManager
from .group_manager import GroupManager
from .kv_block import BlockIds, KVCacheBlock
from .local_attention_manager import LocalAttentionManager
from .page_names import group_suffix, page_ids

# One list of blocks for all cache groups that share them, in the order of the first of these.
GroupBlocks = tuple[list[KVCacheBlock], ...]
NO_HITS: tuple[KVCacheBlock, ...] = ()


class KVCacheCoordinator:
    """Calls every manager in turn; their order is that of all `GroupBlocks`. This one finds nothing
    and names nothing."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        attention: Sequence[LayerAttention],
        *,
        most_step_tokens: int,
        hashes_per_block: int = 1,
        drops_last_hit: bool = False,
    ) -> None:
        """`attention`: how the layers of each group attend. `drops_last_hit`: see
        `KVCacheManager`."""
        self.block_size = block_size
        self._pool = pool
        self._hashes_per_block = hashes_per_block
        self._is_plain = hashes_per_block == 1
        self._drops_last_hit = drops_last_hit
        self._width = width = pool.width
        self._groups: tuple[GroupManager, ...] = tuple(
            (FullAttentionManager if kind.is_full else LocalAttentionManager)(
                pool,
                block_size,
                group_id,
                kind,
                most_step_tokens=most_step_tokens,
                hashes_per_block=hashes_per_block,
            )
            for group_id, kind in list(enumerate(attention))[::width]
        )
        self.no_blocks: GroupBlocks = tuple([] for _ in self._groups)
        self._full_ids = tuple(g.group_id for g in self._groups if g.attention.is_full)
        kinds: dict[LayerAttention, list[GroupManager]] = {}
        for group in self._groups:
            if not group.attention.is_full:
                kinds.setdefault(group.attention, []).append(group)
        # Groups that attend alike are asked as one: what one needs, all need.
        self._local = tuple(map(tuple, kinds.values()))

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at once, in all groups, when nothing is
        shared."""
        return self._width * sum(group.most_blocks(num_tokens) for group in self._groups)

    def num_missing(self, request_id: str, num_tokens: int, hits: GroupBlocks | None) -> int:
        """Free blocks that a request takes, at most, until `num_tokens` have been computed."""
        given = self.no_blocks if hits is None else hits
        return self._width * sum(
            group.num_missing(request_id, num_tokens, blocks)
            for group, blocks in zip(self._groups, given, strict=True)
        )

    def num_reserved(self, wanted: Mapping[str, int]) -> int:
        """Free blocks that these holders take, at most, until each has had so many tokens computed,
        whatever they share."""
        return self._width * sum(
            [
                group.num_reserved(request_id, num_tokens)
                for group in self._groups
                for request_id, num_tokens in wanted.items()
            ]
        )

    def num_to_reserve(self, num_tokens: int, hits: GroupBlocks | None) -> int:
        """What `num_reserved` would be more, and the free blocks fewer, with one more holder."""
        given = self.no_blocks if hits is None else hits
        both = zip(self._groups, given, strict=True)
        blocks = sum([group.num_to_reserve(num_tokens, found) for group, found in both])
        return self._width * blocks

    def find_longest_prefix(
        self, digests: Sequence[bytes], max_tokens: int
    ) -> tuple[GroupBlocks, int]:
        """Blocks of the longest known prefix of at most `max_tokens`, and its tokens. Null blocks
        stand where nothing is needed."""
        return self.no_blocks, 0

    def allocate(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: GroupBlocks | None,
        num_spare: int,
    ) -> GroupBlocks | None:
        """Blocks until `num_slots` tokens have a place, behind `num_computed`, of which `hits` hold
        the first. Those added, or None where the free ones would become fewer by more than
        `num_spare`, and nothing has changed."""
        given = self.no_blocks if hits is None else hits
        with_hits = list(zip(self._groups, given, strict=True))
        needs = [g.need(request_id, num_slots, num_computed, h, -1) for g, h in with_hits]
        taken = self._width * sum([fewer for _, fewer in needs])
        if taken > 0 and taken > num_spare:
            return None
        for group, blocks in with_hits:
            group.attach(request_id, num_computed, blocks)
        # One take for all of them, and each gets its part.
        new = self._pool.get_new_blocks(sum([count for count, _ in needs]))
        added: list[list[KVCacheBlock]] = []
        start = 0
        for group, (count, _) in zip(self._groups, needs, strict=True):
            part = new[start : start + count]
            added.append(group.extend(request_id, part, num_computed))
            start += count
        return tuple(added)

    def can_go_on(self, request_id: str, num_computed: int) -> bool:
        """Whether the tables have all that the token behind `num_computed` reads."""
        return all(group.can_go_on(request_id, num_computed) for group in self._groups)

    def cache(self, request: Request, num_tokens: int, computed: bool = False) -> None:
        """Name the full blocks among the first `num_tokens`."""

    def name_tail(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """Name the blocks that the last of the first `num_tokens` lies in."""
        for group in self._groups:
            group.name_tail(request_id, num_tokens, digest)

    def drop_names(self, request_id: str, digests: Sequence[bytes]) -> None:
        """Make every block of a request unfindable, and all others with one of these names."""
        for group in self._groups:
            self._pool.drop_names(group.table(request_id))
            self._pool.drop_keys(digests, group.group_id)

    def keys(self, digests: Sequence[bytes], num_tokens: int = 0) -> list[bytes]:
        """The names of the blocks of every group, head first in each, as the pool keeps them:
        those that the token behind the first `num_tokens`, or any later one, reads."""
        return [
            digest + group_suffix(group.group_id + place)
            for group in self._groups
            for place in range(self._width)
            for digest in digests[group.first_needed(num_tokens) :]
        ]

    def revoke(self, request_id: str, num_tokens: int, counts: Sequence[int]) -> None:
        """Take names and the last `counts[i]` blocks of group i back; see
        `KVCacheManager.revoke`."""
        groups = self._groups
        self._pool.revoke_names([b for g in groups for b in g.named_beyond(request_id, num_tokens)])
        for group in groups:
            group.take_back(request_id, num_tokens, counts[group.group_id])

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back: of all groups the last ones first, since a hit needs
        every group."""
        tables = [group.pop(request_id) for group in self._groups]
        if len(tables) == 1:
            self._pool.free_blocks(tables[0])
            return
        null = self._pool.null_block
        self._pool.free_blocks(chain.from_iterable(zip_longest(*tables, fillvalue=null)))

    def pin(self, request_id: str, holder: str) -> None:
        """All tables of a request are another holder's from now on, who runs no more."""
        for group in self._groups:
            group.rename(request_id, holder)
            self._pool.pin(group.table(holder))

    def unpin(self, holder: str) -> None:
        """As `free`, for what was pinned."""
        for group in self._groups:
            self._pool.unpin(group.table(holder))
        self.free(holder)

    def offer(self, request_id: str) -> None:
        """Give the named blocks of a request to `BlockPool.take_fresh`."""
        for group in self._groups:
            self._pool.offer(group.table(request_id))

    def block_ids(self, request_id: str) -> BlockIds:
        """The block table of each group, as ids of pages."""
        return self.page_ids([group.table(request_id) for group in self._groups])

    def page_ids(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> BlockIds:
        """The pages of such blocks in each group."""
        ids = [[block.block_id for block in each] for each in blocks]
        if self._width == 1:
            return tuple(ids)
        return tuple([page_ids(each, place) for each in ids for place in range(self._width)])

    def of_blocks(self, digests: Sequence[bytes]) -> Sequence[bytes]:
        """Of digests that come more often than blocks, those that name one: the last of each."""
        each = self._hashes_per_block
        return digests if self._is_plain else digests[each - 1 :: each]


class UnitaryCoordinator(KVCacheCoordinator):
    """One group, or several that share all blocks."""

    def find_longest_prefix(
        self, digests: Sequence[bytes], max_tokens: int
    ) -> tuple[GroupBlocks, int]:
        most = max_tokens // self.block_size
        wanted = digests[:most] if self._is_plain else self.of_blocks(digests)[:most]
        if self._full_ids:
            [found] = self._pool.get_cached_prefix(wanted, self._full_ids)
            if self._drops_last_hit and found:
                del found[-1]
            return (found,), len(found) * self.block_size
        group = self._groups[0]
        find = partial(_longest_local, self._pool, (group,), wanted)
        length = _dropping(find, len(wanted), self._drops_last_hit)
        blocks = _blocks_of(self._pool, group, wanted, length, self.block_size)
        return (blocks,), length * self.block_size

    def allocate(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: GroupBlocks | None,
        num_spare: int,
    ) -> GroupBlocks | None:
        group = self._groups[0]
        found = NO_HITS if hits is None else hits[0]
        num_spare //= self._width
        count, taken = group.need(request_id, num_slots, num_computed, found, num_spare)
        if taken > num_spare and taken > 0:
            return None
        group.attach(request_id, num_computed, found)
        return (group.extend(request_id, self._pool.get_new_blocks(count), num_computed),)

    def cache(self, request: Request, num_tokens: int, computed: bool = False) -> None:
        self._groups[0].cache(request, num_tokens, computed)


class HybridCoordinator(KVCacheCoordinator):
    """Several groups, of one kind or of several."""

    def find_longest_prefix(
        self, digests: Sequence[bytes], max_tokens: int
    ) -> tuple[GroupBlocks, int]:
        wanted = self.of_blocks(digests)[: max_tokens // self.block_size]
        pool, size = self._pool, self.block_size
        prefixes: GroupBlocks = ()
        most = len(wanted)
        if self._full_ids:
            # Any part of a prefix is one, so what full attention found only becomes shorter.
            prefixes = pool.get_cached_prefix(wanted, self._full_ids)
            most = len(prefixes[0])
        length = _dropping(partial(self._agreed, wanted), most, self._drops_last_hit)
        for prefix in prefixes:
            del prefix[length:]
        if not self._local:
            return prefixes, length * size
        full = iter(prefixes)
        blocks = tuple(
            [
                next(full)
                if group.attention.is_full
                else _blocks_of(pool, group, wanted, length, size)
                for group in self._groups
            ]
        )
        return blocks, length * size

    def cache(self, request: Request, num_tokens: int, computed: bool = False) -> None:
        for group in self._groups:
            group.cache(request, num_tokens, computed)

    def _agreed(self, digests: Sequence[bytes], most: int) -> int:
        """The longest hit, in blocks, of all groups that see nearby tokens only."""
        length = most
        while True:
            before = length
            for groups in self._local:
                length = _longest_local(self._pool, groups, digests, length)
            if length == before or len(self._local) == 1:
                return length


def make_coordinator(
    pool: BlockPool, block_size: int, attention: Sequence[LayerAttention], **options: object
) -> KVCacheCoordinator:
    """The coordinator of these groups; `options` as `KVCacheCoordinator` takes them."""
    kind: Callable[..., KVCacheCoordinator] = KVCacheCoordinator
    if pool.enable_caching:
        kind = UnitaryCoordinator if len(attention) == pool.width else HybridCoordinator
    return kind(pool, block_size, attention, **options)


def _longest_local(
    pool: BlockPool, groups: tuple[GroupManager, ...], digests: Sequence[bytes], most: int
) -> int:
    """The longest hit, in blocks, of groups that all attend alike."""
    suffixes = [group_suffix(group.group_id) for group in groups]

    def is_there(index: int) -> bool:
        digest = digests[index]
        return all(pool.has(digest + suffix) for suffix in suffixes)

    return groups[0].longest_hit(is_there, most)


def _dropping(find: Callable[[int], int], most: int, drops_last: bool) -> int:
    """The longest hit, or the longest one that ends before its last block."""
    length = find(most)
    return find(length - 1) if drops_last and length else length


def _blocks_of(
    pool: BlockPool, group: GroupManager, digests: Sequence[bytes], length: int, block_size: int
) -> list[KVCacheBlock]:
    """A hit of `length` blocks as a group needs it."""
    first = group.first_needed(length * block_size)
    suffix = group_suffix(group.group_id)
    return [pool.null_block] * first + [pool.named(d + suffix) for d in digests[first:length]]
