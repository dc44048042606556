# SPDX-License-Identifier: Apache-2.0
"""Requests whose blocks are being loaded from a tier.

One with a *blocking* load waits: it holds its blocks, is in no queue and computes nothing. It
leaves when the connector reports it, in one of these ways:

    some or all tokens came   its computed part grows and is named; it goes on with its blocks
    nothing came              it gives its blocks back and will compute, never asking again
    a window lacks a block    it gives its blocks back, and asks for a shorter hit
    its load was cancelled    it gives its blocks back and may load again: it was preempted
    it ended meanwhile        its blocks are given back only now, because the copy wrote to them

One with an *overlapped* load runs, and computes from the front while blocks come from the back:

    | computed |  this step  |  later, or loaded before  |  loaded  | prompt's rest |
                             limit               load frontier      end

Every token attends to all before it, so what was loaded is of use only once the compute frontier
has come to it; then `num_computed_tokens` jumps to the end of it, and its blocks get their names.
Until then such a request is a running one that gets fewer tokens than it could.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from ...connector.base import KVConnectorScheduler
from ...connector.messages import LoadReport
from ..cache.kv_block import page_tables
from ..cache.kv_cache_coordinator import GroupBlocks
from ..cache.kv_cache_manager import KVCacheManager
from ..observer import Observer
from ..request.request import Progress, Request, RequestStatus

_log = logging.getLogger(__name__)


class LoadingRequests:
    """Requests with a load under way, blocking or overlapped."""

    def __init__(
        self,
        manager: KVCacheManager,
        connector: KVConnectorScheduler,
        counts: Counter[str],
        observer: Observer | None = None,
    ) -> None:
        self._manager = manager
        self._connector = connector
        self._overlapped_loads = connector.overlapped_loads
        self._counts = counts
        self._observer = observer
        self._waiting: dict[str, Request] = {}  # by id, the ended ones among them
        self._overlapped: set[str] = set()
        self._failures: dict[str, str] = {}  # of overlapped loads, and what kept their blocks

    def __contains__(self, request_id: str) -> bool:
        """Whether it waits for the end of a load."""
        return request_id in self._waiting

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the end of a load, the ended ones among them."""
        return len(self._waiting)

    def unfinished(self) -> list[Request]:
        """Waiting requests that somebody still waits for."""
        return [request for request in self._waiting.values() if not request.is_finished]

    @property
    def num_unfinished(self) -> int:
        """How many those are."""
        return sum(not request.is_finished for request in self._waiting.values())

    @property
    def num_overlapped(self) -> int:
        """Running requests whose frontiers have not met yet."""
        return len(self._overlapped)

    def begin_load(
        self,
        request: Request,
        hits: GroupBlocks | None,
        num_local_tokens: int,
        num_external_tokens: int,
        keep_free_blocks: int,
        *,
        overlapped: bool,
    ) -> bool:
        """Allocate the blocks of a load and hand them to the connector; an overlapped one may run
        at once. False: no room, and nothing has changed."""
        added = self._manager.allocate_slots(
            request,
            num_new_tokens=0,
            num_new_computed_tokens=num_local_tokens,
            new_computed_blocks=hits,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=True,
            keep_free_blocks=keep_free_blocks,
        )
        if added is None:
            return False
        request.num_computed_tokens = num_local_tokens
        if overlapped:
            self._overlapped.add(request.request_id)
            self._counts["meetings"] += 1
        else:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_external_computed_tokens = num_external_tokens
            self._waiting[request.request_id] = request
        block_ids = page_tables(added, self._manager.pool.width)
        self._connector.begin_load(request, block_ids, num_external_tokens, overlapped=overlapped)
        return True

    def add_cancelled(self, request: Request) -> None:
        """Take in a request that does not run any more while blocks of it are being written to.
        It is reported when that is over, as one whose load was cancelled."""
        self._waiting[request.request_id] = request

    def pop_reported(self, reports: Iterable[LoadReport]) -> list[tuple[Request, LoadReport]]:
        """Take out the reported requests; those that go on, each with its report."""
        going_on = []
        for report in reports:
            request = self._waiting.pop(report.request_id, None)
            if request is None:
                # Nothing here depends on it, and a fault of the connector may cost no more.
                _log.warning(
                    "a load was reported for %s, which does not wait for one", report.request_id
                )
            elif request.is_finished:
                self._manager.free(request)
            else:
                self._apply_load_report(request, report)
                going_on.append((request, report))
        return going_on

    def most_tokens(self, request: Request, progress: Progress) -> int:
        """How many tokens a request may compute now, which without an overlapped load is all it
        lacks. 0: it has to wait for a copy. Where the frontiers have met, it jumps."""
        if request.request_id in self._overlapped:
            computed = request.num_computed_tokens
            assert self._overlapped_loads is not None  # OVERLAP was answered
            state = self._overlapped_loads.load_state(request.request_id, computed)
            if state.failure:
                self._failures[request.request_id] = state.failure
            if state.is_copying or computed < state.load_frontier:
                return state.limit - computed
            self._end_overlap(request, progress)
        return request.num_tokens - request.num_computed_tokens

    def stop_overlap(self, request: Request) -> bool:
        """A request runs no more. True: a copy writes to its blocks, and they may not be given back
        before the connector reports it."""
        request_id = request.request_id
        if request_id not in self._overlapped:
            return False
        self._overlapped.discard(request_id)
        return self._take_report(request_id) is None

    def take_failures(self) -> list[tuple[str, str]]:
        """Requests some of whose blocks did not come with an overlapped load, and what kept them;
        each once, and some may have ended."""
        failures, self._failures = self._failures, {}
        return list(failures.items())

    def _take_report(self, request_id: str) -> LoadReport | None:
        assert self._overlapped_loads is not None  # as above
        report = self._overlapped_loads.end_load(request_id)
        if report is not None and report.failure:
            self._failures[request_id] = report.failure
        return report

    def _apply_load_report(self, request: Request, report: LoadReport) -> None:
        loaded = min(report.num_loaded_tokens, request.num_external_computed_tokens)
        request.status = RequestStatus.WAITING
        request.num_external_computed_tokens = loaded
        if loaded > 0 and self._manager.can_go_on(request, request.num_computed_tokens + loaded):
            request.num_computed_tokens += loaded
            self._manager.cache_blocks(request, request.num_computed_tokens)
        else:
            # Without its blocks it is admitted like any other request, hits included. So is one
            # with a window of which not all came: its load brought what its end reads, and no more.
            request.num_external_computed_tokens = report.num_loaded_tokens = 0
            report.tokens_by_tier = {}
            self._manager.free(request)
            request.num_computed_tokens = 0
            request.external_load_failed = not (report.is_cancelled or report.shorter_tokens)

    def _end_overlap(self, request: Request, progress: Progress) -> None:
        """The frontiers have met: all that is left of its blocks has been loaded."""
        self._overlapped.discard(request.request_id)
        report = self._take_report(request.request_id)
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
