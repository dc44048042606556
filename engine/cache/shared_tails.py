# SPDX-License-Identifier: Apache-2.0
"""SharedTails: the last blocks of forked requests, which are copied before one of them is written.

forked         first: 17 4 9        second: 17 4 9       9 is half full
second writes  first: 17 4 9        second: 17 4 30      the device copies 9 over 30
first writes   in place: no other request holds 9 any more
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import chain

from .block_pool import BlockPool
from .group_manager import GroupManager
from .kv_block import BlockCopy, GroupBlocks, KVCacheBlock


class SharedTails:
    """Requests, by id, whose last block others may hold; and the copies of the step being
    scheduled."""

    def __init__(self, pool: BlockPool, groups: Sequence[GroupManager]) -> None:
        self._pool, self._groups = pool, groups
        # By request, the requests that may hold its last block, itself among them.
        self.families: dict[str, set[str]] = {}
        self._copies: dict[str, list[BlockCopy]] = {}  # by request
        self.sources: dict[KVCacheBlock, None] = {}  # what they copy, held until it has been made

    def num_to_copy(self, request_ids: Container[str] | None = None) -> int:
        """Blocks that these requests may still take for copies, at most; all of them for None."""
        num_copies = 0
        for family in {id(each): each for each in self.families.values()}.values():
            asked = [each for each in family if request_ids is None or each in request_ids]
            num_copies += min(len(asked), len(family) - 1)  # the last one writes in place
        return num_copies * len(self._groups)

    def add_fork(self, parent_id: str, child_id: str) -> None:
        """Two requests hold one last block, which is not full: the first of them to write gets a
        copy."""
        family = self.families.setdefault(parent_id, {parent_id})
        family.add(child_id)
        self.families[child_id] = family

    def remove_request(self, request_id: str) -> None:
        """The request gives its blocks back: nothing is copied for it any more."""
        self._leave_family(request_id)
        self._copies.pop(request_id, None)

    def own_block(
        self, request_id: str, tables: GroupBlocks, index: int, num_more: int, num_spare: int
    ) -> bool:
        """The request writes to its block `index` next, and takes `num_more` blocks for what comes
        behind it: in each table where others hold that block, a copy takes its place. False where
        free blocks would become fewer by more than `num_spare`, and nothing has changed."""
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
        """The copies of the step that has been made. No block is both a source and a target: what
        is copied was held until now."""
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
        """Whether a request that holds this block may not write to it: others hold it too, or will
        find it by its name."""
        num_holders = block.ref_cnt - (block in self.sources)
        return num_holders > 1 or block.block_hash is not None
