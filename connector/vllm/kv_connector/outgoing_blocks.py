# SPDX-License-Identifier: Apache-2.0
"""The blocks of vLLM's pool to store in a step: those that it evicts, and others before they are.

The others are near their eviction in vLLM's free queue, or, if everything is wanted early, all that
are computed, in the step after the one that computed them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from .block_names import NamedBlock
from .pool_watch import PoolWatch

# The part of vLLM's free queue whose blocks are copied ahead, from the next eviction on.
NEAR_BLOCKS = 256


class OutgoingBlocks:
    """`stores_all`: blocks go out as soon as they are computed. Not thread-safe."""

    def __init__(self, *, stores_all: bool) -> None:
        self._stores_all = stores_all
        self._coming: deque[NamedBlock] = deque()  # computed, and to be stored
        self._void: set[NamedBlock] = set()  # with a name, and never computed
        self._near: dict[int, bytes] = {}  # near their eviction, and chosen before

    @property
    def num_coming(self) -> int:
        """Blocks for later steps to choose, though none is evicted."""
        return len(self._coming)

    def choose(
        self, watch: PoolWatch, output: Any, most_ahead: int
    ) -> tuple[list[NamedBlock], list[NamedBlock]]:
        """The blocks that the step of vLLM's scheduler `output` overwrites, and at most
        `most_ahead` others that are to be stored beside it."""
        namings, evicted = watch.take_named(), watch.take_evicted()
        # vLLM names blocks when it schedules a step that is to compute them. A request that the
        # same step preempts computes none.
        preempted = (output.preempted_req_ids or set()) - output.num_scheduled_tokens.keys()
        if preempted:
            for each in namings:
                if each.request_id in preempted:
                    self._void.update(each.blocks)
            namings = [each for each in namings if each.request_id not in preempted]
        if self._void:
            void = self._void.intersection(evicted)
            evicted = [block for block in evicted if block not in void]
            self._void -= void
        for block in evicted:
            self._near.pop(block.block_id, None)
        cold: list[NamedBlock] = []
        if self._stores_all:
            while self._coming and len(cold) < most_ahead:
                block = self._coming.popleft()
                if watch.has(block):  # and was not evicted meanwhile
                    cold.append(block)
            # The tail of a sequence before its head, as they would be evicted.
            cold.reverse()
            self._coming.extend(block for each in namings for block in each.blocks)
        elif most_ahead:
            new = {block for each in namings for block in each.blocks} | self._void
            for block in watch.coldest(min(NEAR_BLOCKS, watch.num_blocks() // 4)):
                if len(cold) < most_ahead and block not in new and self._is_new_near(block):
                    cold.append(block)
        return evicted, cold

    def remove_unnamed(self, blocks: Sequence[NamedBlock]) -> None:
        """Forget blocks that have lost their names without being evicted."""
        gone = set(blocks)
        self._coming = deque(block for block in self._coming if block not in gone)
        self._void -= gone
        for block in blocks:
            self._near.pop(block.block_id, None)

    def clear(self) -> None:
        """Forget the choices, after all that was stored has been dropped."""
        self._coming.clear()
        self._near.clear()

    def _is_new_near(self, block: NamedBlock) -> bool:
        if self._near.get(block.block_id) == block.host_key:
            return False
        self._near[block.block_id] = block.host_key
        return True
