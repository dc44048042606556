# SPDX-License-Identifier: Apache-2.0
"""Admission: decides which waiting requests start to run in a step.

Each step has one round, which considers waiting requests in the policy's order. The round ends at
the first request without room, so that later requests cannot take the room that this request needs.
A request that waits for a load or an answer of the tiers is deferred. While requests run, a round
considers only some deferred requests, in rotation."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from ....connector.messages import Match, MatchKind
from ...cache.kept_blocks import num_common_tokens
from ...cache.kv_block import GroupBlocks
from ...observer import Decision, Obstacle
from ...request.request import Request, RequestStatus
from ..policies import RequestQueue
from ..pressure import Reservations
from ..request_states import RequestStates
from ..step import StepBuilder
from .adapter_budget import AdapterBudget

# Considering a deferred request takes about as long as scheduling ten decodes.
MOST_DEFERRED = 16


class Verdict(Enum):
    """The outcome of considering a waiting request."""

    RUNS = "runs"
    LOADING = "loading"
    LATER = "later"  # deferred: it will be considered again
    NO_ROOM = "no room"


class Admission:
    """Admits waiting requests, in one round per step."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._loads = states.loads
        self._pressure = states.pressure
        self._context = context = states.context
        reserves = context.config.reserve != "none"
        self._reservations = Reservations(states) if reserves else None
        self._manager = context.manager
        self._connector = context.connector
        self._policy = context.policy
        self._observer = context.observer
        config = context.config
        self._max_running = config.max_num_seqs
        self._chunked = config.enable_chunked_prefill
        self._chunk_limit = config.most_step_tokens
        self._most_tokens = config.max_num_batched_tokens
        self.adapters = AdapterBudget(states)
        self._waits_for_budget = ""  # id of a request that waits for tokens, with no load to begin

    def admit(self, step: StepBuilder, now: float, *, only_known: bool = False) -> bool:
        """Admit waiting requests that fit; with `only_known`, only requests that have run before.
        Return whether requests are deferred, so that a later step must look them up again."""
        states = self._states
        if self._reservations is not None:
            self._reservations.recount()
        if self.adapters.is_asked:
            self.adapters.begin_round()
        most = MOST_DEFERRED if states.running else states.num_unfinished
        later: list[Request] = []
        newer = (states.skipped, states.waiting)
        if not self._policy.deferred_first:
            queues = (states.deferred, *newer)
            self._admit_from(queues, 2 * most, later, step, now, only_known)
        elif self._admit_from((states.deferred,), most, later, step, now, only_known):
            most += len(later) - self.adapters.num_refused
            self._admit_from(newer, most, later, step, now, only_known)
        if later:
            states.deferred.add_all(later)
        return len(states.deferred) > 0

    def admit_forks(self, step: StepBuilder, now: float, *, may_start: bool) -> None:
        """Start the forks of running requests; see `_admit_forks_of`."""
        if self._reservations is not None:
            self._reservations.recount()
        for parent in tuple(self._states.running):
            if parent.progress.forks:
                self._admit_forks_of(parent, step, now, may_start=may_start)

    def _admit_forks_of(
        self, parent: Request, step: StepBuilder, now: float, *, may_start: bool
    ) -> None:
        """Start the requests that wait for the prompt of `parent`, in the blocks of `parent`, if
        the prompt ends in this step. Requests without room (all of them unless `may_start`) are
        queued, and find the prompt's blocks by prefix lookup."""
        states, alone = self._states, {}
        for child, context in states.take_forks(parent).items():
            if not (may_start and self._may_fork(parent, child, step)):
                alone[child] = context
                continue
            self._manager.fork(parent.request_id, child, child.num_prompt_tokens)
            self._commit_reserved()
            self._start_fork(parent, child, step, now)
        states.queue_forks(alone, at_head=True)

    def _may_fork(self, parent: Request, child: Request, step: StepBuilder) -> bool:
        """Whether `child` may start now, with room for a copy of the prompt's last block."""
        manager = self._manager
        if len(self._states.running) >= self._max_running or child.request_id in step.held:
            return False
        num_spare = manager.pool.num_free - manager.shared_tails.num_to_copy() * manager.pool.width
        if num_spare - manager.num_groups < self._keep_free():
            return False
        if self._pressure.forbids_admission:
            return False
        if self._reservations is None:
            return True
        num_blocks = -(-child.num_prompt_tokens // manager.block_size)
        tables = manager.tables(parent.request_id)
        hits = tuple([table[:num_blocks] for table in tables])
        num_copied = manager.num_groups if child.num_prompt_tokens % manager.block_size else 0
        return self._reservations.has_room_for(child, hits, num_copied)

    def _admit_from(
        self,
        queues: Sequence[RequestQueue],
        most_later: int,
        later: list[Request],
        step: StepBuilder,
        now: float,
        only_known: bool,
    ) -> bool:
        """Consider the requests of `queues`, in the policy's order, until `most_later` are deferred
        (adapters apart). Return False if the round ended for lack of room."""
        while len(later) - self.adapters.num_refused < most_later:
            found = self._policy.first(queues, only_known)
            if found is None:
                break
            queue, request = found
            if (obstacle := self._obstacle(request, step)) is not None:
                self._note_wait(request, obstacle)
                return False
            verdict = self._consider(request, step, now, only_known)
            if verdict is Verdict.NO_ROOM:
                return False
            queue.remove_request(request)
            if verdict is Verdict.LATER:
                later.append(request)
                continue
            if request.adapter is not None:
                self.adapters.note_admitted(request)
            if request.progress.forks:
                self._admit_forks_of(request, step, now, may_start=not only_known)
        return True

    def _obstacle(self, request: Request, step: StepBuilder) -> Obstacle | None:
        """Return the obstacle that ends the round before `request` is considered, or None."""
        if len(self._states.running) >= self._max_running:
            return Obstacle.SEATS
        if step.budget == 0 and not self._may_begin_load(request):
            return Obstacle.BUDGET
        return Obstacle.PRESSURE if self._is_held_back(request) else None

    def _may_begin_load(self, request: Request) -> bool:
        """Whether the request may begin a load although the step has no tokens left."""
        return (
            self._connector.has_tiers
            and request.request_id != self._waits_for_budget
            and request.num_computed_tokens == 0
            and _may_load(request)
        )

    def _is_held_back(self, request: Request) -> bool:
        """Whether memory is too full to start the request; always False if no request runs, or if
        the request already holds loaded blocks."""
        states = self._states
        if not states.running or request.num_computed_tokens > 0:
            return False
        while self._pressure.forbids_admission:
            if not (self._pressure.counts_pins and self._release_pin(request)):
                return True
        return False

    def _consider(
        self, request: Request, step: StepBuilder, now: float, only_known: bool
    ) -> Verdict:
        connector = self._connector
        if request.request_id in step.held:  # a preempted one
            self._note_wait(request, Obstacle.MASK)
            return Verdict.LATER
        if request.request_id in connector.awaiting_prefill:
            self._note_wait(request, Obstacle.PREFILL)
            return Verdict.LATER
        if request.adapter is not None and not self.adapters.allows(request, only_known):
            self._note_wait(request, Obstacle.ADAPTERS)
            return Verdict.LATER
        hits, num_hit_tokens, overlaps = None, 0, False
        before = request.continues
        if before is not None and before.progress.kept and request.num_computed_tokens == 0:
            verdict = self._run_in_kept_blocks(request, step, now)
            if verdict is not None:
                return verdict
        if before is not None and request.progress.context is not None:
            self._ask_tiers_too(request)
        if request.num_computed_tokens == 0:
            hits, num_hit_tokens = self._manager.get_computed_blocks(request)
            running = self._states.running
            while self._drives_out(request, hits):
                if not (self._pressure.counts_pins and self._release_pin(request)):
                    self._note_wait(request, Obstacle.PROMPT_ROOM)
                    return Verdict.NO_ROOM
            if _may_load(request):
                queued = self._most_tokens - step.budget + _num_queued(running)
                # With windows, a shorter hit needs other blocks than a longer one: no junction.
                junction = 0 if self._manager.forgets else request.progress.junction
                match = connector.get_matched_tokens(
                    request,
                    num_hit_tokens,
                    num_queued_tokens=queued,
                    num_pool_tokens=junction or None,
                )
                request.progress.junction = max(request.progress.junction, match.junction)
                if match.kind is MatchKind.RETRY:
                    self._note_wait(request, Obstacle.LOOKUP)
                    return Verdict.LATER
                if match.kind is MatchKind.LOAD or (
                    match.kind is MatchKind.OVERLAP and step.budget > 0
                ):
                    overlaps = self._overlaps(match, request, hits, num_hit_tokens)
                    if not overlaps:
                        if junction:
                            most = min(junction, num_hit_tokens + match.tokens)
                            hits = self._manager.stateless_blocks(request, most)
                        return self._load_external_tokens(
                            request, hits, num_hit_tokens, match.tokens, only_known
                        )
                    hits, num_hit_tokens = None, 0
                    self._observer.decision(request, Decision.LOADING)
        if step.budget == 0:
            self._waits_for_budget = request.request_id
            self._note_wait(request, Obstacle.BUDGET)
            return Verdict.NO_ROOM
        num_tokens = request.num_tokens - request.num_computed_tokens - num_hit_tokens
        if overlaps:
            num_tokens = self._loads.most_tokens(request)
        if self._chunked:
            num_tokens = min(num_tokens, self._chunk_limit, step.budget)
        elif num_tokens > step.budget:
            self._note_wait(request, Obstacle.BUDGET)
            return Verdict.NO_ROOM
        if request.pictures or (self._chunked and self._manager.states is not None):
            computed = request.num_computed_tokens + num_hit_tokens
            num_tokens = step.most_tokens(request, computed, num_tokens)
            if num_tokens == 0:
                self._note_wait(request, Obstacle.PICTURES)
                return Verdict.NO_ROOM
        while obstacle := self._allocate_first_slots(request, num_tokens, hits, num_hit_tokens):
            if not self._make_room(request):
                self._note_wait(request, obstacle)
                return Verdict.NO_ROOM
        request.num_computed_tokens += num_hit_tokens
        self._start_request(request, num_tokens, step, now)
        return Verdict.RUNS

    def _ask_tiers_too(self, request: Request) -> None:
        """Let the tiers look up the request's blocks: the blocks kept for it were released."""
        context, request.progress.context = request.progress.context, None
        if context is not None and not request.skip_reading_prefix_cache:
            request.external_load_failed = False
            self._connector.request_queued(request, context)

    def _run_in_kept_blocks(
        self, request: Request, step: StepBuilder, now: float
    ) -> Verdict | None:
        """Start a request in the kept blocks of the ended request that it continues, so that only
        additional tokens are computed. Return None if these blocks had to be released."""
        assert request.continues is not None
        kept, manager, reservations = self._states.kept, self._manager, self._reservations
        num_more = request.num_tokens - num_common_tokens(request.continues, request)
        if step.budget == 0 or (step.budget < num_more and not self._chunked):
            self._note_wait(request, Obstacle.BUDGET)
            return Verdict.NO_ROOM
        blocks, num_copied = kept.blocks_for(request), manager.num_groups
        while reservations and not reservations.has_room_for(request, blocks, num_copied):
            if not self._make_room(request):
                self._note_wait(request, Obstacle.RESERVATION)
                return Verdict.NO_ROOM
            if request.continues.progress.kept is None:
                return None
        kept.lend(request)
        num_tokens, keep = min(num_more, step.budget, self._chunk_limit), self._keep_free()
        while manager.allocate_slots(request, num_tokens, keep_free_blocks=keep) is None:
            if not self._make_room(request):
                kept.take_back(request)
                self._note_wait(request, Obstacle.ROOM)
                return Verdict.NO_ROOM
        self._commit_reserved()
        self._start_request(request, num_tokens, step, now)
        return Verdict.RUNS

    def _overlaps(
        self, match: Match, request: Request, hits: GroupBlocks, num_hit_tokens: int
    ) -> bool:
        """Begin a load that overlaps with computing, if the match offers an overlapped load,
        chunked prefill is on and there is room. Return whether the load has begun."""
        return (
            self._chunked
            and match.kind is MatchKind.OVERLAP
            and self._may_reserve(request, hits)
            and self._loads.begin_load(
                request, hits, num_hit_tokens, match.tokens, self._keep_free(), overlapped=True
            )
            and self._commit_reserved()
        )

    def _load_external_tokens(
        self,
        request: Request,
        hits: GroupBlocks,
        num_hit_tokens: int,
        num_external_tokens: int,
        only_known: bool,
    ) -> Verdict:
        if not all(map(self._manager.pool.all_computed, hits)):
            # A step still writes some of the hit blocks, and may fail during the load.
            self._note_wait(request, Obstacle.WRITER)
            return Verdict.LATER
        states, obstacle = self._states, Obstacle.LOAD_ROOM
        checkpoints = self._manager.states
        num_state_pages = 0 if checkpoints is None else checkpoints.num_pages
        while True:
            if not self._may_reserve(request, hits, num_state_pages):
                obstacle = Obstacle.RESERVATION
            elif self._loads.begin_load(
                request, hits, num_hit_tokens, num_external_tokens, self._keep_free(),
                overlapped=False,
            ):  # fmt: skip
                break
            if self._release_pin(request):
                continue
            if only_known and self._take_from_paused(request):
                continue
            # A load never takes blocks from another load, because two requests could do so in turn
            # without end. If no request runs, loaded requests come first.
            self._note_wait(request, obstacle)
            return Verdict.LATER if states.loaded and not states.running else Verdict.NO_ROOM
        self._commit_reserved()
        self._context.counts["loads"] += 1
        self._observer.decision(request, Decision.LOADING)
        # Tokens that the load does not bring are computed by the request, and count as lost.
        promised = num_hit_tokens + num_external_tokens
        request.progress.lose(promised, "load_failed")
        return Verdict.LOADING

    def _allocate_first_slots(
        self, request: Request, num_tokens: int, hits: GroupBlocks | None, num_hit_tokens: int
    ) -> Obstacle | None:
        """Allocate blocks for the request's first tokens in this step. If there is no room, return
        the obstacle and change nothing. `hits` is None if the request already has blocks."""
        if hits is not None and not self._may_reserve(request, hits):
            return Obstacle.RESERVATION
        added = self._manager.allocate_slots(
            request,
            num_tokens,
            num_new_computed_tokens=num_hit_tokens,
            new_computed_blocks=hits,
            keep_free_blocks=self._keep_free(),
        )
        if added is None:
            return Obstacle.ROOM
        if hits is not None:
            self._commit_reserved()
        return None

    def _may_reserve(self, request: Request, hits: GroupBlocks | None, num_more: int = 0) -> bool:
        reservations = self._reservations
        return reservations is None or reservations.has_room_for(request, hits, num_more)

    def _commit_reserved(self) -> bool:
        """Commit the reservation that `_may_reserve` checked. Return True."""
        return self._reservations is None or self._reservations.commit_reserved()

    def _drives_out(self, request: Request, hits: GroupBlocks) -> bool:
        """Whether the request's prompt lacks room beside running requests; False with
        `--reserve`."""
        running = self._states.running
        if not running or self._reservations is not None:
            return False
        return not self._pressure.has_room_for(request, hits, running)

    def _release_pin(self, request: Request) -> bool:
        if self._reservations is not None:
            self._reservations.recount()
        return self._states.release_pin_for_start(request)

    def _keep_free(self) -> int:
        """Return the number of blocks to leave free. The result is 0 if no request runs: no request
        then needs the watermark."""
        return self._manager.watermark_blocks if self._states.running else 0

    def _make_room(self, request: Request) -> bool:
        """Release a pin's blocks; or, if no request runs, release the blocks of a finished load."""
        if self._release_pin(request):
            return True
        if self._reservations is not None:
            self._reservations.recount()
        return not self._states.running and self._states.give_up_last_load(spare=request)

    def _take_from_paused(self, request: Request) -> bool:
        """Call `_make_room` in a paused scheduler, unless a request with a finished load has run
        before. Requests that are new can neither run nor load before the pause ends."""
        loaded = self._states.loaded
        has_begun = any(other.num_preemptions > 0 for other in loaded)
        return not has_begun and self._make_room(request)

    def _start_request(
        self, request: Request, num_tokens: int, step: StepBuilder, now: float
    ) -> None:
        states = self._states
        if request in states.loaded:
            states.loaded.remove(request)
        states.running.append(request)
        request.status = RequestStatus.RUNNING
        progress = request.progress
        if request.continues is None or progress.loaded_by_tier:
            self._count_reuse(request)
        if progress.scheduled is None:
            progress.scheduled = now
            if request.continues is None:
                self._note_cached_tokens(request)
            else:  # the prompt was counted with the first request of the chain
                request.num_cached_tokens = max(request.num_cached_tokens, 0)
                request.continues = None  # otherwise all requests of the chain would stay in memory
        resumes = request.num_preemptions > 0
        self._observer.decision(request, Decision.RESUMED if resumes else Decision.SCHEDULED)
        if progress.is_known:
            step.resume(request, num_tokens)
        else:
            progress.is_known = True
            step.start(request, num_tokens)

    def _start_fork(self, parent: Request, child: Request, step: StepBuilder, now: float) -> None:
        """Start the request `child`, which computes nothing of its prompt. The prompt's cached
        tokens are counted for `parent` only."""
        self._states.running.append(child)
        child.status = RequestStatus.RUNNING
        child.progress.scheduled = now
        child.num_computed_tokens = child.num_prompt_tokens
        child.num_cached_tokens = child.num_prompt_tokens
        child.cached_tokens_by_tier = {"pool": child.num_prompt_tokens}
        self._context.counts["forks"] += 1
        self._observer.decision(child, Decision.SCHEDULED)
        step.fork(parent, child)

    def _note_wait(self, request: Request, obstacle: Obstacle) -> None:
        self._observer.decision(request, Decision.WAITS, obstacle.value)

    def _count_reuse(self, request: Request) -> None:
        """Count a starting request's reused tokens, by source, and recomputed tokens, by cause."""
        counts, progress = self._context.counts, request.progress
        computed = request.num_computed_tokens
        in_pool = computed - request.num_external_computed_tokens
        reused = {"pool": in_pool, **progress.loaded_by_tier}
        self._context.count_reused(reused, 0)
        self._observer.hit(request, reused)
        if request.num_preemptions > 0:
            counts["resumed_by_load"] += sum(progress.loaded_by_tier.values())
        if progress.lost_tokens > computed:
            counts[f"recomputes_{progress.lost_cause}"] += 1
            counts[f"recomputed_tokens_{progress.lost_cause}"] += progress.lost_tokens - computed
        progress.loaded_by_tier = {}
        progress.lost_tokens = 0

    def _note_cached_tokens(self, request: Request) -> None:
        """Count the cached tokens of a request once, at its first start. Tokens found after a
        preemption do not count, because the request itself computed them."""
        cached = request.num_computed_tokens
        in_pool = cached - request.num_external_computed_tokens
        request.num_cached_tokens = cached
        request.cached_tokens_by_tier = {"pool": in_pool, **request.cached_tokens_by_tier}
        counts = self._context.counts
        counts["prompt_tokens"] += request.num_prompt_tokens
        if self._manager.pool.enable_caching and not request.skip_reading_prefix_cache:
            counts["prefix_queried_tokens"] += request.num_prompt_tokens
            if self._connector.has_tiers:
                counts["external_queried_tokens"] += request.num_prompt_tokens - in_pool
        for tier, num_tokens in request.cached_tokens_by_tier.items():
            counts[f"cached_tokens_{tier}"] += num_tokens


def _num_queued(running: list[Request]) -> int:
    """Return the number of tokens that running prompts still compute before waiting prompts."""
    missing = [request.num_tokens - request.num_computed_tokens for request in running]
    return sum([count for count in missing if count > 1])


def _may_load(request: Request) -> bool:
    return not (request.external_load_failed or request.skip_reading_prefix_cache)
