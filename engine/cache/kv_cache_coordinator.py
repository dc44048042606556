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
from itertools import chain, islice

from ...connector.page_names import group_suffix
from ..models.layer_attention import LayerAttention
from ..request.request import Request
from .block_pool import BlockPool
from .group_manager import FullAttentionManager, GroupManager, LocalAttentionManager, num_free
from .kv_block import BlockIds, GroupBlocks, KVCacheBlock, page_ids, page_tables


class KVCacheCoordinator:
    """Calls every manager in turn; their order is that of all `GroupBlocks`. Tables of one request
    are equally long, and as many of their first blocks have had names. This one finds
    nothing."""

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
        rest = (block_size, most_step_tokens)
        self._groups: tuple[GroupManager, ...] = tuple(
            FullAttentionManager(group_id, kind, *rest)
            if kind.is_full
            else LocalAttentionManager(group_id, kind, *rest, null=pool.null_block)
            for group_id, kind in list(enumerate(attention))[::width]
        )
        self._num_pages = len(attention)  # of a block in all groups
        self.no_blocks: GroupBlocks = tuple([] for _ in self._groups)
        self._tables: dict[str, GroupBlocks] = {}
        self._num_cached: dict[str, int] = {}  # leading blocks that have had their names
        self._full_ids = tuple(g.group_id for g in self._groups if g.attention.is_full)
        kinds: dict[LayerAttention, list[GroupManager]] = {}
        for group in self._groups:
            if not group.attention.is_full:
                kinds.setdefault(group.attention, []).append(group)
        # Groups that attend alike are asked as one: what one needs, all need.
        self._local = tuple(map(tuple, kinds.values()))
        self._forgetful = tuple(
            (i, g) for i, g in enumerate(self._groups) if not g.attention.is_full
        )

    def tables(self, request_id: str) -> GroupBlocks:
        """The blocks of a request; not to be changed."""
        return self._tables.get(request_id, self.no_blocks)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at once, in all groups, when nothing is
        shared."""
        return self._width * sum(group.most_blocks(num_tokens) for group in self._groups)

    def num_missing(self, request_id: str, num_tokens: int, hits: GroupBlocks | None) -> int:
        """Free blocks that a request takes, at most, until `num_tokens` have been computed."""
        given = self.no_blocks if hits is None else hits
        return self._width * sum(
            group.num_missing(table, num_tokens, blocks)
            for group, table, blocks in zip(
                self._groups, self.tables(request_id), given, strict=True
            )
        )

    def num_reserved(self, wanted: Mapping[str, int]) -> int:
        """Free blocks that these holders take, at most, until each has had so many tokens computed,
        whatever they share."""
        return self._width * sum(
            [
                group.num_reserved(table, num_tokens)
                for request_id, num_tokens in wanted.items()
                for group, table in zip(self._groups, self.tables(request_id), strict=True)
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
        tables = self._tables.get(request_id) or tuple([[] for _ in self._groups])
        num_hits = 0 if hits is None else len(hits[0])
        held, num_blocks = len(tables[0]) + num_hits, -(-num_slots // self.block_size)
        more = num_blocks - held if num_blocks > held else 0
        if (more + num_hits) * self._num_pages > num_spare:
            # Only if it could matter is it counted what hits take, and what is given back.
            taken = self._num_taken(tables, num_blocks, num_computed, hits)
            if taken > 0 and taken > num_spare:
                return None
        if hits is not None and num_hits:
            self._begin(request_id, tables, num_computed, hits)
        has_gaps = False
        for index, group in self._forgetful:
            if first := group.first_needed(num_computed):
                if gone := group.prune(tables[index], first):
                    self._pool.free_blocks(gone)
                has_gaps = has_gaps or first > held
        self._tables[request_id] = tables
        if has_gaps:
            return self._extend_behind_gaps(tables, num_blocks, num_computed)
        if not more:
            return self.no_blocks
        # One take for all of them, and each gets its part.
        new = self._pool.get_new_blocks(more * len(tables))
        added: list[list[KVCacheBlock]] = []
        for table in tables:
            part = new[len(added) * more : (len(added) + 1) * more]
            table += part
            added.append(part)
        return tuple(added)

    def _num_taken(
        self, tables: GroupBlocks, num_blocks: int, num_computed: int, hits: GroupBlocks | None
    ) -> int:
        """By how much the free blocks become fewer where tables begin with hits, or are pruned, and
        then get `num_blocks`."""
        taken = 0
        for group, table, found in zip(self._groups, tables, hits or self.no_blocks, strict=True):
            first = group.first_needed(num_computed)
            taken += max(0, num_blocks - max(first, len(table) + len(found)))
            taken += num_free(found[first:]) - group.num_given_back(table, first)
        return taken * self._width

    def _begin(
        self, request_id: str, tables: GroupBlocks, num_computed: int, hits: GroupBlocks
    ) -> None:
        """Hold hits, but for what is not read of them. In all groups before any of them takes new
        blocks, which may be the hits of another."""
        if any(tables):
            raise RuntimeError(f"request {request_id} has blocks, so no hits can go before them")
        null = self._pool.null_block
        for group, table, found in zip(self._groups, tables, hits, strict=True):
            read = found[group.first_needed(num_computed) :]
            self._pool.touch(read)
            table += [null] * (len(found) - len(read)) + read
        self._num_cached[request_id] = len(hits[0])

    def _extend_behind_gaps(
        self, tables: GroupBlocks, num_blocks: int, num_computed: int
    ) -> GroupBlocks:
        """New blocks for all tables, and null blocks before the first that is read. All of those;
        a load brings what is read."""
        gaps = [
            max(0, group.first_needed(num_computed) - len(table))
            for group, table in zip(self._groups, tables, strict=True)
        ]
        counts = [
            max(0, num_blocks - len(table) - gap) for table, gap in zip(tables, gaps, strict=True)
        ]
        new = iter(self._pool.get_new_blocks(sum(counts)))
        null = self._pool.null_block
        both = zip(gaps, counts, strict=True)
        added = tuple([[null] * gap + list(islice(new, count)) for gap, count in both])
        for table, blocks in zip(tables, added, strict=True):
            table += blocks
        return added

    def can_go_on(self, request_id: str, num_computed: int) -> bool:
        """Whether the tables have all that the token behind `num_computed` reads."""
        both = zip(self._groups, self.tables(request_id), strict=True)
        return all(group.can_go_on(table, num_computed) for group, table in both)

    def cache(self, request: Request, num_tokens: int, computed: bool = False) -> None:
        """Name the full blocks among the first `num_tokens` that have no name yet; none where the
        request has no digests."""
        request_id, digests = request.request_id, request.block_hashes
        each, known = self._hashes_per_block, self._num_cached.get(request_id, 0)
        full = min(num_tokens // self.block_size, len(digests) // each)
        if full > known and self._pool.enable_caching:
            wanted = digests[(known + 1) * each - 1 : full * each : each]
            for group, table in zip(self._groups, self._tables[request_id], strict=True):
                blocks = table[known:full]
                self._pool.cache_full_blocks(wanted, blocks, group.group_id, computed)
                if self._pool.observer is not None:
                    self._tell_named(request, group.group_id, known, blocks)
            self._num_cached[request_id] = full

    def _tell_named(
        self, request: Request, group_id: int, first: int, blocks: Sequence[KVCacheBlock]
    ) -> None:
        # Null blocks come before all others.
        ids = [block.block_id for block in blocks if not block.is_null]
        first += len(blocks) - len(ids)
        if self._pool.observer is not None and ids:
            for place in range(self._width):
                pages = page_ids(ids, place)
                self._pool.observer.named(request, group_id + place, first, pages)

    def name_tail(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """Name the blocks that the last of the first `num_tokens` lies in."""
        index = (num_tokens - 1) // self.block_size
        for group, table in zip(self._groups, self._tables[request_id], strict=True):
            self._pool.name_computed(digest, table[index], group.group_id)

    def drop_names(self, request_id: str, digests: Sequence[bytes]) -> None:
        """Make every block of a request unfindable, and all others with one of these names."""
        for group, table in zip(self._groups, self.tables(request_id), strict=True):
            self._pool.drop_names(table)
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
        first, known = num_tokens // self.block_size, self._num_cached.get(request_id, 0)
        tables = self.tables(request_id)
        self._pool.revoke_names([block for table in tables for block in table[first:known]])
        self._num_cached[request_id] = min(known, first)
        for group, table in zip(self._groups, tables, strict=True):
            if count := counts[group.group_id]:
                self._pool.free_blocks(table[: -count - 1 : -1])
                del table[-count:]

    def free(self, request_id: str) -> None:
        """Give all blocks of a request back: of all groups the last ones first, since a hit needs
        every group."""
        self._num_cached.pop(request_id, None)
        tables = self._tables.pop(request_id, None)
        if tables is None:
            return
        tails_first = [table[::-1] for table in tables]
        if len(tails_first) == 1:
            self._pool.free_blocks(tails_first[0])
        else:
            self._pool.free_blocks(chain.from_iterable(zip(*tails_first, strict=True)))

    def pin(self, request_id: str, holder: str) -> None:
        """All tables of a request are another holder's from now on, who runs no more."""
        if request_id in self._tables:
            self._tables[holder] = self._tables.pop(request_id)
        if request_id in self._num_cached:
            self._num_cached[holder] = self._num_cached.pop(request_id)
        for table in self.tables(holder):
            self._pool.pin(table)

    def unpin(self, holder: str) -> None:
        """As `free`, for what was pinned."""
        for table in self.tables(holder):
            self._pool.unpin(table)
        self.free(holder)

    def offer(self, request_id: str) -> None:
        """Give the named blocks of a request to `BlockPool.take_fresh`."""
        for table in self.tables(request_id):
            self._pool.offer(table)

    def block_ids(self, request_id: str) -> BlockIds:
        """The block table of each group, as ids of pages."""
        return self.page_ids(self.tables(request_id))

    def page_ids(self, blocks: Sequence[Sequence[KVCacheBlock]]) -> BlockIds:
        """The pages of such blocks in each group."""
        return page_tables(blocks, self._width)

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
