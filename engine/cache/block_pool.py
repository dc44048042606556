# SPDX-License-Identifier: Apache-2.0
"""The block pool: tracks free and held blocks, and finds cached blocks by key.

One pool serves all cache groups. A block has one page, or one page for each of several groups with
the same kind of attention (`group_spec.pages_per_block`). A block is held, cached and reused as a
whole, so its pages are always in the same state. The connector counts pages, and has a key for each
page (`connector/page_keys.py`).

A block is in one of these states:

    free, uncached    in the free queue, with worthless bytes
    free, cached      in the free queue, found by prefix lookups; its reuse is an eviction
    held              `ref_cnt` > 0, not in the free queue, cached once the block is full

A block that a step will fill is cached before this step has run. Such a block counts as not
computed until `commit_step`:

- Other requests of the same step may hit a block that is not computed, because each layer writes
  the K and V of the whole batch before it reads any. Requests of later steps may hit such a block
  too, because steps run in order, and fail if an earlier step fails.
- A request that loads other blocks may not hit such a block, because the step may still fail during
  the load; `all_computed` checks this.
- If such a block is reused, it loses its key and is not reported as evicted. Unwritten data
  therefore never reaches a tier.
- After a failed step, `drop_uncomputed` uncaches the blocks that this step and all later steps
  cached, because the later steps may have read blocks of the failed step.

`tell_dropped` sets a function that is called at once when a block is uncached without being
evicted. The next step may overwrite the block, so a pending copy of it must be dropped.

Every step has a larger id than the step before. A block belongs to the step that was current
(`begin_step`) when the block was cached. Blocks from a finished load count as computed at once.

Several blocks may have the same key: block tables only grow at their end, so a request that
computes the same tokens as another request keeps its own blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

from ...connector.messages import EvictedBlock
from ...connector.page_keys import block_keys, group_suffix, page_keys
from ..observer import Observer
from .cold_blocks import ColdBlocks
from .kv_block import FreeBlockQueue, KVCacheBlock
from .residency import Residency

# Makes an EvictedBlock from a triple at half the cost of the class; a step may evict thousands.
_evicted_block = partial(tuple.__new__, EvictedBlock)


class BlockPool:
    """A pool of `num_blocks` pages, used by one thread. Page 0 is the null block, which is never
    allocated or cached."""

    def __init__(self, num_blocks: int, enable_caching: bool = True, width: int = 1) -> None:
        """`width` is the number of pages of a block, and of the groups that share it. A method's
        `group_id` is the first such group. Raises ValueError for too small a pool."""
        if num_blocks <= width:
            least = "one" if width == 1 else width
            raise ValueError(
                f"a pool needs the null block and at least {least} more, not {num_blocks} in all"
            )
        self.num_blocks = num_blocks
        self.width = width
        # Pages after the last whole block are unused.
        self.num_usable = (num_blocks - 1) // width * width
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(i) for i in (0, *range(1, self.num_usable + 1, width))]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.num_evicted = 0
        self.residency = Residency(self.blocks[1:])
        # Blocks by key. Blocks by key. Most keys have one block; several are in a dict by block id.
        self._cached: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        # The step that writes each block, in the order of caching, which is the order of the steps.
        self._uncomputed: dict[KVCacheBlock, int] = {}
        self._step_id = 0
        self._evicted: list[tuple[int, bytes, int]] = []
        # For `take_fresh`: computed blocks not offered yet, in the order of steps. Read only.
        self.fresh: deque[KVCacheBlock] = deque(maxlen=len(self.blocks))
        self._offers_all = False
        self._num_fresh = 0
        self._cold = ColdBlocks(self.free_queue)
        self._pins: dict[KVCacheBlock, int] = {}  # how many holders of the block are pins
        self._num_reclaimable = 0
        self.observer: Observer | None = None
        self._tell_dropped: Callable[[Sequence[EvictedBlock]], None] = _nobody

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, including the pages of cached free blocks."""
        return self.free_queue.num_free * self.width

    @property
    def num_held(self) -> int:
        return self.num_usable - self.free_queue.num_free * self.width

    @property
    def num_reclaimable(self) -> int:
        """Pages of pinned blocks that no request holds."""
        return self._num_reclaimable * self.width

    @property
    def num_cached(self) -> int:
        return len(self._cached) * self.width

    @property
    def usage(self) -> float:
        """Held pages as a fraction of all usable pages."""
        return self.num_held / self.num_usable

    @property
    def is_idle(self) -> bool:
        return self.num_held == 0

    def get_cached_prefix(
        self, digests: Sequence[bytes], group_ids: Sequence[int] = (0,)
    ) -> tuple[list[KVCacheBlock], ...]:
        """Return the blocks of the longest prefix of `digests` that is cached in every group: one
        list per group. Changes nothing; the blocks may be reused until `touch` holds them."""
        prefix = [self._leading(digests, group_ids[0])]
        for group in group_ids[1:]:
            # The next group need not look further than this group's prefix.
            prefix.append(self._leading(digests[: len(prefix[-1])], group))
        shortest = len(prefix[-1])
        for found in prefix[:-1]:
            del found[shortest:]
        return tuple(prefix)

    def has(self, key: bytes) -> bool:
        return key in self._cached

    def cached_block(self, key: bytes) -> KVCacheBlock:
        """Return a block with this key; raises KeyError if there is none."""
        found = self._cached[key]
        return next(iter(found.values())) if isinstance(found, dict) else found

    def all_computed(self, blocks: Iterable[KVCacheBlock]) -> bool:
        """Whether the steps that write these blocks have all run."""
        uncomputed = self._uncomputed
        return not uncomputed or not any(block in uncomputed for block in blocks)

    def is_due(self, block: KVCacheBlock) -> bool:
        """Whether the step being scheduled, rather than an earlier step, writes this block."""
        return self._uncomputed.get(block) == self._step_id

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add one holder to each block. Free blocks leave the free queue and keep their keys."""
        if self._pins:
            self._count_touched(blocks)
        self._cold.num_unseen += self.free_queue.hold_n(blocks)
        self.residency.touched(blocks)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Allocate `count` blocks from the front of the free queue, or raise RuntimeError if there
        are fewer. The blocks lose their keys; `take_evicted` returns evicted computed blocks."""
        blocks = self.free_queue.popleft_n(count)
        self._cold.num_unseen += count
        self.residency.taken(blocks)
        cached, uncomputed, evicted = self._cached, self._uncomputed, self._evicted
        was_late, width = False, self.width
        gone: list[bytes] | None = None if self.observer is None else []
        for block in blocks:
            block.ref_cnt = 1
            key = block.block_hash
            if key is None:
                continue
            found = cached.pop(key)
            if found is not block:
                self._keep_others(key, block, found)
            elif gone is not None:
                gone.append(key)
            block.block_hash = None
            if uncomputed and block in uncomputed:
                del uncomputed[block]
            else:
                evicted.append((block.block_id, key, width))
                if not block.is_offered:
                    was_late = True
            block.is_offered = False
        if was_late:
            self._cold.was_late = True
        if gone:
            self._tell_uncached(gone)
        return blocks

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove one holder from each block. Blocks without a holder are reused in the given order;
        callers pass a sequence's tail before its head, so that prefixes stay cached longest."""
        if not self._pins:
            self._cold.added(self.free_queue.release_n(blocks))
            return
        blocks = list(blocks)
        self._cold.added(self.free_queue.release_n(blocks))
        pins = self._pins
        self._num_reclaimable += sum([pins.get(block) == block.ref_cnt for block in blocks])

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make a pin of one holder of each block, which was a running request. `num_reclaimable`
        counts the pages of blocks that only pins hold."""
        for block in blocks:
            if not block.is_null:
                count = self._pins[block] = self._pins.get(block, 0) + 1
                self._num_reclaimable += block.ref_cnt == count

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Undo one `pin` of each block; the caller calls `free_blocks` right after."""
        for block in blocks:
            if block.is_null:
                continue
            count = self._pins[block]
            self._num_reclaimable -= block.ref_cnt == count
            if count > 1:
                self._pins[block] = count - 1
            else:
                del self._pins[block]

    def _count_touched(self, blocks: Iterable[KVCacheBlock]) -> None:
        pins = self._pins
        self._num_reclaimable -= sum([pins.get(block) == block.ref_cnt for block in blocks])

    def cache_full_blocks(
        self,
        digests: Sequence[bytes],
        blocks: Sequence[KVCacheBlock],
        group_id: int = 0,
        computed: bool = False,
    ) -> None:
        """Cache held blocks by their digests. `computed`: whether the blocks are loaded already, so
        the step being scheduled does not write them. Null blocks get no key, and may only stand
        before all other blocks."""
        if not self.enable_caching:
            return
        if blocks and blocks[0].is_null:
            first = next((i for i, b in enumerate(blocks) if not b.is_null), len(blocks))
            digests, blocks = digests[first:], blocks[first:]
        suffix = group_suffix(group_id)
        cached = self._cached
        for digest, block in zip(digests, blocks, strict=True):
            key = digest + suffix
            block.block_hash = key
            found = cached.setdefault(key, block)
            if found is not block:
                self._add_duplicate(key, block, found)
        if not computed:
            self._uncomputed.update(dict.fromkeys(blocks, self._step_id))

    def cache_computed(self, digest: bytes, block: KVCacheBlock, group_id: int = 0) -> None:
        """Cache a held, computed block that has no key, and queue the block for `take_fresh`."""
        if block.block_hash is None and not block.is_null:
            self.cache_full_blocks([digest], [block], group_id, computed=True)
            self._add_fresh([block])

    def note_computed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Queue for `take_fresh`, if `_offers_all`, blocks cached after their step had run."""
        if self._offers_all:
            self._add_fresh([block for block in blocks if block.block_hash is not None])

    def offer_again(self, keys: Iterable[bytes]) -> None:
        """Queue the computed blocks with these keys, if present, for `take_fresh` again."""
        for key in block_keys(keys, self.width):
            found = self._cached.get(key)
            block = next(iter(found.values())) if isinstance(found, dict) else found
            if block is not None and block not in self._uncomputed:
                block.is_offered = False
                self._add_fresh([block])

    def offer(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Queue cached blocks for `take_fresh`, except those already offered under their key."""
        self._add_fresh([each for each in blocks if each.block_hash and not each.is_offered])

    @property
    def num_fresh(self) -> int:
        """The number of blocks queued for `take_fresh` since the start."""
        return self._num_fresh

    @property
    def num_given(self) -> int:
        """The number of blocks, in queue order, that `take_fresh` has returned or skipped."""
        return self._num_fresh - len(self.fresh)

    def tell_dropped(self, tell: Callable[[Sequence[EvictedBlock]], None]) -> None:
        """Set the function to call with blocks that are uncached without being evicted."""
        self._tell_dropped = tell

    def offer_all(self) -> None:
        """Queue every computed block for `take_fresh` from now on, not only offered blocks."""
        self._offers_all = True

    def begin_step(self, step_id: int) -> None:
        """Assign blocks cached from now on to this step. Raise ValueError unless the id grew."""
        if step_id <= self._step_id:
            raise ValueError(f"steps are numbered upwards: {step_id} came after {self._step_id}")
        self._step_id = step_id

    def commit_step(self, step_id: int | None = None) -> None:
        """Mark the blocks cached up to this step (None: by all steps) as computed."""
        uncomputed = self._uncomputed
        if step_id is None or step_id >= self._step_id:  # no other step is in flight
            computed = list(uncomputed)
            uncomputed.clear()
        else:
            computed = list(takewhile(lambda block: uncomputed[block] <= step_id, uncomputed))
            for block in computed:
                del uncomputed[block]
        if self._offers_all:
            self._add_fresh(computed)

    def drop_uncomputed(self, from_step_id: int = 0) -> None:
        """Uncache the blocks of this failed step and all later steps (0: all uncomputed blocks)."""
        steps = self._uncomputed.items()
        self.uncache_blocks([block for block, step_id in steps if step_id >= from_step_id])

    def revoke_caching(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Uncache those of a request's `blocks` that the step being scheduled cached. If another
        request has found one of the blocks, raise RuntimeError and change nothing."""
        own = [b for b in blocks if self._uncomputed.get(b) == self._step_id]
        shared = [block.block_id for block in own if block.ref_cnt > 1]
        if shared:
            raise RuntimeError(f"blocks {shared} were found by other requests of the same step")
        self.uncache_blocks(own)

    def uncache_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Remove the keys of held or free blocks. Uncached free blocks will be reused first."""
        worthless = []
        dropped = []
        for block in blocks:
            key = block.block_hash
            if key is None:
                continue
            dropped.append(EvictedBlock(block.block_id, key, self.width))
            self._keep_others(key, block, self._cached.pop(key))
            block.block_hash = None
            block.is_offered = False
            self._uncomputed.pop(block, None)
            if block.ref_cnt == 0:
                worthless.append(block)
        self.free_queue.remove_n(worthless)
        self.free_queue.prepend_n(worthless)
        if dropped:
            self._tell_dropped(dropped)
            if self.observer is not None:
                # Of blocks that share a key, another block may still have the key.
                keys = dict.fromkeys(block.key for block in dropped)
                self._tell_uncached([key for key in keys if key not in self._cached])

    def uncache_digests(self, digests: Sequence[bytes], group_id: int = 0) -> None:
        suffix = group_suffix(group_id)
        blocks: list[KVCacheBlock] = []
        for digest in digests:
            found = self._cached.get(digest + suffix)
            if found is not None:
                blocks += found.values() if isinstance(found, dict) else [found]
        self.uncache_blocks(blocks)

    def take_evicted(self) -> list[EvictedBlock]:
        """Return the computed blocks evicted since the last call, in order of eviction. The caller
        must have them copied before the step being scheduled writes to them."""
        evicted = list(map(_evicted_block, self._evicted))
        self._evicted.clear()
        self.num_evicted += len(evicted) * self.width
        return evicted

    def has_cold(self, least: int) -> bool:
        """Whether `take_cold` may find `least` pages, or a block was evicted but never offered."""
        return self._cold.num_unseen >= self._whole(least) or self._cold.was_late

    def take_cold(self, count: int, within: int, least: int = 1) -> list[EvictedBlock]:
        """Return up to `count` pages of computed, cached blocks among the `within` pages to be
        reused next, in the order of reuse. Only whole blocks are returned, even for a `count` of 1,
        and each block once under one key. Returns nothing if there are fewer than `least` pages,
        unless a block was evicted before it was offered."""
        if self.width > 1:
            count, within, least = self._whole(count), self._whole(within), self._whole(least)
        cold = self._cold.collect_cold(count, within, least, self._uncomputed)
        return self._offered(cold) if cold else []

    def take_fresh(self, count: int) -> list[EvictedBlock]:
        """Return up to `count` pages of queued computed blocks, the tail of a sequence before its
        head. Only whole blocks are returned, each once under one key, by this method or by
        `take_cold`."""
        fresh: dict[KVCacheBlock, None] = {}
        most = self._whole(count)
        while self.fresh and len(fresh) < most:
            block = self.fresh.popleft()
            # The block may have been evicted, or cached again by the running step.
            if block.block_hash and not block.is_offered and block not in self._uncomputed:
                fresh[block] = None
        return self._offered(list(fresh)[::-1])

    def resident(self) -> list[EvictedBlock]:
        """Return all computed, cached blocks in the form of evicted blocks: free blocks in the
        order of reuse, then held blocks. Shutdown calls this to store the blocks in the tiers."""
        held = [block for block in self.blocks if block.ref_cnt > 0]
        return [
            EvictedBlock(block.block_id, block.block_hash, self.width)
            for block in (*self.free_queue, *held)
            if block.block_hash is not None and block not in self._uncomputed
        ]

    def list_keys(self) -> list[bytes]:
        return page_keys(self._cached, self.width)

    def reset_prefix_cache(self) -> bool:
        """Uncache all blocks. Return False, and do nothing, if a block is held."""
        if not self.is_idle:
            return False
        width = self.width
        dropped = [
            EvictedBlock(b.block_id, b.block_hash, width) for b in self.blocks if b.block_hash
        ]
        gone = list(self._cached)
        self._cached.clear()
        self._uncomputed.clear()
        for block in self.blocks:
            block.block_hash = None
            block.is_offered = False
        self._tell_dropped(dropped)
        if gone:
            self._tell_uncached(gone)
        return True

    def _tell_uncached(self, keys: list[bytes]) -> None:
        if self.observer is not None and keys:
            self.observer.unnamed(page_keys(keys, self.width))

    def _whole(self, num_pages: int) -> int:
        """Convert a number of pages to a number of whole blocks, at least 1."""
        return min(num_pages, max(1, num_pages // self.width))

    def _offered(self, blocks: Sequence[KVCacheBlock]) -> list[EvictedBlock]:
        """Mark cached blocks as offered, and return them in the form of evicted blocks."""
        offered = []
        for block in blocks:
            assert block.block_hash is not None
            block.is_offered = True
            offered.append(EvictedBlock(block.block_id, block.block_hash, self.width))
        return offered

    def _leading(self, digests: Sequence[bytes], group_id: int) -> list[KVCacheBlock]:
        suffix = group_suffix(group_id)
        get = self._cached.get
        blocks = []
        for digest in digests:
            found = get(digest + suffix)
            if found is None:
                break
            if isinstance(found, dict):
                found = next(iter(found.values()))
            blocks.append(found)
        return blocks

    def _add_fresh(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.fresh.extend(blocks)
        self._num_fresh += len(blocks)

    def _add_duplicate(
        self, key: bytes, block: KVCacheBlock, found: KVCacheBlock | dict[int, KVCacheBlock]
    ) -> None:
        if isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cached[key] = {found.block_id: found, block.block_id: block}

    def _keep_others(
        self, key: bytes, block: KVCacheBlock, found: KVCacheBlock | dict[int, KVCacheBlock]
    ) -> None:
        """Restore a key that was removed for `block` if other blocks have the same key."""
        if isinstance(found, dict):
            del found[block.block_id]
            self._cached[key] = found if len(found) > 1 else found.popitem()[1]


def _nobody(_dropped: Sequence[EvictedBlock]) -> None:
    """Do nothing: by default, uncached blocks are not reported."""
