# SPDX-License-Identifier: Apache-2.0
"""The block pool: which block is free, which is shared, and under which names blocks are found.

One pool serves all cache groups. A block has a page in one of them, or in several that attend alike
(`group_spec.pages_per_block`); it is held, named and reused as one, so what is true of one of its
pages is true of all. Counts and names that others see are those of pages
(`connector/page_names.py`).

A block is in one of these states:

    free, unnamed     in the queue, bytes worth nothing
    free, named       in the queue, still found by its key; reusing it is an eviction
    held              `ref_cnt` > 0, not in the queue, named once it is full

*When a name may be trusted.* A full block gets its name when it is allocated, that is before the
step that writes it has run. Until `commit_step` it counts as not computed:

- other requests of the same step may hit it, because each layer writes the K and V of the whole
  batch before it reads any; and those of later steps, because steps run in their order and fail
  together (below);
- it may not be hit by a request that would only read it in a later step (one that loads), because
  the step may yet fail: `all_computed` tells;
- if it is reused before the commit, its name is dropped and not reported as evicted, so what was
  never written can never reach a tier;
- `drop_uncomputed` takes the names away after a step that failed, and those of all later steps,
  which may have read its blocks.

`tell_dropped` reports every name that a block loses without being evicted, at that moment: the next
step may overwrite the block, so a pending copy of it is void.

Steps are told apart by their ids, which only grow: a block belongs to the step that `begin_step`
named last when it got its name. Names from a finished load are trusted at once.

Several blocks may carry one name: block tables only ever grow at their end, so a request that
computed what another one has keeps its own copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import takewhile

from ...connector.messages import EvictedBlock
from ...connector.page_names import block_keys, group_suffix, page_keys
from ..observer import Observer
from .cold_blocks import ColdBlocks
from .kv_block import FreeBlockQueue, KVCacheBlock
from .residency import Residency

# From a triple, at half the price of the class itself; a step may evict thousands.
_evicted_block = partial(tuple.__new__, EvictedBlock)


class BlockPool:
    """`num_blocks` pages, that of the null block (id 0, never handed out, never named) among them.

    Called by one thread. Nothing here waits.
    """

    def __init__(self, num_blocks: int, enable_caching: bool = True, width: int = 1) -> None:
        """`width`: the pages of a block, and so the cache groups that share it; what takes a group
        takes the first of them. Raises ValueError for too small a pool."""
        if num_blocks <= width:
            least = "one" if width == 1 else width
            raise ValueError(
                f"a pool needs the null block and at least {least} more, not {num_blocks} in all"
            )
        self.num_blocks = num_blocks
        self.width = width
        # What is left over, fewer than a block has, belongs to none.
        self.num_usable = (num_blocks - 1) // width * width
        self.enable_caching = enable_caching
        self.blocks = [KVCacheBlock(i) for i in (0, *range(1, self.num_usable + 1, width))]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_queue = FreeBlockQueue(self.blocks[1:])
        self.num_evicted = 0
        self.residency = Residency(self.blocks[1:])
        # Nearly every key has one block; a dict of its own only where there are several.
        self._named: dict[bytes, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        # The step that writes a block, in the order they were named: that of the steps.
        self._uncomputed: dict[KVCacheBlock, int] = {}
        self._step_id = 0
        self._evicted: list[tuple[int, bytes, int]] = []
        # For `take_fresh`: computed and not offered yet, in the order of steps; not to be changed.
        self.fresh: deque[KVCacheBlock] = deque(maxlen=len(self.blocks))
        self._offers_all = False
        self._num_fresh = 0
        self._cold = ColdBlocks(self.free_queue)
        self._pins: dict[KVCacheBlock, int] = {}  # how many of its holders run no more
        self._num_reclaimable = 0
        self.observer: Observer | None = None
        self._tell_dropped: Callable[[Sequence[EvictedBlock]], None] = _nobody

    @property
    def num_free(self) -> int:
        """Blocks that can be had, those with a name included."""
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
        return len(self._named) * self.width

    @property
    def usage(self) -> float:
        """Held blocks as a fraction of those that can be held."""
        return self.num_held / self.num_usable

    @property
    def is_idle(self) -> bool:
        return self.num_held == 0

    def get_cached_prefix(
        self, digests: Sequence[bytes], group_ids: Sequence[int] = (0,)
    ) -> tuple[list[KVCacheBlock], ...]:
        """The blocks of the longest run of `digests` that every group has, a list for each group.

        Changes nothing; the blocks may be reused until they are touched.
        """
        prefix = [self._leading(digests, group_ids[0])]
        for group in group_ids[1:]:
            # What one group lacks need not be looked for in the next.
            prefix.append(self._leading(digests[: len(prefix[-1])], group))
        shortest = len(prefix[-1])
        for found in prefix[:-1]:
            del found[shortest:]
        return tuple(prefix)

    def has(self, key: bytes) -> bool:
        return key in self._named

    def named(self, key: bytes) -> KVCacheBlock:
        """A block of this name; raises KeyError without one."""
        found = self._named[key]
        return next(iter(found.values())) if isinstance(found, dict) else found

    def all_computed(self, blocks: Iterable[KVCacheBlock]) -> bool:
        """Whether the steps that write these blocks have all run."""
        uncomputed = self._uncomputed
        return not uncomputed or not any(block in uncomputed for block in blocks)

    def is_due(self, block: KVCacheBlock) -> bool:
        """Whether a block gets its bytes from the step being scheduled, and not from one before."""
        return self._uncomputed.get(block) == self._step_id

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Hold blocks for one more request; free ones leave the queue and keep their names."""
        if self._pins:
            self._count_touched(blocks)
        self._cold.num_unseen += self.free_queue.hold_n(blocks)
        self.residency.touched(blocks)

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        """Hold the first `count` of the free queue, whole blocks, all or none (RuntimeError).

        Their names are dropped; those of computed blocks go to `take_evicted`.
        """
        blocks = self.free_queue.popleft_n(count)
        self._cold.num_unseen += count
        self.residency.taken(blocks)
        named, uncomputed, evicted = self._named, self._uncomputed, self._evicted
        was_late, width = False, self.width
        gone: list[bytes] | None = None if self.observer is None else []
        for block in blocks:
            block.ref_cnt = 1
            key = block.block_hash
            if key is None:
                continue
            found = named.pop(key)
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
            self._tell_unnamed(gone)
        return blocks

    def free_blocks(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give blocks back for one request, the one to be reused first in front: the tail of a
        sequence before its head, so that prefixes live longest."""
        if not self._pins:
            self._cold.added(self.free_queue.release_n(blocks))
            return
        blocks = list(blocks)
        self._cold.added(self.free_queue.release_n(blocks))
        pins = self._pins
        self._num_reclaimable += sum([pins.get(block) == block.ref_cnt for block in blocks])

    def pin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Count held blocks as held by a pin, and no longer by a running request; `num_reclaimable`
        counts those that pins alone hold."""
        for block in blocks:
            if not block.is_null:
                count = self._pins[block] = self._pins.get(block, 0) + 1
                self._num_reclaimable += block.ref_cnt == count

    def unpin(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Undo one `pin` of each block, right before `free_blocks` gives them back."""
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
        """Name held blocks by their digests. `computed`: their bytes are there already (loaded),
        not written by the step being scheduled. Null blocks, which get no name, may only come
        before all others."""
        if not self.enable_caching:
            return
        if blocks and blocks[0].is_null:
            first = next((i for i, b in enumerate(blocks) if not b.is_null), len(blocks))
            digests, blocks = digests[first:], blocks[first:]
        suffix = group_suffix(group_id)
        named = self._named
        for digest, block in zip(digests, blocks, strict=True):
            key = digest + suffix
            block.block_hash = key
            found = named.setdefault(key, block)
            if found is not block:
                self._add_duplicate(key, block, found)
        if not computed:
            self._uncomputed.update(dict.fromkeys(blocks, self._step_id))

    def name_computed(self, digest: bytes, block: KVCacheBlock, group_id: int = 0) -> None:
        """Name a held block after it was computed, so that it is offered as others are. It keeps
        the name of a full block, if it has one."""
        if block.block_hash is None and not block.is_null:
            self.cache_full_blocks([digest], [block], group_id, computed=True)
            self._add_fresh([block])

    def note_computed(self, blocks: Sequence[KVCacheBlock]) -> None:
        """The blocks were named when their step had run; `take_fresh` gives them where it gives
        all."""
        if self._offers_all:
            self._add_fresh([block for block in blocks if block.block_hash is not None])

    def offer_again(self, keys: Iterable[bytes]) -> None:
        """Give computed blocks to `take_fresh` once more, as far as they are here."""
        for key in block_keys(keys, self.width):
            found = self._named.get(key)
            block = next(iter(found.values())) if isinstance(found, dict) else found
            if block is not None and block not in self._uncomputed:
                block.is_offered = False
                self._add_fresh([block])

    def offer(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Give these to `take_fresh`, but for those that were given before under their names."""
        self._add_fresh([each for each in blocks if each.block_hash and not each.is_offered])

    @property
    def num_fresh(self) -> int:
        """Blocks queued for `take_fresh` since the start."""
        return self._num_fresh

    @property
    def num_given(self) -> int:
        """The number of the `num_fresh` blocks, in their order, that were given or passed over."""
        return self._num_fresh - len(self.fresh)

    def tell_dropped(self, tell: Callable[[Sequence[EvictedBlock]], None]) -> None:
        """Call `tell` from now on with blocks that lose their names and are not reported as
        evicted, whatever took the names away."""
        self._tell_dropped = tell

    def offer_all(self) -> None:
        """Queue every computed block for `take_fresh` from now on, and not only offered ones."""
        self._offers_all = True

    def begin_step(self, step_id: int) -> None:
        """Give names on behalf of this step from now on. Raises ValueError for an id that does not
        grow."""
        if step_id <= self._step_id:
            raise ValueError(f"steps are numbered upwards: {step_id} came after {self._step_id}")
        self._step_id = step_id

    def commit_step(self, step_id: int | None = None) -> None:
        """This step and all before it have run (without an id, all): the blocks that they name are
        computed."""
        uncomputed = self._uncomputed
        if step_id is None or step_id >= self._step_id:  # nothing else is in flight
            computed = list(uncomputed)
            uncomputed.clear()
        else:
            computed = list(takewhile(lambda block: uncomputed[block] <= step_id, uncomputed))
            for block in computed:
                del uncomputed[block]
        if self._offers_all:
            self._add_fresh(computed)

    def drop_uncomputed(self, from_step_id: int = 0) -> None:
        """This step failed, and with it all later ones (without an id, all): what they named cannot
        be found any more."""
        named = self._uncomputed.items()
        self.drop_names([block for block, step_id in named if step_id >= from_step_id])

    def revoke_names(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take back the names that the step being scheduled gave to blocks of one request. Raises
        RuntimeError where another request has found one of them, and nothing changes."""
        own = [b for b in blocks if self._uncomputed.get(b) == self._step_id]
        shared = [block.block_id for block in own if block.ref_cnt > 1]
        if shared:
            raise RuntimeError(f"blocks {shared} were found by other requests of the same step")
        self.drop_names(own)

    def drop_names(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Make blocks unfindable, held or free; free ones are now the first to be reused."""
        worthless = []
        dropped = []
        for block in blocks:
            key = block.block_hash
            if key is None:
                continue
            dropped.append(EvictedBlock(block.block_id, key, self.width))
            self._keep_others(key, block, self._named.pop(key))
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
                # Of two blocks with one name one may be left, or both be among them.
                keys = dict.fromkeys(block.key for block in dropped)
                self._tell_unnamed([key for key in keys if key not in self._named])

    def drop_keys(self, digests: Sequence[bytes], group_id: int = 0) -> None:
        """`drop_names` of every block that carries one of these names."""
        suffix = group_suffix(group_id)
        blocks: list[KVCacheBlock] = []
        for digest in digests:
            found = self._named.get(digest + suffix)
            if found is not None:
                blocks += found.values() if isinstance(found, dict) else [found]
        self.drop_names(blocks)

    def take_evicted(self) -> list[EvictedBlock]:
        """Computed blocks that were evicted since the last call, in that order. They are to be
        copied, if at all, before the step being scheduled writes to them."""
        evicted = list(map(_evicted_block, self._evicted))
        self._evicted.clear()
        self.num_evicted += len(evicted) * self.width
        return evicted

    def has_cold(self, least: int) -> bool:
        """Whether `take_cold` may have so many, or any where one was evicted too soon."""
        return self._cold.num_unseen >= self._whole(least) or self._cold.was_late

    def take_cold(self, count: int, within: int, least: int = 1) -> list[EvictedBlock]:
        """Up to `count` computed blocks with a name among the `within` to be reused next, in that
        order. A block is given whole (of `count` 1 too), once under one name. Empty while there are
        fewer than `least`, unless one was evicted that had not been given: then there is something
        to store anyway."""
        if self.width > 1:
            count, within, least = self._whole(count), self._whole(within), self._whole(least)
        cold = self._cold.collect_cold(count, within, least, self._uncomputed)
        return self._offered(cold) if cold else []

    def take_fresh(self, count: int) -> list[EvictedBlock]:
        """Up to `count` blocks that were computed since they were last asked for, the tail of a
        sequence before its head. A block is given whole, once under one name, here or by
        `take_cold`."""
        fresh: dict[KVCacheBlock, None] = {}
        most = self._whole(count)
        while self.fresh and len(fresh) < most:
            block = self.fresh.popleft()
            # It may have been evicted, and even named anew by the step that runs.
            if block.block_hash and not block.is_offered and block not in self._uncomputed:
                fresh[block] = None
        return self._offered(list(fresh)[::-1])

    def resident(self) -> list[EvictedBlock]:
        """The computed blocks with a name, as they would be evicted: free ones in the order of
        reuse, then held ones. Changes nothing; for an orderly shutdown."""
        held = [block for block in self.blocks if block.ref_cnt > 0]
        return [
            EvictedBlock(block.block_id, block.block_hash, self.width)
            for block in (*self.free_queue, *held)
            if block.block_hash is not None and block not in self._uncomputed
        ]

    def list_names(self) -> list[bytes]:
        return page_keys(self._named, self.width)

    def reset_prefix_cache(self) -> bool:
        """Forget all names, if no request holds a block; otherwise change nothing."""
        if not self.is_idle:
            return False
        width = self.width
        dropped = [
            EvictedBlock(b.block_id, b.block_hash, width) for b in self.blocks if b.block_hash
        ]
        gone = list(self._named)
        self._named.clear()
        self._uncomputed.clear()
        for block in self.blocks:
            block.block_hash = None
            block.is_offered = False
        self._tell_dropped(dropped)
        if gone:
            self._tell_unnamed(gone)
        return True

    def _tell_unnamed(self, keys: list[bytes]) -> None:
        if self.observer is not None and keys:
            self.observer.unnamed(page_keys(keys, self.width))

    def _whole(self, num_pages: int) -> int:
        """The number of blocks with `num_pages` pages; one at least."""
        return min(num_pages, max(1, num_pages // self.width))

    def _offered(self, blocks: Sequence[KVCacheBlock]) -> list[EvictedBlock]:
        """Named blocks, given once under their names."""
        offered = []
        for block in blocks:
            assert block.block_hash is not None
            block.is_offered = True
            offered.append(EvictedBlock(block.block_id, block.block_hash, self.width))
        return offered

    def _leading(self, digests: Sequence[bytes], group_id: int) -> list[KVCacheBlock]:
        suffix = group_suffix(group_id)
        get = self._named.get
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
            self._named[key] = {found.block_id: found, block.block_id: block}

    def _keep_others(
        self, key: bytes, block: KVCacheBlock, found: KVCacheBlock | dict[int, KVCacheBlock]
    ) -> None:
        """Put the other blocks of a popped key back, which named `block` too."""
        if isinstance(found, dict):
            del found[block.block_id]
            self._named[key] = found if len(found) > 1 else found.popitem()[1]


def _nobody(_dropped: Sequence[EvictedBlock]) -> None:
    """No block is copied."""
