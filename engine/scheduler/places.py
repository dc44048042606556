# SPDX-License-Identifier: Apache-2.0
"""Where every unfinished request is, and the moves between those places that give blocks back.

The places:

    waiting   arrived or preempted; holds no blocks
    deferred  as waiting, but the tiers told it to ask again; asked in turns, before the others
    skipped   as waiting, but its load has ended; asked before `waiting`
    loading   its load is under way; holds blocks, is in no queue
    running   holds blocks, gets tokens; the loads of some are overlapped (`loading.py`)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from ...connector.base import KVConnectorScheduler, NullConnector
from ..cache.kv_cache_manager import KVCacheManager
from ..observer import Decision, Observer, Obstacle
from ..request.request import Progress, Request, RequestStatus
from .loading import LoadingRequests
from .pins import Pins
from .policies import FCFSPolicy, SchedulingPolicy

_ENDED_WELL = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class Places:
    """Requests and the scheduler's notes on them. All sets and dicts are keyed by request id."""

    def __init__(
        self,
        manager: KVCacheManager,
        connector: KVConnectorScheduler | None = None,
        observer: Observer | None = None,
        policy: SchedulingPolicy | None = None,
        *,
        pin_tenant_share: float = 1.0,
    ) -> None:
        self.manager = manager
        self.policy = FCFSPolicy() if policy is None else policy
        self.connector = NullConnector() if connector is None else connector
        self._observer = observer
        self.requests: dict[str, Request] = {}
        self.progress: dict[str, Progress] = {}
        self.embed_bytes = 0  # of the prompt embeddings of `requests`
        self.running: list[Request] = []
        self.waiting = self.policy.make_queue()
        self.deferred = self.policy.make_queue()
        self.skipped = self.policy.make_queue()
        # Requests in `skipped` that hold loaded blocks, in the order in which their loads ended.
        self.loaded: dict[str, Request] = {}
        self.finished_ids: set[str] = set()  # the worker has not been told yet
        self._has_ended = False  # some request, since the last sweep
        self.num_departed = 0  # requests that have ended or were sent back
        self.counts: Counter[str] = Counter()
        self.pins: Pins | None = None
        if self.policy.pins_turns:
            self.pins = Pins(
                manager,
                self.counts,
                connector=self.connector,
                tenant_share=pin_tenant_share,
            )
            self.policy.warm_jobs = self.pins.jobs
        self.loading = LoadingRequests(manager, self.connector, self.counts, observer)

    @property
    def num_deferred(self) -> int:
        """Waiting requests that wait for a load or an answer of the tiers, not for room."""
        return len(self.deferred) + self.loading.num_unfinished

    def enter(self, request: Request, progress: Progress) -> None:
        """A new request waits."""
        self.requests[request.request_id] = request
        self.progress[request.request_id] = progress
        self.embed_bytes += request.embed_bytes
        self.waiting.add(request)
        self.notify_observer(request, Decision.QUEUED)

    def notify_observer(self, request: Request, decision: Decision, cause: str = "") -> None:
        """Tell the observer, if there is one."""
        if self._observer is not None:
            self._observer.decision(request, decision, cause)

    def note_wait(self, request: Request, obstacle: Obstacle) -> None:
        """As `notify_observer`: it was this request's turn, and something was in the way."""
        if self._observer is not None:
            self._observer.decision(request, Decision.WAITS, obstacle.value)

    def note_hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        """As `notify_observer`: a request that starts or comes back need not compute these."""
        if self._observer is not None:
            self._observer.hit(request, tokens)

    def put_loaded(self, request: Request) -> None:
        """A request whose load has ended waits for its turn, with what came of its blocks."""
        if request.num_computed_tokens > 0:
            self.loaded[request.request_id] = request
        self.skipped.add(request)

    def preempt(self, request: Request, taker: Request | None = None) -> None:
        """Send a running request back to the head of the queue; or to the loading ones, where a
        copy still writes to its blocks, which it then keeps until it ends. `taker` needs the room;
        None: memory pressure."""
        running = self.running
        if running[-1] is request:
            running.pop()
        else:
            running.remove(request)
        is_written_to = self.loading.stop_overlap(request)
        if is_written_to:
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            self.loading.add_cancelled(request)
        else:
            self.manager.free(request)
            request.status = RequestStatus.PREEMPTED
            self.waiting.prepend(request)
        computed = min(request.num_computed_tokens, request.num_tokens)
        self.progress[request.request_id].lose(computed, "preemption")
        request.num_computed_tokens = 0
        request.num_placeholders = 0
        request.num_external_computed_tokens = 0
        request.num_preemptions += 1
        self.num_departed += 1
        self.counts["preemptions"] += 1
        self.notify_observer(request, Decision.PREEMPTED, "" if taker is None else taker.request_id)

    def release_pin(self, request: Request) -> bool:
        """Give up the oldest pin, because `request` lacks room; whether there was one."""
        return self.pins is not None and self.pins.release_oldest(spare=request.job)

    def release_pin_for_start(self, request: Request) -> bool:
        """As `release_pin`, for a request that is about to be let in. Where no tier has what a pin
        gives up, it takes no room from pins while others run, unless its own job has one: they are
        there to keep new requests out."""
        pins = self.pins
        if pins is None:
            return False
        may_take = self.connector.has_tiers or not self.running or request.job in pins
        return may_take and self.release_pin(request)

    def give_up_last_load(self, spare: Request) -> bool:
        """Take the blocks of a request whose load has ended, whose turn is the last (first come,
        first served: whose load ended last), `spare` excepted; whether there was one. It stays in
        its queue and will look for its prefix again."""
        loaded = [request for request in self.loaded.values() if request is not spare]
        if not loaded:
            return False
        request = self.policy.victim(loaded)
        del self.loaded[request.request_id]
        self.manager.free(request)
        progress = self.progress[request.request_id]
        progress.lose(request.num_computed_tokens, "load_given_up")
        progress.loaded_by_tier = {}
        request.num_computed_tokens = 0
        request.num_external_computed_tokens = 0
        if request.num_cached_tokens < 0:
            request.cached_tokens_by_tier = {}
        self.counts["loads_given_up"] += 1
        self.notify_observer(request, Decision.LOAD_GIVEN_UP, spare.request_id)
        return True

    def drop_blocks(self, request: Request, cause: str) -> None:
        """Nobody is to find the blocks of a request again, in the pool or in a tier: one of them
        may be what is wrong. They are counted under `cause`."""
        keys = self.manager.drop_names(request)
        if keys:
            self.connector.invalidate_blocks(keys, cause)

    def mark_finished(self, request: Request, status: RequestStatus) -> None:
        """A request is finished, wherever it is. `sweep` must follow before the next step."""
        request_id = request.request_id
        place = request.status
        request.status = status
        del self.requests[request_id]
        del self.progress[request_id]
        self.embed_bytes -= request.embed_bytes
        self.finished_ids.add(request_id)
        self._has_ended = True
        self.num_departed += 1
        self.counts[f"ended_{status.finish_reason}"] += 1
        self.notify_observer(request, Decision.FINISHED, status.finish_reason or "")
        if request.hands_over and place is RequestStatus.RUNNING and request.num_output_tokens == 1:
            self.manager.name_tail(request)
        self.connector.request_finished(request_id)
        if place is RequestStatus.WAITING_FOR_REMOTE_KVS:
            return  # a copy may be writing to its blocks; they are given back when it is reported
        if place is RequestStatus.RUNNING and self.loading.stop_overlap(request):
            self.loading.add_cancelled(request)
            return
        is_pinned = False
        if self.pins is not None and place is RequestStatus.RUNNING and status in _ENDED_WELL:
            is_pinned = self.pins.pin_turn(request, time.monotonic())
        if not is_pinned:
            self.manager.free(request)
        if place is not RequestStatus.RUNNING:
            self.loaded.pop(request_id, None)
            any(
                queue.remove_request(request)
                for queue in (self.waiting, self.skipped, self.deferred)
            )

    def sweep(self) -> None:
        """Take finished requests out of `running`, all at once."""
        if not self._has_ended:
            return
        self._has_ended = False
        self.running[:] = [request for request in self.running if not request.is_finished]
