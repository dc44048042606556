# SPDX-License-Identifier: Apache-2.0
"""SharedTails: copy-on-write for the last, partly filled block that forked requests share.

forked         first: 17 4 9    second: 17 4 9     9 is half full
second writes  first: 17 4 9    second: 17 4 30    the device copies 9 over 30
first writes   in place: no other request holds 9 any more"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain

from .block_pool import BlockPool
from .group_manager import GroupManager
from .kv_block import BlockCopy, GroupBlocks, KVCacheBlock


class SharedTails:
    """The requests, by id, that may share their last block with others, and the block copies of the
    step being scheduled."""

    def __init__(self, pool: BlockPool, groups: Sequence[GroupManager]) -> None:
        self._pool, self._groups = pool, groups
        # By request id: the ids of all requests that may hold the request's last block.
        self.families: dict[str, set[str]] = {}
        self._copies: dict[str, list[BlockCopy]] = {}  # by request
        self.sources: dict[KVCacheBlock, None] = {}  # source blocks, held until the copies are made

    def num_to_copy(self, request_ids: Container[str] | None = None) -> int:
        """Return the most blocks that these requests (None: all) may still need for copies."""
        num_copies = 0
        for family in {id(each): each for each in self.families.values()}.values():
            asked = [each for each in family if request_ids is None or each in request_ids]
            num_copies += min(len(asked), len(family) - 1)  # the last sharer writes in place
        return num_copies * len(self._groups)

    def add_fork(self, parent_id: str, child_id: str) -> None:
        """Record that two requests share a partly filled last block, until one of them writes."""
        family = self.families.setdefault(parent_id, {parent_id})
        family.add(child_id)
        self.families[child_id] = family

    def remove_request(self, request_id: str) -> None:
        """Forget a request that releases its blocks, and cancel its copies."""
        self._leave_family(request_id)
        self._copies.pop(request_id, None)

    def own_block(
        self, request_id: str, tables: GroupBlocks, index: int, num_more: int, num_spare: int
    ) -> bool:
        """Prepare a request's write to its block `index`, and to `num_more` new blocks after it. In
        each table, a block that other requests hold is replaced by a copy. If this would take more
        than `num_spare` free blocks, return False and change nothing."""
        places = range(len(tables)) if index < len(tables[0]) else ()
        shared = [place for place in places if self._is_shared(tables[place][index])]
        if shared:
            if len(shared) + num_more > num_spare:
                return False
            copies = self._copies.setdefault(request_id, [])
            for place, new in zip(shared, self._pool.get_new_blocks(len(shared)), strict=True):
                old, tables[place][index] = tables[place][index], new
                if old in self.sources:
                    self._pool.free_blocks([old])
                self.sources[old] = None
                copies += [
                    BlockCopy(
                        request_id,
                        self._groups[place].group_id + page,
                        index,
                        old.block_id + page,
                        new.block_id + page,
                    )
                    for page in range(self._pool.width)
                ]
        self._leave_family(request_id)
        return True

    def take_copies(self) -> list[BlockCopy]:
        """Return the copies of the step that has been scheduled, and release their source blocks.
        No block is both a source and a target, because sources were held until now."""
        self._pool.free_blocks(self.sources)
        self.sources.clear()
        copies = list(chain.from_iterable(self._copies.values()))
        self._copies.clear()
        return copies

    def _leave_family(self, request_id: str) -> None:
        family = self.families.pop(request_id, None)
        if family is not None:
            family.remove(request_id)

    def _is_shared(self, block: KVCacheBlock) -> bool:
        """Whether a request must not write to this block: another request holds it, or prefix
        lookups can find it."""
        num_holders = block.ref_cnt - (block in self.sources)
        return num_holders > 1 or block.block_hash is not None
