# SPDX-License-Identifier: Apache-2.0
"""The loads of requests: blocks on their way from a tier to the pool.

A request with a *blocking* load waits: it holds its blocks, is in no queue and computes nothing.
The connector's report of the load ends this state in one of these ways:

    some or all tokens came   the tokens count as computed and are cached; it keeps its blocks
    no token came             it releases its blocks, and will compute without another load
    a window lacks a block    it releases its blocks, and then looks for a shorter hit
    its load was cancelled    it was preempted; it releases its blocks and may load again
    it ended meanwhile        its blocks are released only now, because the copy wrote to them

A request with an *overlapped* load runs: it computes forwards from its first missing token, while
the load fills its blocks from the end backwards:

    | computed |  this step  |  later, or loaded before  |  loaded  | prompt's rest |
                             limit               load frontier      end

Every token attends to all tokens before it, so the loaded blocks become usable only when the
computed tokens reach them. At that moment `num_computed_tokens` jumps to the end of the loaded
blocks, and the blocks are cached. Until then, the request computes only tokens before these
blocks."""

from __future__ import annotations

from ...connector.messages import LoadReport
from ..cache.kv_block import GroupBlocks, page_tables
from ..request.request import LoadKind, Request, RequestStatus
from .context import SchedulerContext


class RequestLoads:
    """The blocking and overlapped loads of requests, from the begin to the end of each load."""

    def __init__(self, context: SchedulerContext) -> None:
        self._context = context
        self._manager = context.manager
        self._connector = context.connector
        self._overlapped_loads = context.connector.overlapped_loads
        # Requests with a blocking load, including ended requests.
        self.blocking: list[Request] = []
        self.num_overlapped = 0  # running requests with an overlapped load
        # Requests with a failed overlapped load, and the reason, for `take_failures`. Read only.
        self.failures: list[tuple[Request, str]] = []

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
        """Allocate the blocks of a load and start it in the connector. With `overlapped` the
        request may run at once. If there is no room, return False and change nothing."""
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
            request.progress.load = LoadKind.OVERLAPPED
            self.num_overlapped += 1
            self._context.counts["meetings"] += 1
        else:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            request.num_external_computed_tokens = num_external_tokens
            self.add_cancelled(request)
        block_ids = page_tables(added, self._manager.pool.width)
        if self._manager.states is not None:
            block_ids = self._manager.load_page_ids(request.request_id, num_local_tokens)
        self._connector.begin_load(request, block_ids, num_external_tokens, overlapped=overlapped)
        return True

    def add_cancelled(self, request: Request) -> None:
        """Add a request that no longer runs to `blocking`, until the connector reports that no copy
        writes to its blocks. The connector reports a cancelled load like any other load."""
        request.progress.load = LoadKind.BLOCKING
        self.blocking.append(request)

    def pop_reported(self, request: Request, report: LoadReport) -> None:
        """End the blocking load of a request. An unfinished request continues with the loaded
        blocks; a finished request releases its blocks."""
        request.progress.load = None
        self.blocking.remove(request)
        if request.is_finished:
            self._manager.free(request)
        else:
            self._apply_load_report(request, report)

    def most_tokens(self, request: Request) -> int:
        """Return how many tokens a request may compute now: all its missing tokens, or the missing
        tokens before its overlapped load. 0 means that the request must wait for a copy. When
        computed tokens and loaded blocks meet, end the load and advance `num_computed_tokens`."""
        if request.progress.load is LoadKind.OVERLAPPED:
            computed = request.num_computed_tokens
            assert self._overlapped_loads is not None  # not None after a match of kind OVERLAP
            state = self._overlapped_loads.load_state(request.request_id, computed)
            if state.failure:
                self.failures.append((request, state.failure))
            if state.is_copying or computed < state.load_frontier:
                return state.limit - computed
            self._end_overlap(request)
        return request.num_tokens - request.num_computed_tokens

    def stop_overlap(self, request: Request) -> bool:
        """End the overlapped load of a request that no longer runs. Return whether a copy still
        writes to its blocks; if so, they must be kept until the connector's report."""
        return self._take_report(request) is None

    def take_failures(self) -> list[tuple[Request, str]]:
        """Return each request whose overlapped load failed since the last call, with the reason.
        Some of these requests may have ended."""
        failures, self.failures = self.failures, []
        return failures

    def _take_report(self, request: Request) -> LoadReport | None:
        """End an overlapped load. Return None if a copy still writes to the request's blocks."""
        request.progress.load = None
        self.num_overlapped -= 1
        assert self._overlapped_loads is not None  # a request has such a load
        report = self._overlapped_loads.end_load(request.request_id)
        if report is not None and report.failure:
            self.failures.append((request, report.failure))
        return report

    def _apply_load_report(self, request: Request, report: LoadReport) -> None:
        loaded = min(report.num_loaded_tokens, request.num_external_computed_tokens)
        request.status = RequestStatus.WAITING
        request.num_external_computed_tokens = loaded
        num_computed = request.num_computed_tokens + loaded
        if loaded > 0 and self._manager.cache_blocks(request, num_computed):
            request.num_computed_tokens = num_computed
        else:
            # The request is admitted again like a new request, with hits. A sliding window with a
            # missing block ends here too, because the load brought only the needed blocks.
            request.num_external_computed_tokens = report.num_loaded_tokens = 0
            report.tokens_by_tier = {}
            self._manager.free(request)
            request.num_computed_tokens = 0
            request.external_load_failed = not (report.is_cancelled or report.shorter_tokens)

    def _end_overlap(self, request: Request) -> None:
        """End a load that the computed tokens have reached, and count its tokens as computed."""
        report = self._take_report(request)
        if report is None or report.num_loaded_tokens == 0:
            return  # no block came; the request has computed all these tokens
        context, tokens = self._context, report.tokens_by_tier
        context.count_reused(tokens, request.num_computed_tokens)
        context.observer.hit(request, tokens)
        request.num_computed_tokens += report.num_loaded_tokens
        request.num_external_computed_tokens = report.num_loaded_tokens
        self._manager.cache_blocks(request, request.num_computed_tokens)
        if request.num_preemptions > 0:
            context.counts["resumed_by_load"] += report.num_loaded_tokens
        elif request.progress.first_token is None:
            request.num_cached_tokens += report.num_loaded_tokens
            request.cached_tokens_by_tier = {**request.cached_tokens_by_tier, **tokens}
            for tier, num_tokens in tokens.items():
                context.counts[f"cached_tokens_{tier}"] += num_tokens
