# SPDX-License-Identifier: Apache-2.0
"""The step being put together: who runs, with how many tokens, and what the worker must be told.

A request the worker sees first is described in full, one it knows by the difference; one that was
preempted and comes back replaces its table.
"""

from __future__ import annotations

from ...connector.base import ConnectorMetadata
from ..cache.kv_cache_coordinator import GroupBlocks
from ..cache.kv_cache_manager import KVCacheManager
from ..request import Request
from .output import CachedRequestData, NewRequestData, SchedulerOutput


class StepBuilder:
    """One step under construction. `budget` is what is left of its tokens."""

    __slots__ = ("_cached", "_manager", "_new", "_tokens", "budget", "preempted_ids", "pressed")

    def __init__(self, manager: KVCacheManager, budget: int) -> None:
        self._manager = manager
        self.budget = budget
        self.preempted_ids: set[str] = set()
        # Room had to be made for a running request: nobody new is let in during this step.
        self.pressed = False
        self._tokens: dict[str, int] = {}
        self._new: list[NewRequestData] = []
        self._cached = CachedRequestData()

    def go_on(self, request: Request, num_tokens: int, added: GroupBlocks) -> None:
        """A running request computes `num_tokens` more; `added` are the blocks it got for them."""
        request_id = request.request_id
        cached = self._cached
        cached.request_ids.append(request_id)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        if added is self._manager.no_blocks or not any(added):
            cached.new_block_ids.append(None)
        else:
            ids = tuple([[block.block_id for block in blocks] for blocks in added])
            cached.new_block_ids.append(ids)
        self._grant(request, num_tokens)

    def start(self, request: Request, num_tokens: int) -> None:
        """A request runs for the first time, after `num_computed_tokens` found or loaded."""
        self._new.append(
            NewRequestData(
                request_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=self._manager.get_block_ids(request.request_id),
                num_computed_tokens=request.num_computed_tokens,
            )
        )
        self._grant(request, num_tokens)

    def resume(self, request: Request, num_tokens: int) -> None:
        """A preempted request runs again, with a new table."""
        request_id = request.request_id
        cached = self._cached
        cached.request_ids.append(request_id)
        cached.num_computed_tokens.append(request.num_computed_tokens)
        cached.new_block_ids.append(self._manager.get_block_ids(request_id))
        cached.resumed_request_ids.add(request_id)
        cached.output_token_ids[request_id] = list(request.output_token_ids)
        self._grant(request, num_tokens)

    def build(
        self, finished_ids: set[str], connector_meta: ConnectorMetadata | None
    ) -> SchedulerOutput:
        """The finished step."""
        return SchedulerOutput(
            new_requests=self._new,
            cached_requests=self._cached,
            num_scheduled_tokens=self._tokens,
            total_num_scheduled_tokens=sum(self._tokens.values()),
            finished_request_ids=finished_ids,
            preempted_request_ids=self.preempted_ids,
            connector_meta=connector_meta,
        )

    def _grant(self, request: Request, num_tokens: int) -> None:
        """The counter runs ahead of the worker: the step was told the old value."""
        self._tokens[request.request_id] = num_tokens
        self.budget -= num_tokens
        request.num_computed_tokens += num_tokens
