# SPDX-License-Identifier: Apache-2.0
"""The block tables of cache groups that share blocks (often just one): what each request holds, and
under which names.

Token `i` of a request lies in block `i // block_size` of its table. A table only ever grows at its
end. Where the layers of a group do not see all that came before a token, blocks that none will read
again are given back, and the null block stands in their places:

    table of a window    0  0  0  17  4  9        held: 17, 4, 9

A *hit* of n blocks needs those that a token behind them sees: all of them, or the last ones.

What is true of every kind of attention stands here; what differs are the two managers below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ..models.layer_attention import LayerAttention
from ..request import Request
from .block_pool import BlockPool
from .kv_block import KVCacheBlock
from .page_names import page_ids


class GroupManager(Protocol):
    """One table for all of its groups by request id; a request without blocks has none. Counts are
    of blocks, whatever their pages.

    `num_computed` counts tokens whose K and V are there, or will be once a load has ended; the next
    one to be computed comes behind them. `hits` lie before everything else in a table, and may be
    given only while it is empty. Called by one thread.
    """

    group_id: int  # the first of its groups
    attention: LayerAttention

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The blocks of a request, in the order of its tokens, null blocks among them."""

    def first_needed(self, num_tokens: int) -> int:
        """The first block that the token behind `num_tokens`, or any later one, reads."""

    def longest_hit(self, is_there: Callable[[int], bool], most_blocks: int) -> int:
        """The most blocks, up to `most_blocks`, that are a hit where `is_there` says which blocks
        can be had."""

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of `num_tokens` holds at once at most, when nothing is shared."""

    def num_missing(self, request_id: str, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        """Blocks that are free now and that a request takes, at most, until `num_tokens` have been
        computed. The hits are not its own yet."""

    def num_reserved(self, request_id: str, num_tokens: int) -> int:
        """As `num_missing`, whatever others do with blocks that it shares with them."""

    def num_to_reserve(self, num_tokens: int, hits: Sequence[KVCacheBlock]) -> int:
        """By how many blocks those that are free become fewer, and those that are reserved more, if
        a request begins with these hits that will have `num_tokens` computed."""

    def need(
        self,
        request_id: str,
        num_slots: int,
        num_computed: int,
        hits: Sequence[KVCacheBlock],
        num_spare: int,
    ) -> tuple[int, int]:
        """Blocks to add until `num_slots` tokens have a place, and by how many the free ones become
        fewer by `take`. The latter may be too low where it is at most `num_spare`. Changes
        nothing."""

    def attach(self, request_id: str, num_computed: int, hits: Sequence[KVCacheBlock]) -> None:
        """Give back what is not read any more, and begin a table with hits. In all groups before
        any of them takes new blocks, which may be the hits of another."""

    def extend(
        self, request_id: str, new: list[KVCacheBlock], num_computed: int
    ) -> list[KVCacheBlock]:
        """Add new blocks, which the pool has handed out, after `attach`; null blocks before them
        where the table is short of what will be read. All of those."""

    def can_go_on(self, request_id: str, num_computed: int) -> bool:
        """Whether the table has all that the token behind `num_computed` reads."""

    def cache(self, request: Request, num_tokens: int, computed: bool) -> None:
        """Name the full blocks among the first `num_tokens` that have no name yet; none where the
        request has no digests."""

    def name_tail(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        """Name the block that the last of the first `num_tokens`, all computed, lies in."""

    def named_beyond(self, request_id: str, num_tokens: int) -> Sequence[KVCacheBlock]:
        """The blocks after the first `num_tokens` that have had their names."""

    def take_back(self, request_id: str, num_tokens: int, num_blocks: int) -> None:
        """The blocks after the first `num_tokens` have lost their names, and the last `num_blocks`
        of the table are given back."""

    def rename(self, request_id: str, holder: str) -> None:
        """The table of a request is another holder's from now on."""

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        """Forget a request. Its blocks, the last one first, are the caller's to give back."""


class GroupTables:
    """Tables and names, as every manager keeps them."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        group_id: int,
        attention: LayerAttention,
        *,
        most_step_tokens: int,
        hashes_per_block: int,
    ) -> None:
        """No step computes more than `most_step_tokens` of a request, whose digests come
        `hashes_per_block` for each block; the last of them names it."""
        self.group_id = group_id
        self.attention = attention
        self._pool = pool
        self._block_size = block_size
        self._most_step_tokens = most_step_tokens
        self._hashes_per_block = hashes_per_block
        self._tables: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}  # leading blocks that have had their names

    def table(self, request_id: str) -> Sequence[KVCacheBlock]:
        return self._tables.get(request_id, ())

    def most_blocks(self, num_tokens: int) -> int:
        return self.attention.most_blocks(num_tokens, self._block_size, self._most_step_tokens)

    def cache(self, request: Request, num_tokens: int, computed: bool) -> None:
        request_id, digests, pool = request.request_id, request.block_hashes, self._pool
        known = self._num_cached.get(request_id, 0)
        each = self._hashes_per_block
        full = min(num_tokens // self._block_size, len(digests) // each)
        if full > known:
            blocks = self._tables[request_id][known:full]
            wanted = digests[(known + 1) * each - 1 : full * each : each]
            pool.cache_full_blocks(wanted, blocks, self.group_id, computed)
            self._num_cached[request_id] = full
            if pool.observer is not None:
                # Null blocks come before all others.
                ids = [block.block_id for block in blocks if not block.is_null]
                for place in range(pool.width if ids else 0):
                    group_id, pages = self.group_id + place, page_ids(ids, place)
                    pool.observer.named(request, group_id, full - len(ids), pages)

    def name_tail(self, request_id: str, num_tokens: int, digest: bytes) -> None:
        block = self._tables[request_id][(num_tokens - 1) // self._block_size]
        self._pool.name_computed(digest, block, self.group_id)

    def named_beyond(self, request_id: str, num_tokens: int) -> Sequence[KVCacheBlock]:
        first, end = num_tokens // self._block_size, self._num_cached.get(request_id, 0)
        return self.table(request_id)[first:end]

    def take_back(self, request_id: str, num_tokens: int, num_blocks: int) -> None:
        known = self._num_cached.get(request_id, 0)
        self._num_cached[request_id] = min(known, num_tokens // self._block_size)
        if num_blocks:
            table = self._tables[request_id]
            self._pool.free_blocks(table[: -num_blocks - 1 : -1])
            del table[-num_blocks:]

    def rename(self, request_id: str, holder: str) -> None:
        if (blocks := self._tables.pop(request_id, None)) is not None:
            self._tables[holder] = blocks
        if (known := self._num_cached.pop(request_id, None)) is not None:
            self._num_cached[holder] = known

    def pop(self, request_id: str) -> list[KVCacheBlock]:
        self._num_cached.pop(request_id, None)
        blocks = self._tables.pop(request_id, None)
        if blocks is None:
            return []
        blocks.reverse()
        return blocks

    def _begin(self, request_id: str, blocks: list[KVCacheBlock]) -> None:
        """A table begins with blocks that were found, or null blocks."""
        if self._tables.get(request_id):
            raise RuntimeError(f"request {request_id} has blocks, so no hits can go before them")
        self._tables[request_id] = blocks
        self._num_cached[request_id] = len(blocks)


def num_free(blocks: Sequence[KVCacheBlock]) -> int:
    """Those that nobody holds, and that leave the queue when they are held."""
    return sum([not (block.ref_cnt or block.is_null) for block in blocks])
