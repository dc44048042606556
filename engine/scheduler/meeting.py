# SPDX-License-Identifier: Apache-2.0
"""Requests that compute from the front while their blocks are loaded from the back.

    | computed |  this step  |  later, or loaded before  |  loaded  | prompt's rest |
                             limit                       loaded from  end

Every token attends to all before it, so what was loaded is of use only once the front has come to
it; then `num_computed_tokens` jumps to the end of it, and its blocks get their names. Until then
such a request is a running one that gets fewer tokens than it could.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from ...connector.base import KVConnectorScheduler
from ..cache.kv_cache_coordinator import GroupBlocks
from ..cache.kv_cache_manager import KVCacheManager
from ..observer import Observer
from ..request import Progress, Request


class Meetings:
    """The running requests whose front has not met its loaded blocks yet."""

    def __init__(
        self, manager: KVCacheManager, counts: Counter[str], observer: Observer | None = None
    ) -> None:
        self._manager = manager
        self._counts = counts
        self._observer = observer
        self._loaders: dict[str, KVConnectorScheduler] = {}  # by request id

    def __len__(self) -> int:
        return len(self._loaders)

    def begin(
        self,
        request: Request,
        hits: GroupBlocks,
        num_local_tokens: int,
        num_external_tokens: int,
        connector: KVConnectorScheduler,
        keep_free_blocks: int,
    ) -> bool:
        """Allocate the blocks of a load and hand them to the connector; the request may run at
        once. False: no room, and nothing has changed."""
        blocks = self._manager.allocate_slots(
            request,
            num_new_tokens=0,
            num_new_computed_tokens=num_local_tokens,
            new_computed_blocks=hits,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=True,
            keep_free_blocks=keep_free_blocks,
        )
        if blocks is None:
            return False
        request.num_computed_tokens = num_local_tokens
        self._loaders[request.request_id] = connector
        connector.begin_back_load(
            request, [block.block_id for block in blocks[0]], num_external_tokens
        )
        self._counts["meetings"] += 1
        return True

    def most_tokens(self, request: Request, progress: Progress) -> int:
        """How many tokens a request may compute now, which for others than those here is all it
        lacks. 0: it has to wait for a copy. Where front and loaded blocks have met, it jumps."""
        connector = self._loaders.get(request.request_id)
        if connector is not None:
            computed = request.num_computed_tokens
            state = connector.front_state(request.request_id, computed)
            if state.is_copying or computed < state.loaded_from:
                return state.limit - computed
            self._meet(request, progress, connector)
        return request.num_tokens - request.num_computed_tokens

    def leave(self, request: Request) -> bool:
        """A request runs no more. True: a copy writes to its blocks, and they may not be given back
        before the connector reports it."""
        connector = self._loaders.pop(request.request_id, None)
        return connector is not None and connector.end_back_load(request.request_id) is None

    def broken(self) -> list[tuple[str, str]]:
        """Requests some of whose blocks did not come, and what kept them."""
        failures = [(i, loader.back_load_failure(i)) for i, loader in self._loaders.items()]
        return [(request_id, failure) for request_id, failure in failures if failure]

    def _meet(self, request: Request, progress: Progress, connector: KVConnectorScheduler) -> None:
        """All that is left of its blocks has been loaded."""
        del self._loaders[request.request_id]
        report = connector.end_back_load(request.request_id)
        if report is None or report.num_loaded_tokens == 0:
            return  # nothing came, and all has been computed
        counts, tokens = self._counts, report.tokens_by_tier
        count_reused(counts, tokens, request.num_computed_tokens)
        if self._observer is not None:
            self._observer.hit(request, tokens)
        request.num_computed_tokens += report.num_loaded_tokens
        request.num_external_computed_tokens = report.num_loaded_tokens
        self._manager.cache_blocks(request, request.num_computed_tokens)
        if request.num_preemptions > 0:
            counts["resumed_by_load"] += report.num_loaded_tokens
        elif progress.first_token is None:
            request.num_cached_tokens += report.num_loaded_tokens
            request.cached_tokens_by_tier = {**request.cached_tokens_by_tier, **tokens}
            for tier, num_tokens in tokens.items():
                counts[f"cached_tokens_{tier}"] += num_tokens


def count_reused(counts: Counter[str], tokens: Mapping[str, int], position: int) -> None:
    """Tokens from `position` on were not computed; those of each source, in their order."""
    for source, num_tokens in tokens.items():
        if num_tokens:
            counts[f"reused_tokens_{source}"] += num_tokens
            sum_of_positions = num_tokens * position + num_tokens * (num_tokens - 1) // 2
            counts[f"reused_positions_{source}"] += sum_of_positions
            position += num_tokens
