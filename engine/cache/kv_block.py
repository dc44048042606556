# SPDX-License-Identifier: Apache-2.0
"""The pool's block noun and the queue of free ones.

The queue is linked through the blocks themselves, between two sentinels that are never handed out:

    head <-> block <-> block <-> ... <-> tail
             least recently freed        most recently freed

so that taking any block out, also from the middle, costs the same few assignments and allocates
nothing. The `next_free` of a block outside the queue is itself; no link is ever None.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# The ids of a request's blocks: one list for each cache group.
BlockIds = tuple[list[int], ...]


class BlockCopy(NamedTuple):
    """A page of a request, and the copy that takes its place before the request writes to it."""

    request_id: str
    group_id: int
    place: int  # of the page in the request's table
    source: int
    target: int


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """A block of the pool, with the pages `block_id`, `block_id + 1` … (`BlockPool.width`).

    `block_hash` is the block's name in the prefix map: digest (32 bytes) and the first of its cache
    groups (u16, little-endian). None: the block cannot be found.
    """

    block_id: int
    ref_cnt: int = 0  # requests whose tables hold it
    block_hash: bytes | None = None
    is_null: bool = False
    is_offered: bool = False  # under this name, to be stored ahead of its eviction
    prev_free: KVCacheBlock = field(init=False, repr=False)
    next_free: KVCacheBlock = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.prev_free = self.next_free = self


class FreeBlockQueue:
    """Free blocks, the one to be reused next in front.

    Misuse (a block put in twice, taken out though it is not in, more asked for than there are)
    raises RuntimeError; it means the caller has lost count of its blocks.
    """

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
        """The blocks in the order of reuse; for checks, not for the step loop."""
        block = self._head.next_free
        while block is not self._tail:
            yield block
            block = block.next_free

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, count: int) -> list[KVCacheBlock]:
        """Take `count` blocks from the front, all or none."""
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
        """Put one block at the end: it is reused last."""
        self.append_n((block,))

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._insert(self._tail.prev_free, blocks, self._tail)

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Put blocks in front, in this order: for those whose bytes are worth nothing."""
        self._insert(self._head, blocks, self._head.next_free)

    def remove(self, block: KVCacheBlock) -> None:
        self.remove_n((block,))

    def remove_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Take blocks out, wherever they stand."""
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
        """Count one more holder of each block but null blocks, and take those out that had none;
        how many these were. One walk: a step holds and releases thousands."""
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
        """Count one holder of each block less, but for null blocks, and put those that have none
        left at the end, in this order; how many these are."""
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
            # Not only the last one: a block that links to itself would pass for one outside, and
            # the same block given twice would go unnoticed.
            block.next_free = after
            before = block
        after.prev_free = before
        self.num_free += len(blocks)


def page_ids(block_ids: Sequence[int], place: int) -> list[int]:
    """The pages of blocks in the group that comes `place` after their first one."""
    return [block_id and block_id + place for block_id in block_ids]  # 0 is the null block


def page_tables(blocks: Sequence[Sequence[KVCacheBlock]], width: int) -> BlockIds:
    """The ids of blocks, as of tables, in every group: `width` of them share the blocks of each."""
    ids = [[block.block_id for block in each] for each in blocks]
    if width == 1:
        return tuple(ids)
    return tuple([page_ids(each, place) for each in ids for place in range(width)])


# One list of blocks for all cache groups that share them, in the order of the first of these.
GroupBlocks = tuple[list[KVCacheBlock], ...]
