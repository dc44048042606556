# SPDX-License-Identifier: Apache-2.0
"""Watches vLLM's block pool: blocks that get a name, that lose it, or that are evicted next.

vLLM does not report these events to a connector. But it hands over the pool
(`bind_kv_cache_manager`), and the watch wraps four public methods of this pool object:

    cache_full_blocks    blocks get names: the step computes them, or a load has brought them
    get_new_blocks       blocks are taken from the free queue; those with names are evicted
    evict_blocks         blocks lose their names because they may be wrong
    reset_prefix_cache   all blocks lose their names

An evicted block keeps its bytes until the scheduled step runs, so it can still be copied. The
original method always runs, with the same result as without the watch."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .block_names import BlockNames, NamedBlock

log = logging.getLogger(__name__)


class Naming(NamedTuple):
    """The blocks of a request that vLLM named in one call, in order."""

    request_id: str
    blocks: list[NamedBlock]


class PoolWatch:
    """Watches one pool; `names` has the names of its blocks. `named` is called with the request,
    the first position whose blocks got names, and the number of tokens up to the end of the last
    named block. `dropped` is called with blocks that lost their names without being evicted, and
    whether they may be wrong. Neither may raise. vLLM's scheduler thread makes all calls."""

    def __init__(
        self,
        pool: Any,
        names: BlockNames,
        named: Callable[[Any, int, int], None],
        dropped: Callable[[Sequence[NamedBlock], bool], None],
    ) -> None:
        self._pool = pool
        self._names = names
        self._named = named
        self._dropped = dropped
        self._evicted: list[NamedBlock] = []
        self._namings: list[Naming] = []
        self._originals = {
            name: getattr(pool, name)
            for name in (
                "get_new_blocks",
                "cache_full_blocks",
                "evict_blocks",
                "reset_prefix_cache",
            )
        }
        pool.get_new_blocks = self._get_new_blocks
        pool.cache_full_blocks = self._cache_full_blocks
        pool.evict_blocks = self._evict_blocks
        pool.reset_prefix_cache = self._reset_prefix_cache

    def close(self) -> None:
        """Restore the pool's own methods. Idempotent."""
        for name in self._originals:
            vars(self._pool).pop(name, None)
        self._originals = {}

    def take_evicted(self) -> list[NamedBlock]:
        """The blocks evicted since the last call, in the order of eviction."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_named(self) -> list[Naming]:
        """The blocks that got names since the last call, by request."""
        namings, self._namings = self._namings, []
        return namings

    def has(self, block: NamedBlock) -> bool:
        return self._names.name_of(self._pool.blocks[block.block_id]) == block.host_key

    def coldest(self, most: int) -> list[NamedBlock]:
        """The named ones of the next `most` blocks to be evicted, in the order of eviction."""
        return self._with_names(itertools.islice(self._free(), most))

    def num_blocks(self) -> int:
        return len(self._pool.blocks)

    def _free(self) -> Iterator[Any]:
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while block is not None and block.block_id >= 0:
            yield block
            block = block.next_free_block

    def _get_new_blocks(self, num_blocks: int) -> Any:
        coming = self.coldest(num_blocks)
        taken = self._originals["get_new_blocks"](num_blocks)
        self._evicted += coming
        return taken

    def _cache_full_blocks(
        self,
        request: Any,
        blocks: Sequence[Any],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *rest: Any,
        **more: Any,
    ) -> Any:
        result = self._originals["cache_full_blocks"](
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            *rest,
            **more,
        )
        first, new = self._names.name_blocks(
            request, blocks, num_cached_blocks, num_full_blocks, kv_cache_group_id
        )
        if new:
            self._namings.append(Naming(request.request_id, new))
            self._named(request, first, num_full_blocks * block_size)
        return result

    def _evict_blocks(self, block_ids: Collection[int]) -> Any:
        lost = self._with_names(self._pool.blocks[number] for number in block_ids)
        result = self._originals["evict_blocks"](block_ids)
        self._remove_lost_blocks(lost, may_be_wrong=True)
        return result

    def _reset_prefix_cache(self) -> Any:
        lost = self._with_names(self._pool.blocks)
        result = self._originals["reset_prefix_cache"]()
        if result:
            self._remove_lost_blocks(lost, may_be_wrong=False)
        return result

    def _with_names(self, blocks: Iterable[Any]) -> list[NamedBlock]:
        found = ((each.block_id, self._names.name_of(each)) for each in blocks)
        return [NamedBlock(number, name) for number, name in found if name is not None]

    def _remove_lost_blocks(self, lost: Sequence[NamedBlock], *, may_be_wrong: bool) -> None:
        gone = set(lost)
        self._namings = [
            Naming(each.request_id, [block for block in each.blocks if block not in gone])
            for each in self._namings
        ]
        self._dropped(lost, may_be_wrong)
