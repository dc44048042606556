# SPDX-License-Identifier: Apache-2.0
"""Watches which blocks of vLLM's block pool are cached, uncached, or evicted next.

vLLM does not report these events to a connector, but passes the pool to it
(`bind_kv_cache_manager`). The watch wraps four public methods of the pool:

    cache_full_blocks    blocks get keys: the step computes them, or a load has brought them
    get_new_blocks       blocks are taken from the free queue; those with keys are evicted
    evict_blocks         blocks lose their keys because they may be wrong
    reset_prefix_cache   all blocks lose their keys

An evicted block keeps its bytes until the scheduled step runs, so it can still be copied. The watch
always calls the original method, and does not change the method's result."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from .host_keys import CachedBlock, HostKeys

log = logging.getLogger(__name__)


class NewlyCached(NamedTuple):
    """The blocks of a request that vLLM cached in one call, in order."""

    request_id: str
    blocks: list[CachedBlock]


class PoolWatch:
    """Watches one pool; `keys` has the keys of its blocks. `cached` is called with the request, the
    first position whose blocks got keys, and the number of tokens up to the end of the last cached
    block. `dropped` is called with blocks that lost their keys without being evicted, and whether
    the blocks may be wrong. Neither function may raise. vLLM's scheduler thread makes all calls."""

    def __init__(
        self,
        pool: Any,
        keys: HostKeys,
        cached: Callable[[Any, int, int], None],
        dropped: Callable[[Sequence[CachedBlock], bool], None],
    ) -> None:
        self._pool = pool
        self._keys = keys
        self._cached = cached
        self._dropped = dropped
        self._evicted: list[CachedBlock] = []
        self._newly_cached: list[NewlyCached] = []
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

    def take_evicted(self) -> list[CachedBlock]:
        """Return the blocks evicted since the last call, in the order of eviction."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def take_cached(self) -> list[NewlyCached]:
        """Return the blocks that were cached since the last call, by request."""
        newly_cached, self._newly_cached = self._newly_cached, []
        return newly_cached

    def has(self, block: CachedBlock) -> bool:
        return self._keys.key_of(self._pool.blocks[block.block_id]) == block.host_key

    def coldest(self, most: int) -> list[CachedBlock]:
        """Return the cached blocks among the next `most` to be reused, in that order."""
        return self._with_keys(itertools.islice(self._free(), most))

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
        first, new = self._keys.record_cached(
            request, blocks, num_cached_blocks, num_full_blocks, kv_cache_group_id
        )
        if new:
            self._newly_cached.append(NewlyCached(request.request_id, new))
            self._cached(request, first, num_full_blocks * block_size)
        return result

    def _evict_blocks(self, block_ids: Collection[int]) -> Any:
        lost = self._with_keys(self._pool.blocks[number] for number in block_ids)
        result = self._originals["evict_blocks"](block_ids)
        self._remove_lost_blocks(lost, may_be_wrong=True)
        return result

    def _reset_prefix_cache(self) -> Any:
        lost = self._with_keys(self._pool.blocks)
        result = self._originals["reset_prefix_cache"]()
        if result:
            self._remove_lost_blocks(lost, may_be_wrong=False)
        return result

    def _with_keys(self, blocks: Iterable[Any]) -> list[CachedBlock]:
        found = ((each.block_id, self._keys.key_of(each)) for each in blocks)
        return [CachedBlock(number, key) for number, key in found if key is not None]

    def _remove_lost_blocks(self, lost: Sequence[CachedBlock], *, may_be_wrong: bool) -> None:
        gone = set(lost)
        self._newly_cached = [
            NewlyCached(each.request_id, [block for block in each.blocks if block not in gone])
            for each in self._newly_cached
        ]
        self._dropped(lost, may_be_wrong)
