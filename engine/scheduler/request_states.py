# SPDX-License-Identifier: Apache-2.0
"""The states of all requests, and the changes of state that release a request's blocks.

    waiting   arrived or preempted; holds no blocks
    deferred  like waiting, but the tiers must be asked again; considered before the others
    skipped   like waiting, but its load has ended; considered before `waiting`
    grammar   its grammar is being compiled; holds no blocks, is in no queue
    loading   its load is under way; holds blocks, is in no queue
    forking   waits until another request has computed the same prompt; in no queue
    running   holds blocks, gets tokens; some have an overlapped load (`request_loads.py`)

A `Request` and its `Progress` hold the data of a single request. This module holds the list of
requests in each state, in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

import numpy as np

from ...connector.messages import LoadReport
from ...tiers.base import RequestContext
from ..cache.kept_blocks import KeptBlocks
from ..observer import Decision, Obstacle
from ..request.request import LoadKind, Request, RequestStatus
from .context import SchedulerContext
from .pins import Pins
from .pressure import MemoryPressure
from .request_loads import RequestLoads

_log = logging.getLogger(__name__)

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class RequestStates:
    """All requests by id, and an ordered list or queue of requests for each state."""

    def __init__(self, context: SchedulerContext) -> None:
        self.context = context
        # Requests by id, until a request has ended and no copy writes to its blocks. Read only.
        self.requests: dict[str, Request] = {}
        self.num_unfinished = 0
        self.embed_bytes = 0  # of the prompt embeddings of unfinished requests
        self.running: list[Request] = []
        make_queue = context.policy.make_queue
        self.waiting, self.deferred, self.skipped = make_queue(), make_queue(), make_queue()
        # Waiting requests that hold loaded blocks, in the order in which their loads ended.
        self.loaded: list[Request] = []
        self.loads = RequestLoads(context)
        self.pressure = MemoryPressure(context)
        self.kept = KeptBlocks(context.manager)
        self.awaiting_grammar: dict[Request, RequestContext] = {}
        self.num_forking = 0  # requests that wait for the prompt of another one
        # Ids of ended and preempted requests for the next step to send to the worker.
        self.finished_ids: set[str] = set()
        self.preempted_ids: set[str] = set()
        self._has_ended = False  # a request has ended since the last sweep
        self.num_departed = 0  # requests that have ended or were preempted
        self.pins: Pins | None = None
        if context.policy.pins_turns:
            self.pins = Pins(context)
            context.policy.warm_jobs = self.pins.jobs

    @property
    def unfinished(self) -> dict[str, Request]:
        if self.num_unfinished == len(self.requests):
            return self.requests.copy()
        return {
            request_id: request
            for request_id, request in self.requests.items()
            if not request.is_finished
        }

    @property
    def num_loading(self) -> int:
        """The number of unfinished requests that wait for the end of a blocking load."""
        num_ended = len(self.requests) - self.num_unfinished
        return len(self.loads.blocking) - num_ended

    @property
    def num_deferred(self) -> int:
        """The number of requests that wait for a load or an answer of the tiers, not for room."""
        return len(self.deferred) + self.num_loading

    def find_unfinished(self, request_id: str) -> Request | None:
        request = self.requests.get(request_id)
        return None if request is None or request.is_finished else request

    def enter(
        self, request: Request, context: RequestContext, *, awaits_grammar: bool = False
    ) -> bool:
        """Add a new request, which waits in the queue, for its grammar, or for another request to
        compute the same prompt. Return False if it waits for another request."""
        if request.continues is not None:
            self.kept.add_heir(request.continues)
            request.progress.context = context
        self.requests[request.request_id] = request
        self.num_unfinished += 1
        self.embed_bytes += request.embed_bytes
        if not awaits_grammar:
            return self._queue_new(request, context)
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self.awaiting_grammar[request] = context
        self.context.observer.decision(request, Decision.WAITS, Obstacle.GRAMMAR.value)
        return not request.fork_of

    def grammar_ready(self, request: Request) -> bool:
        """Queue a request whose grammar is compiled, at its position by arrival. Return False if it
        instead waits for another request to compute the same prompt."""
        context = self.awaiting_grammar.pop(request)
        request.status = RequestStatus.WAITING
        is_fork = bool(request.fork_of)
        waits_for_turn = self._queue_new(request, context, came_before=True)
        if is_fork and waits_for_turn and not request.skip_reading_prefix_cache:
            self.context.connector.request_queued(request, context)
        return waits_for_turn

    def _queue_new(
        self, request: Request, context: RequestContext, *, came_before: bool = False
    ) -> bool:
        queue = self.waiting
        parent = self.find_unfinished(request.fork_of) if request.fork_of else None
        if parent is not None and _can_fork(parent, request):
            parent.progress.forks[request] = context
            self.num_forking += 1
        else:
            request.fork_of = ""
            # A request that continues another one goes first: the other was admitted before.
            if request.continues is not None:
                queue.prepend(request)
            else:
                (queue.insert_request if came_before else queue.add)(request)
        self.context.observer.decision(request, Decision.QUEUED)
        return not request.fork_of

    def take_forks(self, parent: Request) -> dict[Request, RequestContext]:
        """Remove and return, in order, the requests that wait for the prompt of `parent`, if this
        prompt ends in the step being scheduled."""
        if parent.num_computed_tokens < parent.num_prompt_tokens:
            return {}
        forks, parent.progress.forks = parent.progress.forks, {}
        self.num_forking -= len(forks)
        return forks

    def queue_forks(self, forks: Mapping[Request, RequestContext], *, at_head: bool) -> None:
        """Queue requests that no longer wait for another request's prompt. With `at_head` the
        requests go to the head of the queue, because their parent was started already."""
        for request in reversed(list(forks)) if at_head else forks:
            request.fork_of = ""
            (self.waiting.prepend if at_head else self.waiting.add)(request)
            if not request.skip_reading_prefix_cache:
                self.context.connector.request_queued(request, forks[request])

    def take_reports(self, reports: Iterable[LoadReport]) -> list[tuple[Request, LoadReport]]:
        """Queue the requests whose blocking loads have ended. Return the unfinished requests, each
        with the report of its load."""
        going_on = []
        for report in reports:
            request = self.requests.get(report.request_id)
            if request is None or request.progress.load is not LoadKind.BLOCKING:
                # A faulty report of the connector must cause no more than this warning.
                _log.warning(
                    "a load was reported for %s, which does not wait for one", report.request_id
                )
                continue
            self.loads.pop_reported(request, report)
            if request.is_finished:
                del self.requests[request.request_id]
                continue
            if request.num_computed_tokens > 0:
                self.loaded.append(request)
            self.skipped.add(request)
            going_on.append((request, report))
        return going_on

    def preempt(self, request: Request, taker: Request | None = None) -> None:
        """Preempt a running request. The request goes to the head of the queue; if a load still
        writes to its blocks, it first joins the loading requests. `taker` is the request that needs
        the room (None: memory pressure)."""
        running = self.running
        if running[-1] is request:
            running.pop()
        else:
            running.remove(request)
        overlaps = request.progress.load is LoadKind.OVERLAPPED
        if overlaps and self.loads.stop_overlap(request):
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loads.add_cancelled(request)
        else:
            self.context.manager.free(request)
            request.status = RequestStatus.PREEMPTED
            self.waiting.prepend(request)
        request.progress.lose(min(request.num_computed_tokens, request.num_tokens), "preemption")
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.draft_token_ids = ()
        request.num_external_computed_tokens = 0
        request.num_preemptions += 1
        self.preempted_ids.add(request.request_id)
        self.num_departed += 1
        self.context.counts["preemptions"] += 1
        self.context.observer.decision(
            request, Decision.PREEMPTED, "" if taker is None else taker.request_id
        )

    def release_pin(self, request: Request) -> bool:
        """Release the blocks of the oldest pin, or else kept blocks, because `request` lacks room.
        Return whether any blocks were released."""
        if self.pins is not None and self.pins.release_oldest(spare=request.job):
            return True
        return self._release_kept()

    def release_pin_for_start(self, request: Request) -> bool:
        """Release a pin's blocks, or kept blocks, for a request that is about to start. Without
        tiers a new request releases no pin, unless no request runs or its own job has a pin. Return
        whether any blocks were released."""
        pins = self.pins
        if pins is None:
            return self._release_kept()
        may_take = self.context.connector.has_tiers or not self.running or request.job in pins
        return self.release_pin(request) if may_take else self._release_kept()

    def _release_kept(self) -> bool:
        """Release the kept blocks that the policy chooses. Return whether any were released."""
        ended = self.kept.ended
        if not ended:
            return False
        self.kept.release_blocks([self.context.policy.kept_victim(ended)])
        return True

    def give_up_last_load(self, spare: Request) -> bool:
        """Release the blocks of a waiting request whose load has ended: the last in the policy's
        order (fcfs: the last load to end), except `spare`. Return whether such a request existed.
        The request stays in its queue and will look up its prefix again."""
        loaded = [request for request in self.loaded if request is not spare]
        if not loaded:
            return False
        request = self.context.policy.victim(loaded)
        self.loaded.remove(request)
        self.context.manager.free(request)
        progress = request.progress
        progress.lose(request.num_computed_tokens, "load_given_up")
        progress.loaded_by_tier = {}
        request.num_computed_tokens = 0
        request.num_external_computed_tokens = 0
        if request.num_cached_tokens < 0:
            request.cached_tokens_by_tier = {}
        self.context.counts["loads_given_up"] += 1
        self.context.observer.decision(request, Decision.LOAD_GIVEN_UP, spare.request_id)
        return True

    def drop_blocks(self, request: Request, cause: str) -> None:
        """Remove a request's blocks from the prefix cache and the tiers, because one of the blocks
        may be wrong. `cause` labels the removed blocks in the connector's statistics."""
        keys = self.context.manager.uncache_request(request)
        if keys:
            self.context.connector.invalidate_blocks(keys, cause)

    def mark_finished(self, request: Request, status: RequestStatus) -> None:
        """Mark a request as finished, whatever its state. Call `sweep` before the next step."""
        context, request_id, before = self.context, request.request_id, request.status
        was_running = before is RequestStatus.RUNNING
        request.status = status
        self.num_unfinished -= 1
        self.embed_bytes -= request.embed_bytes
        self.finished_ids.add(request_id)
        self._has_ended = True
        self.num_departed += 1
        context.counts[f"ended_{status.finish_reason}"] += 1
        context.observer.decision(request, Decision.FINISHED, status.finish_reason or "")
        if request.hands_over and was_running and request.num_output_tokens == 1:
            context.manager.cache_tail(request)
        context.connector.request_finished(request_id)
        self.awaiting_grammar.pop(request, None)
        if self.num_forking:
            self._stop_forking(request)
        if before is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return  # a copy may write to its blocks; the load's report releases them
        overlaps = was_running and request.progress.load is LoadKind.OVERLAPPED
        if overlaps and self.loads.stop_overlap(request):
            self.loads.add_cancelled(request)
            return
        del self.requests[request_id]
        if request.continues is not None:
            self.kept.remove_heir(request)
            request.continues = None
        # State checkpoints are not kept; a successor finds blocks and states by key.
        keeps = request.keeps_blocks and context.manager.states is None
        is_pinned = keeps and was_running and status in _ENDED_WELL
        if is_pinned:
            self.kept.keep_blocks(request)
        elif self.pins is not None and was_running and status in _ENDED_WELL:
            is_pinned = self.pins.pin_turn(request, time.monotonic())
        if not is_pinned:
            context.manager.free(request)
        if not was_running:
            if request in self.loaded:
                self.loaded.remove(request)
            any(
                queue.remove_request(request)
                for queue in (self.waiting, self.skipped, self.deferred)
            )

    def _stop_forking(self, request: Request) -> None:
        """Remove an ended request from the forks of its parent, and queue the requests that wait
        for the ended request's prompt."""
        progress = request.progress
        if request.fork_of and (parent := self.requests.get(request.fork_of)) is not None:
            self.num_forking -= parent.progress.forks.pop(request, None) is not None
        forks, progress.forks = progress.forks, {}
        self.num_forking -= len(forks)
        self.queue_forks(forks, at_head=progress.scheduled is not None)

    def tell_again(self, finished_ids: set[str], preempted_ids: set[str]) -> None:
        """Send the worker the ended and preempted requests of a step again, because the worker may
        not have received the step. The worker accepts repetitions."""
        self.finished_ids |= finished_ids
        again = self.preempted_ids | preempted_ids
        self.preempted_ids = {each for each in again if self.find_unfinished(each) is not None}

    def sweep(self) -> None:
        """Remove all finished requests from `running`."""
        if not self._has_ended:
            return
        self._has_ended = False
        self.running[:] = [request for request in self.running if not request.is_finished]


def _can_fork(parent: Request, child: Request) -> bool:
    """Whether `child` may wait for the prompt of `parent`. The prompts must be equal, `parent` must
    not have computed all of its prompt yet, and `child` must need only the sampled token."""
    is_ahead = parent.num_output_tokens or parent.num_computed_tokens >= parent.num_prompt_tokens
    if is_ahead or parent.fork_of or parent.cache_salt != child.cache_salt:
        return False
    if child.pooling or child.sampling_params.prompt_logprobs is not None:
        return False
    if child.routed_from is not None or child.adapter != parent.adapter:
        return False
    if [*child.pictures] != [*parent.pictures]:
        return False
    if not np.array_equal(parent.prompt_token_ids, child.prompt_token_ids):
        return False
    first, second = parent.prompt_embeds, child.prompt_embeds
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
