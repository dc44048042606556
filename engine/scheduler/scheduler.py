# SPDX-License-Identifier: Apache-2.0
"""The scheduler: decides, step by step, which requests compute how many tokens.

The scheduler does not distinguish prefill and decode. A request has `num_tokens` and
`num_computed_tokens`; every step reduces the difference between the two numbers, within one token
budget for all requests. A step first schedules running requests, in the order of their admission.
The step then admits waiting requests in the policy's order (`policies.py`, `waiting/admission.py`),
unless a running request lacked room.

No request can block all others:

- While requests hold more than the fraction `preempt_above` of the pool, the last request in the
  policy's order (fcfs: the last admitted request) is preempted. From the fraction `admit_below` on,
  no request is admitted (`pressure.py`). The only running request is never preempted; an idle
  scheduler always admits a request.
- The first running request in the policy's order is never preempted. If this request lacks room, it
  takes blocks from waiting requests whose load has ended, then from running requests, beginning
  with the last. If loads in flight still hold too many blocks, the request keeps its own blocks and
  waits for the connector's reports of these loads, which always come.
- If no request runs, the first waiting request also takes the blocks of requests whose load has
  ended, and the watermark is ignored. A request may take such blocks to run, but not to load.
- `add_request` refuses a request that could not run even alone."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from enum import Enum

from ...connector.base import KVConnectorScheduler, NullConnector
from ...connector.messages import ConnectorWorkerOutput
from ...tiers.base import NO_CONTEXT, RequestContext
from ..cache.group_spec import NUM_SPARE_STATES
from ..cache.kv_cache_manager import KVCacheManager
from ..cache.picture_cache import PictureCache
from ..config.engine_config import SchedulerConfig
from ..observer import GuardedObservers, Observer, StepMade, StepSnapshot
from ..request.core_messages import NOT_FINITE, TokenOutput
from ..request.request import Request, RequestStatus
from .context import SchedulerContext
from .exchange import ConnectorExchange
from .output import (
    ModelRunnerOutput,
    OutputWriter,
    SchedulerOutput,
    add_figures,
    end_token_ids,
    fault_of,
)
from .policies import open_policy
from .request_limits import QueueFull, check_config, check_embeds, check_request
from .request_states import RequestStates
from .running import RunningRound
from .speculation import Speculation
from .step import NO_STEP, ONE_STEP, EntryKind, Pipelining, StepBuilder, StepEntry, StepInFlight
from .waiting.admission import Admission

# The longest time until a deferred request is looked up again, in case a wake-up is lost.
RETRY_SECONDS = 0.02


class Pause(Enum):
    """The requests that `Scheduler.pause` stops."""

    NEW = "new"  # requests that have not run yet wait; running requests finish
    ALL = "all"


class Scheduler:
    """An engine's scheduler. The step thread calls it; only `reset_prefix_cache` may block.

    `fails_with_load`: whether a request ends with an error if a tier had some of its blocks but
    could not load them; otherwise the request computes these blocks. `speculation` decides how many
    draft tokens each request gets; None: no drafts.

    The caller makes a step with `schedule`, and passes the step's result to `update_from_output` or
    `fail_step`, in the order of the steps. Up to `pipelining.depth` steps may be in flight. A
    request whose next token is still being computed is left out of the following steps. With
    `pipelining.runs_ahead` it is left out only if drafts will be proposed after that token;
    otherwise the worker inserts the token. Steps without tokens need no result."""

    def __init__(
        self,
        config: SchedulerConfig,
        manager: KVCacheManager,
        *,
        eos_token_ids: frozenset[int],
        connector: KVConnectorScheduler | None = None,
        fails_with_load: bool = False,
        pipelining: Pipelining = ONE_STEP,
        speculation: Speculation | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        check_config(config, manager.max_model_len)
        if pipelining.depth < 1:
            raise ValueError(f"at least one step is in flight, not {pipelining.depth}")
        self.config = config
        self.manager = manager
        self.eos_token_ids = eos_token_ids
        self._observer = GuardedObservers(observers) if observers else None
        if self._observer is not None and self._observer.hears_keys:
            manager.pool.observer = self._observer
        self.connector = NullConnector() if connector is None else connector
        if (stores_ahead := self.connector.stores_ahead) is not None:
            manager.pool.tell_dropped(stores_ahead.names_dropped)
        if self.connector.wants_all:
            manager.pool.offer_all()
        self._context = context = SchedulerContext(
            config,
            manager,
            self.connector,
            open_policy(config.policy),
            self._observer or Observer(),
        )
        self._states = states = RequestStates(context)
        self._running = RunningRound(states)
        self._admission = Admission(states)
        self._writer = OutputWriter(states)
        self._exchange = ConnectorExchange(states, self._writer, fails_with_load=fails_with_load)
        self._pictures = PictureCache(config.max_num_batched_tokens) if config.pictures else None
        self._max_steps_in_flight = pipelining.depth
        self._runs_ahead = pipelining.runs_ahead and pipelining.depth > 1
        self.speculation = speculation
        self._in_flight: deque[StepInFlight] = deque()  # the oldest first
        self._step_id = 0
        self._paused: Pause | None = None
        self._last_failed_id = 0
        # Whether the last step could do nothing and no event has occurred since that step.
        self._stalled = False
        self._retry_at: float | None = None

    @property
    def requests(self) -> dict[str, Request]:
        """A copy of the dict of unfinished requests by id."""
        return self._states.unfinished

    @property
    def counts(self) -> Mapping[str, int]:
        return self._context.counts

    @property
    def num_running(self) -> int:
        return len(self._states.running)

    def adapter_counts(self) -> dict[str, dict[str, int]]:
        """Count the requests with an adapter, by state and by the adapter's name."""
        return {state: dict(of) for state, of in self._admission.adapters.counts().items()}

    def tool_called(self, job: bytes, tool: str) -> None:
        if self._states.pins is not None:
            self._states.pins.tool_called(job, tool)
            self._stalled = False

    @property
    def pin_seconds(self) -> float:
        """Seconds until the oldest pin expires; infinity without pins."""
        expiry = None if self._states.pins is None else self._states.pins.next_expiry()
        return math.inf if expiry is None else max(0.0, expiry - time.monotonic())

    @property
    def pins_turns(self) -> bool:
        """Whether the policy pins the blocks of a job between its requests."""
        return self._states.pins is not None

    @property
    def takes_priority(self) -> bool:
        """Whether the policy orders requests by the priorities that clients set."""
        return self._context.policy.takes_priority

    @property
    def num_waiting(self) -> int:
        """The number of unfinished requests that do not run, including loading requests, without
        requests whose grammar is being compiled."""
        states = self._states
        return states.num_unfinished - len(states.running) - len(states.awaiting_grammar)

    def has_runnable_work(self) -> bool:
        """Whether a step could do anything now: the connector has work, or an unfinished request
        waits for more than loads and the room that loads can release."""
        if self._stalled:
            is_due = self._retry_at is not None and time.monotonic() >= self._retry_at
        else:
            num_away = self._states.num_loading + len(self._states.awaiting_grammar)
            is_due = self._states.num_unfinished > num_away
        if is_due:  # the next step also does the connector's work
            return True
        if (pins := self._states.pins) and pins.is_due(time.monotonic()):
            return True
        if self.connector.has_pending_work():
            return True
        ahead, pool = self.connector.stores_ahead, self.manager.pool
        return ahead is not None and bool(pool.fresh) and ahead.num_wanted_ahead() > 0

    def check_queue(self) -> None:
        """Raise QueueFull if no more requests may wait. Callers check this before they build a
        request, which takes time because it hashes the prompt."""
        if self.num_waiting >= self.config.max_waiting_requests:
            raise QueueFull(f"{self.num_waiting} requests are waiting, no more may; try later")

    def add_request(
        self,
        request: Request,
        context: RequestContext = NO_CONTEXT,
        *,
        first_token: int | None = None,
        tool: str = "",
        awaits_grammar: bool = False,
    ) -> TokenOutput | None:
        """Queue a request. `context` is for the tiers. `first_token` was sampled by another engine,
        which computed the prompt; its output is returned at once. `tool` is the tool whose result a
        job's request contains. With `awaits_grammar` the request does not run before
        `grammar_ready`, but the tiers may read its blocks. Raises ValueError if the request can
        never run or its id is in use, QueueFull if too many requests wait."""
        states = self._states
        if request.request_id in states.requests:
            raise ValueError(f"request id {request.request_id!r} is in use; give each its own")
        check_request(request, self.manager)
        # A request that continues or belongs to another one was counted with that other request.
        if request.continues is None and not request.keeps_blocks:
            self.check_queue()
        if request.embed_bytes:
            check_embeds(request, states.embed_bytes)
        request.max_num_tokens = min(request.max_num_tokens, self.manager.max_model_len)
        if states.pins is not None:
            states.pins.arrives(request, tool, time.monotonic())
        request.progress.end_ids = end_token_ids(request, self.eos_token_ids)
        if first_token is not None:
            request.fork_of = ""
        waits_for_turn = states.enter(request, context, awaits_grammar=awaits_grammar)
        self._stalled = False
        output = None
        if first_token is not None:
            output = self._writer.pass_on(request, first_token, time.monotonic())
            self._context.counts["generated_tokens"] += 1
        may_load = not (request.skip_reading_prefix_cache or request.external_load_failed)
        if waits_for_turn and may_load and not request.is_finished:
            self.connector.request_queued(request, context)
        return output

    def grammar_ready(self, request: Request) -> None:
        """Allow a request added with `awaits_grammar` to run. An ended request is ignored."""
        if request in self._states.awaiting_grammar:
            self._states.grammar_ready(request)
            self._stalled = False

    def finish_requests(
        self,
        request_ids: Iterable[str],
        status: RequestStatus = RequestStatus.FINISHED_ABORTED,
        error: str | None = None,
    ) -> list[TokenOutput]:
        """End requests in any state, and return the last output of each; unknown ids are ignored.
        `error` is the reason, if `status` is an error.

        Blocks that a load may still write to are released when the connector reports the load."""
        if not status.is_finished:
            raise ValueError(f"requests end with a finished status, not {status.name}")
        now = time.monotonic()
        find = self._states.find_unfinished
        outputs = [
            self._writer.finish_request(request, status, now, error)
            for request_id in dict.fromkeys(request_ids)
            if (request := find(request_id)) is not None
        ]
        self._states.sweep()
        self._stalled = False
        return outputs

    def release_blocks(self, requests: Iterable[Request]) -> None:
        """Release the blocks that these ended requests keep for requests that continue them."""
        self._states.kept.release_blocks(requests)
        self._stalled = False

    def schedule(self, held: Set[str] = frozenset()) -> SchedulerOutput:
        """Schedule the next step, without the requests whose ids are in `held`, and return it.
        Raises RuntimeError while the maximum number of steps is in flight."""
        if len(self._in_flight) >= self._max_steps_in_flight:
            raise RuntimeError("the first step must be updated or failed before the next is made")
        now = time.monotonic()
        states = self._states
        self._step_id += 1
        pool = self.manager.pool
        pool.begin_step(self._step_id)
        if self._observer is not None:
            self._observer.snapshot(
                StepSnapshot(
                    self._step_id,
                    self.num_running,
                    self.num_waiting,
                    pool.num_free,
                    pool.num_cached,
                    pool.num_usable,
                    states.pins,
                )
            )
        if states.pins is not None:
            states.pins.expire(now)
        step = StepBuilder(
            self.manager,
            self._step_id,
            self.config.max_num_batched_tokens,
            runs_ahead=self._runs_ahead,
            held=held,
            speculation=self.speculation,
            pictures=self._pictures,
            # The worker may use the state slots of requests that do not run.
            num_spare_states=NUM_SPARE_STATES
            + max(0, self.config.max_num_seqs - states.num_unfinished),
        )
        if self.speculation is not None:
            self.speculation.begin_step(self.num_running)
        if self._pictures is not None:
            self._pictures.begin_step(self._step_id, states.running)
        num_blocking = len(states.loads.blocking)
        retry = False
        if self._paused is not Pause.ALL:
            self._running.run(step)
            only_known = self._paused is Pause.NEW
            if states.num_forking:
                may_start = not (only_known or step.pressed)
                self._admission.admit_forks(step, now, may_start=may_start)
            if not step.pressed:
                retry = self._admission.admit(step, now, only_known=only_known)
            if self.speculation is not None:
                self._running.add_drafts(step)
                if self.speculation.looks_ahead:
                    self._running.add_room(step)
        checkpoints = self.manager.states
        if checkpoints is not None:
            step.save_states(checkpoints)
        evicted = pool.take_evicted()
        if evicted and checkpoints is not None and self.connector.has_tiers:
            checkpoints.offer_beside(evicted)
        meta = self._exchange.build_meta(evicted)
        output = step.build_output(
            states.finished_ids, states.preempted_ids, meta, self._last_failed_id
        )
        states.finished_ids, states.preempted_ids = set(), set()
        total = output.total_num_scheduled_tokens
        if total:
            self._in_flight.append(StepInFlight(output, step.entries, states.num_departed))
        # A preempted request has left room for later requests, which may be running.
        is_idle = total == 0 and not output.preempted_request_ids
        self._stalled = is_idle and len(states.loads.blocking) == num_blocking
        self._retry_at = now + RETRY_SECONDS if retry else None
        self._context.counts["steps"] += 1
        self._context.counts["scheduled_tokens"] += total
        if output.block_copies:
            self._context.counts["copied_blocks"] += len(output.block_copies)
        if self._observer is not None:
            new_ids = [each.request_id for each in output.new_requests]
            resumed_ids = output.cached_requests.resumed_request_ids
            preempted_ids = output.preempted_request_ids
            tokens = output.num_scheduled_tokens
            self._observer.step(
                StepMade(self._step_id, new_ids, resumed_ids, preempted_ids, tokens, total)
            )
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[TokenOutput]:
        """Process the worker's result of a step: first reports of ended loads, then tokens."""
        _, entries, num_departed = self._land(scheduler_output)
        now = time.monotonic()
        outputs = self._take_reports(runner_output.connector_output, now)
        num_ended, num_more = len(outputs), self._writer.num_more
        if entries:
            self._stalled = False
            self.manager.pool.commit_step(scheduler_output.step_id)
        all_current = num_departed == self._states.num_departed
        sampled, nan_ids = runner_output.sampled_token_ids, runner_output.nan_request_ids
        proposed = runner_output.draft_token_ids
        had_room: Collection[str] = ()  # requests with blocks for proposed drafts
        if self.speculation is not None and self.speculation.looks_ahead:
            had_room = scheduler_output.wanted_drafts
        take = self._writer.append_tokens
        running = RequestStatus.RUNNING
        for entry in entries:
            request = entry[0]
            # Repeats `entry.is_current` for speed, for hundreds of requests in every step.
            if not all_current and (
                request.status is not running or request.num_preemptions != entry[3]
            ):
                # The request ended or was preempted meanwhile. A prompt's figures come only once.
                told = runner_output.prompt_logprobs.get(request.request_id)
                if told is not None and not request.is_finished:
                    request.progress.prompt_logprobs = told
                rows = runner_output.routed_experts.get(request.request_id)
                if rows is not None and not request.is_finished:
                    kept = request.progress.routed_experts or []
                    request.progress.routed_experts = [*kept, rows]
                continue
            request_id = request.request_id
            token_ids = sampled.get(request_id)
            if entry.draft_token_ids:
                self._take_back(entry, token_ids)
                if not token_ids:
                    continue
            if token_ids and not (nan_ids and request_id in nan_ids):
                outputs.append(take(request, token_ids, now))
                if runner_output.routed_experts:
                    progress = request.progress
                    outputs[-1].routed_experts = progress.routed_experts
                    progress.routed_experts = None
                if request_id in proposed and request.status is running:
                    request.draft_token_ids = proposed[request_id]
                has_more = entry.draft_token_ids or (had_room and request_id in had_room)
                if has_more and request.status is running:
                    self.manager.trim(request)
                if request.num_placeholders:
                    self._resolve_placeholder(request)
            elif error := fault_of(request, entry.end, runner_output):
                ended = RequestStatus.FINISHED_ERROR
                if request_id in nan_ids:
                    self._states.drop_blocks(request, NOT_FINITE)
                    self._context.counts["requests_not_finite"] += 1
                    ended = RequestStatus.FINISHED_NOT_FINITE
                elif request_id in runner_output.processor_errors:
                    ended = RequestStatus.FINISHED_PROCESSOR_FAILED
                outputs.append(self._writer.finish_request(request, ended, now, error))
                num_ended += 1
        # Each output of a running request has one token; `num_more` counts further tokens.
        num_tokens = len(outputs) - num_ended + self._writer.num_more - num_more
        self._context.counts["generated_tokens"] += num_tokens
        if runner_output.has_figures:
            add_figures(outputs, runner_output)
        self._states.sweep()
        return outputs

    def drop_drafts(self, request_id: str) -> None:
        """Drop a request's drafts, so that the next step checks none. Unknown ids are ignored."""
        request = self._states.find_unfinished(request_id)
        if request is not None:
            request.draft_token_ids = ()

    def choosing(self, scheduler_output: SchedulerOutput) -> list[Request]:
        """Return the running requests for which this step in flight samples a token. The result is
        valid once the results of all earlier steps have been processed."""
        for step in self._in_flight:
            if step.output is scheduler_output:
                return [
                    entry.request
                    for entry in step.entries
                    if entry.is_current and entry.end >= entry.request.num_tokens
                ]
        return []

    def fail_step(
        self, scheduler_output: SchedulerOutput, error: BaseException | str
    ) -> list[TokenOutput]:
        """Process an exception of the worker in a step. The requests of this step and of all later
        steps in flight end with an error, and the blocks that these steps cached are uncached. All
        other requests continue, and loads in flight are reported as usual."""
        landed = self._land(scheduler_output)._replace(output=scheduler_output)
        failed = [landed, *self._in_flight]
        self._in_flight.clear()
        self._last_failed_id = failed[-1].output.step_id
        if self._pictures is not None:
            self._pictures.fail_step(scheduler_output.step_id)
        self.manager.pool.drop_uncomputed(scheduler_output.step_id)
        now = time.monotonic()
        states = self._states
        text = f"the step that computed this request failed: {error}"
        outputs = []
        for step in failed:
            for entry in step.entries:
                if entry.is_current:
                    ended = RequestStatus.FINISHED_ERROR
                    outputs.append(self._writer.finish_request(entry.request, ended, now, text))
                elif entry.kind is EntryKind.STARTS and not entry.request.is_finished:
                    # A preempted request, which the worker may never have received.
                    entry.request.progress.is_known = False
            states.tell_again(step.output.finished_request_ids, step.output.preempted_request_ids)
        states.sweep()
        self._stalled = False
        return outputs

    def pause(self, which: Pause) -> None:
        """Stop the admission of new requests (`Pause.NEW`), or the computation of all
        (`Pause.ALL`), until `resume`. Requests keep blocks and loads, and may be added or ended."""
        self._paused = which
        self._stalled = False

    def resume(self) -> None:
        self._paused = None
        self._stalled = False

    @property
    def paused(self) -> Pause | None:
        """The pause in force, or None if requests run as usual."""
        return self._paused

    def give_up_step(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput | None
    ) -> list[TokenOutput]:
        """Process the result of a step that was in flight when an earlier step failed;
        `runner_output` is None if the worker refused the step. The step's tokens are dropped, its
        reports of copies are processed, and its ended and preempted requests are sent again."""
        self._states.tell_again(
            scheduler_output.finished_request_ids, scheduler_output.preempted_request_ids
        )
        if runner_output is None:
            return []
        outputs = self._take_reports(runner_output.connector_output, time.monotonic())
        self._states.sweep()
        return outputs

    def reset_prefix_cache(self, reset_tiers: bool) -> bool:
        """Uncache all blocks of the pool and, with `reset_tiers`, drop all blocks of the tiers.
        While a request holds blocks, return False and change nothing."""
        pool = self.manager.pool
        if pool.num_held > pool.num_reclaimable:
            return False
        if self._states.pins is not None:
            self._states.pins.release_all()
        self._states.kept.release_blocks(list(self._states.kept.ended))
        if not pool.reset_prefix_cache():
            return False
        if reset_tiers:
            self.connector.reset()
        self._stalled = False
        return True

    def stats(self) -> dict[str, float]:
        """Return current values and counters since the start, of requests, tokens and blocks."""
        pool, pins = self.manager.pool, self._states.pins
        checkpoints: dict[str, float] = {}
        if (states := self.manager.states) is not None:
            checkpoints["state_checkpoints"] = states.num_saved
            checkpoints["state_checkpoints_left_out"] = states.num_left_out
        return {
            "num_running": self.num_running,
            "num_waiting": self.num_waiting + len(self._states.awaiting_grammar),
            "num_parked": self._states.num_loading,
            "num_deferred": self._states.num_deferred + len(self._states.awaiting_grammar),
            "num_blocks": pool.num_blocks,
            "num_free_blocks": pool.num_free,
            "pool_usage": pool.usage,
            "evicted_blocks": pool.num_evicted,
            "num_pinned": 0 if pins is None else len(pins),
            "pinned_blocks": 0 if pins is None else pins.num_blocks,
            **checkpoints,
            **({} if self._pictures is None else self._pictures.stats()),
            **self._context.counts,
        }

    def _take_back(self, entry: StepEntry, token_ids: list[int] | None) -> None:
        """Set the request's `num_computed_tokens` back to the last accepted draft, because later K
        and V are invalid. If no token was sampled, a draft's K and V may be the cause, so the
        request computes its last token again without drafts."""
        assert self.speculation is not None
        request, num_drafts = entry.request, len(entry.draft_token_ids)
        num_accepted = max(0, len(token_ids or ()) - 1)
        request.num_computed_tokens -= num_drafts - num_accepted
        if not token_ids:
            request.num_computed_tokens = entry.num_computed_tokens
            self._states.drop_blocks(request, NOT_FINITE)
            self.manager.trim(request)
        request.num_told_tokens = request.num_computed_tokens
        self.speculation.note_accepted(request, num_drafts, num_accepted)

    def _resolve_placeholder(self, request: Request) -> None:
        """Remove one placeholder: the token that a later step already computes is now known."""
        request.num_placeholders -= 1
        num_tokens = request.num_tokens
        if num_tokens % self.manager.block_size == 0 and request.status is RequestStatus.RUNNING:
            # The later step could not cache the block, because this token was unknown.
            self.manager.cache_scheduled(request, min(num_tokens, request.num_computed_tokens))

    def _take_reports(
        self, worker_output: ConnectorWorkerOutput | None, now: float
    ) -> list[TokenOutput]:
        """Queue requests whose loads ended; with `fails_with_load`, end those whose load failed."""
        has_reports, outputs = self._exchange.take_reports(worker_output, now)
        if has_reports:
            self._stalled = False
        return outputs

    def _land(self, scheduler_output: SchedulerOutput) -> StepInFlight:
        """Remove and return the oldest step in flight; NO_STEP for a step without tokens."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            return NO_STEP
        if not self._in_flight or scheduler_output is not self._in_flight[0].output:
            raise RuntimeError(
                "this is not the step in flight that is due; each comes back exactly once, the "
                "oldest first"
            )
        return self._in_flight.popleft()
