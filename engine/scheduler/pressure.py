# SPDX-License-Identifier: Apache-2.0
"""Memory pressure: when to let nobody else in, and when to send somebody back.

Two shares of the KV pool with a gap between them, so that a request is not let in and sent back in
turn: nobody is let in from `admit_below` on, and beyond `preempt_above` the last to come goes. A
request is let in only if its whole prompt, and what is still missing of the running ones' prompts,
stays below the second share. A threshold of 1 disables the check. Blocks that nobody holds count as
free, whether or not their bytes are still remembered.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cache.kv_cache_coordinator import GroupBlocks
from ..cache.kv_cache_manager import KVCacheManager
from ..config import SchedulerConfig
from ..request import Request


class MemoryPressure:
    """Reads the pool of `manager`; changes nothing."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager) -> None:
        self._manager = manager
        self._usable = manager.pool.num_blocks - 1
        self._admit_blocks = config.admit_below * self._usable
        self._preempt_blocks = config.preempt_above * self._usable

    @property
    def forbids_admission(self) -> bool:
        """Whether so much is held that nobody else should start."""
        return self._num_held >= self._admit_blocks

    @property
    def demands_preemption(self) -> bool:
        """Whether so much is held that somebody should go."""
        return self._num_held > self._preempt_blocks

    def has_room_for(
        self, request: Request, hits: GroupBlocks | None, running: Iterable[Request]
    ) -> bool:
        """Whether `request` could read its whole prompt without driving anybody out."""
        if self._preempt_blocks >= self._usable:
            return True
        missing = self._manager.num_missing_blocks(request, hits)
        for other in running:
            if other.num_tokens - other.num_computed_tokens > 1:  # in the middle of its prompt
                missing += self._manager.num_missing_blocks(other)
        return self._num_held + missing <= self._preempt_blocks

    @property
    def _num_held(self) -> int:
        return self._usable - self._manager.pool.num_free
