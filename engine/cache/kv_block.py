# SPDX-License-Identifier: Apache-2.0
"""The pool's blocks and the queue of free blocks.

The queue links the blocks themselves, between two sentinels that are never allocated:

    head <-> block <-> block <-> ... <-> tail
             least recently freed        most recently freed

Removing any block, even from the middle, takes a few assignments and allocates no memory. A block
outside the queue has itself as `next_free`; no link is None."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# The ids of a request's blocks: one list for each cache group.
BlockIds = tuple[list[int], ...]


class BlockCopy(NamedTuple):
    """A page that a request shares, and the page of the copy to which the request will write."""

    request_id: str
    group_id: int
    place: int  # the page's index in the request's table
    source: int
    target: int


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block of the pool, with the pages `block_id`, `block_id + 1` … (`BlockPool.width`).

    `block_hash` is the block's key in the prefix map: the digest (32 bytes) and the number of its
    first cache group (u16, little-endian). A block with None is not cached."""

    block_id: int
    ref_cnt: int = 0  # how many requests hold the block
    block_hash: bytes | None = None
    is_null: bool = False
    is_offered: bool = False  # passed to the tiers under this key, before its eviction
    prev_free: KVCacheBlock = field(init=False, repr=False)
    next_free: KVCacheBlock = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.prev_free = self.next_free = self


class FreeBlockQueue:
    """The free blocks, with the next block to be reused in front.

    Raises RuntimeError if a block is added twice, a block outside the queue is removed, or more
    blocks are taken than the queue has, because the caller then has a fault."""

    __slots__ = ("_head", "_tail", "num_free")

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free = 0
        self.append_n(blocks)

    def __len__(self) -> int:
        return self.num_free

    def __iter__(self) -> Iterator[KVCacheBlock]:
        block = self._head.next_free
        while block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Remove and return `count` blocks from the front: all of them, or none (RuntimeError)."""
        if not 0 <= count <= self.num_free:
            raise RuntimeError(f"{count} free blocks were asked for, {self.num_free} are there")
        block = self._head.next_free
        taken = []
        for _ in range(count):
            taken.append(block)
            following = block.next_free
            block.next_free = block
            block = following
        self._head.next_free = block
        block.prev_free = self._head
        self.num_free -= count
        return taken

    def append(self, block: KVCacheBlock) -> None:
        self.append_n((block,))

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._insert(self._tail.prev_free, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add blocks in front, in this order; used for blocks whose bytes are worthless."""
        self._insert(self._head, blocks, self._head.next_free)

    def remove(self, block: KVCacheBlock) -> None:
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            after = block.next_free
            if after is block:
                raise RuntimeError(f"block {block.block_id} is not in the free queue")
            before = block.prev_free
            before.next_free = after
            after.prev_free = before
            block.next_free = block
        self.num_free -= len(blocks)

    def hold_n(self, blocks: Sequence[KVCacheBlock]) -> int:
        """Add one holder to each block except null blocks, and remove blocks that had no holder
        from the queue. Return the number of removed blocks. A single loop does both for speed: a
        step may hold thousands of blocks."""
        num_taken = 0
        for block in blocks:
            if block.ref_cnt:
                block.ref_cnt += 1
            elif not block.is_null:
                after = block.next_free
                if after is block:
                    raise RuntimeError(f"block {block.block_id} is not in the free queue")
                before = block.prev_free
                before.next_free = after
                after.prev_free = before
                block.next_free = block
                block.ref_cnt = 1
                num_taken += 1
        self.num_free -= num_taken
        return num_taken

    def release_n(self, blocks: Iterable[KVCacheBlock]) -> int:
        """Remove one holder from each block except null blocks, and append blocks that have no
        holder left to the queue, in this order. Return the number of appended blocks."""
        tail = self._tail
        before = tail.prev_free
        num_released = 0
        try:
            for block in blocks:
                count = block.ref_cnt
                if count == 1:
                    block.ref_cnt = 0
                    block.prev_free = before
                    before.next_free = block
                    before = block
                    num_released += 1
                elif count:
                    block.ref_cnt = count - 1
                elif not block.is_null:
                    raise RuntimeError(f"block {block.block_id} was freed more often than held")
        finally:
            before.next_free = tail
            tail.prev_free = before
            self.num_free += num_released
        return num_released

    def _insert(
        self, before: KVCacheBlock, blocks: Sequence[KVCacheBlock], after: KVCacheBlock
    ) -> None:
        for block in blocks:
            if block.next_free is not block:
                raise RuntimeError(f"block {block.block_id} is in the free queue already")
            block.prev_free = before
            before.next_free = block
            # Every block gets a link at once, because a block linked to itself counts as outside
            # the queue, and a block that is passed twice would not be noticed.
            block.next_free = after
            before = block
        after.prev_free = before
        self.num_free += len(blocks)


def page_ids(block_ids: Sequence[int], place: int) -> list[int]:
    """Return the page ids of blocks for the `place`-th group after the first group that shares
    them."""
    return [block_id and block_id + place for block_id in block_ids]  # 0 is the null block


def page_tables(blocks: Sequence[Sequence[KVCacheBlock]], width: int) -> BlockIds:
    """Return the page ids of blocks for every group; `width` groups share each list of blocks."""
    ids = [[block.block_id for block in each] for each in blocks]
    if width == 1:
        return tuple(ids)
    return tuple([page_ids(each, place) for each in ids for place in range(width)])


# One list of blocks for each set of cache groups that share blocks, in the order of the groups.
GroupBlocks = tuple[list[KVCacheBlock], ...]
