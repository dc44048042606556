# SPDX-License-Identifier: Apache-2.0
"""StrataConnector in vLLM's scheduler: passes requests and blocks to StrataKV's scheduler side.

    on_new_request     the prompt is looked up; blocks that only a store has are read
    matched            number of tokens to load; vLLM calls again until it is known
    allocated          the request waits for its load from this call on
    build_step_plan    evicted and new blocks are stored; blocks that were read are copied
    apply_step_report  the worker's results are processed

A block is stored when vLLM evicts it, before the step that overwrites it. With cache servers, or a
disk with write_through, a block is stored in the step after the step that computed it. Blocks of
generated tokens are stored like blocks of prompts.

vLLM ends if a connector raises, so no call after the start raises. After an error the role gives up
the loads of all waiting requests, vLLM computes their prompts, and later look-ups miss. vLLM makes
all calls from one thread. A second thread polls the tiers while vLLM is idle; both take the same
lock."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ....tiers.base import Answer
from ...build import BuiltSide
from ...costs.rates import PrefillRate
from ...messages import (
    NOTHING_FINISHED,
    NOTHING_TO_MOVE,
    ConnectorMetadata,
    Elsewhere,
    EvictedBlock,
    MatchKind,
)
from ...page_keys import PAGE_KEY_BYTES
from ...parts import Parts
from ..identity import ChunkKeys
from .adapters import Adapters
from .events import TierEvents
from .groups import NULL_BLOCK, Columns
from .host_keys import CachedBlock, HostKeys
from .outgoing_blocks import OutgoingBlocks
from .pool_watch import PoolWatch
from .requests import HostRequest, StepTimes, asks_for, params_for_decode
from .steps import PartLoad, RequestLoad, SlabPlace, StepPlan, StepReport

log = logging.getLogger(__name__)

T = TypeVar("T")

# The longest delay of work for which the tiers have set an alarm, if the alarm is missed.
LOOK_SECONDS = 0.25
CLOSE_SECONDS = 2.0
STOPPED = "StrataKV's tiers for vLLM stop; everything is computed from now on"
NOTHING: tuple[int | None, bool] = (0, False)


@dataclass(slots=True)
class _Load:
    """A request's load, until its end has been reported to vLLM."""

    block_ids: list[list[int]]  # for each column, the blocks after vLLM's own hits
    num_near_blocks: int = 0  # positions that were in the slab when the load began
    # (block id, rank) → key, of each block that the load brings.
    keys: dict[tuple[int, int], bytes] = field(default_factory=dict)
    job_ids: set[int] = field(default_factory=set)  # under way
    is_told: bool = False  # whether a step plan with the load was sent


class _LoadJob(NamedTuple):
    request_id: str
    keys: list[bytes]


class SchedulerRole:
    """The role in vLLM's scheduler; owns `built`. With `stores_all` blocks are stored once they are
    computed; without `loads` this engine loads no blocks."""

    def __init__(
        self,
        built: BuiltSide,
        keys: ChunkKeys,
        *,
        columns: Columns,
        parts: Parts,
        stores_all: bool,
        prefill: PrefillRate,
        shutdown_seconds: float,
        loads: bool = True,
        events: TierEvents | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self._side, self._slab = built.side, built.slab
        self._keys = keys
        self._columns = columns
        self._adapters = Adapters() if adapters is None else adapters
        self._host_keys = HostKeys(columns, self._adapters)
        self._block_tokens = columns.position_tokens
        self._parts = parts
        self.num_groups = columns.num_groups
        self._outgoing = OutgoingBlocks(stores_all=stores_all or built.side.wants_all)
        self._shutdown_seconds = shutdown_seconds
        self._may_load = loads
        self._events = events
        self._place = SlabPlace(
            built.description.layout,
            built.description.num_slots,
            os.getpid(),
            built.description.slab_fd,
        )
        self._watch: PoolWatch | None = None
        self._requests: dict[str, HostRequest] = {}
        self._offers: dict[str, int] = {}  # request id → first block of the offer
        self._loads: dict[str, _Load] = {}
        self._given_up: list[str] = []
        self._stores: dict[int, list[bytes]] = {}  # job id → vLLM's keys of its blocks
        self._load_jobs: dict[int, _LoadJob] = {}
        self._hand_overs: list[tuple[str, list[bytes]]] = []
        self._times = StepTimes(prefill)
        self._number = 0
        self.damaged_blocks = 0
        self.is_broken = False
        self._closed = False
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._side.set_wakeup(self._woken.set)
        if self._side.wants_all:
            self._side.prompts_elsewhere.expect_prompts()
        self._thread = threading.Thread(target=self._run, name="stratakv-vllm-tiers", daemon=True)
        self._thread.start()

    # Calls of vLLM's scheduler

    def bind_pool(self, pool: Any) -> None:
        """Register vLLM's block pool, before the first step. Raises ConfigError if positions end
        between vLLM's hashes."""
        self._host_keys.bind_hash_tokens(pool.hash_block_size)
        if self._watch is None:
            self._watch = PoolWatch(pool, self._host_keys, self._note_cached, self._drop_uncached)

    def on_new_request(self, request: Any) -> None:
        self._safely(self._on_new_request, None, request)

    def matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return the number of tokens after the first `num_computed_tokens` that can be loaded
        (None: not known yet), and whether the load runs while vLLM computes other requests."""
        return self._safely(self._matched, NOTHING, request, num_computed_tokens)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Begin a load of `num_tokens` to a waiting request's blocks, given by cache group."""
        if not num_tokens:
            return
        first = self._offers.pop(request.request_id, 0)
        num_blocks = -(-num_tokens // self._block_tokens)
        load = _Load(
            [
                column.blocks_of(block_ids[column.group], first, num_blocks)
                for column in self._columns.all
            ]
        )
        self._loads[request.request_id] = load  # the end of the load is always reported to vLLM
        self._safely(self._begin_load, None, request, load, first, num_tokens)

    def hits_of(self, request_id: str) -> tuple[int, list[str]]:
        """Return the number of tokens from the slab, and the tiers of all other tokens."""
        load = self._loads.get(request_id)
        num_near = 0 if load is None else load.num_near_blocks * self._block_tokens
        return num_near, self._side.tiers[1:]

    def build_step_plan(self, output: Any) -> StepPlan:
        """Return the plan of the worker's copies in the step that vLLM has scheduled."""
        self._number += 1
        plan = StepPlan(self._number, self._place, NOTHING_TO_MOVE)
        self._safely(self._build, None, output, plan)
        if self.is_broken:
            self._stop_watching()
            for told in plan.loads:
                self._loads[told.request_id].is_told = False
            plan.moves, plan.loads = NOTHING_TO_MOVE, []
            # The worker reports the end of all other loads.
            self._given_up = [name for name, load in self._loads.items() if not load.is_told]
        for request_id in self._given_up:
            self._loads.pop(request_id, None)
        plan.given_up, self._given_up = self._given_up, []
        return plan

    def apply_step_report(self, report: StepReport) -> None:
        """Process the worker's report of a step."""
        if self.is_broken:
            for job_id in (*report.output.finished_loads, *report.output.failed_loads):
                job = self._load_jobs.pop(job_id, None)
                load = None if job is None else self._loads.get(job.request_id)
                if job is not None and load is not None:
                    load.job_ids.discard(job_id)
                    if not load.job_ids:
                        del self._loads[job.request_id]
            return
        self._safely(self._apply_step_report, None, report)

    def end_request(self, request: Any) -> dict[str, Any] | None:
        """Drop an ended request. Return parameters for the engine that decodes it, if any."""
        return self._safely(self._finished, None, request)

    def has_pending_work(self) -> bool:
        """Whether vLLM must run a step even without requests."""
        if self.is_broken:
            return bool(self._loads)
        return bool(self._stores or self._outgoing.num_coming or self._given_up or self._hand_overs)

    def take_events(self) -> list[Any]:
        if self._events is None:
            return []
        return self._safely(self._events.drain_events, [], self._slab.keys)

    def reset(self) -> bool:
        """Drop all blocks of every tier. Return whether the reset succeeded."""
        return self._safely(self._reset, False)

    def stats(self) -> dict[str, Any]:
        """Return `OffloadScheduler.stats`, the tiers that are down, and a damaged-block count."""
        return self._safely(self._read_stats, {})

    def shutdown(self) -> None:
        """Write unwritten blocks, and release all resources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._woken.set()
        self._thread.join(self._shutdown_seconds + CLOSE_SECONDS)
        self._stop_watching()
        self._adapters.close()
        with self._lock:
            try:
                # After an error there are no reports of ended copies to wait for.
                seconds = CLOSE_SECONDS if self.is_broken else self._shutdown_seconds
                self._side.shutdown(seconds)
            except Exception:
                log.exception("the tiers could not be closed in order")

    def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    # The bodies of the calls of vLLM's scheduler, which may raise

    def _on_new_request(self, request: Any) -> None:
        view = self._view(request)
        adapted = self._adapters.adapter_of(request)
        if adapted is not None and (adapted.is_pending or self._adapters.is_refused(adapted)):
            return
        view.is_queued = True
        if asks_for(request, "do_remote_prefill"):
            self._side.prompts_elsewhere.await_prefill(view.request_id, Elsewhere.TOLD)
        self._side.request_queued(view)

    def _matched(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        request_id = request.request_id
        view, adapted = self._view(request), self._adapters.adapter_of(request)
        if adapted is not None:
            if adapted.is_pending:
                return None, False
            # A partial block that vLLM found has no key, so the content of its adapter is unknown.
            adapted.is_mixed |= num_computed_tokens % self._block_tokens > 0
            if self._adapters.is_refused(adapted) or adapted.is_mixed:
                return NOTHING
            if not view.is_queued:
                self._on_new_request(request)
        if not self._may_load or request_id in self._loads:
            return NOTHING
        if getattr(request, "skip_reading_prefix_cache", False):
            return NOTHING
        if request_id in self._side.awaiting_prefill:
            return None, False
        match = self._side.get_matched_tokens(view, num_computed_tokens)
        if match.kind is MatchKind.RETRY:
            return None, False
        # Only whole blocks are offered, because vLLM cannot cache a part of a block.
        num_tokens = match.tokens - match.tokens % self._block_tokens
        if not num_tokens:
            return NOTHING
        self._offers[request_id] = num_computed_tokens // self._block_tokens
        return num_tokens, True

    def _begin_load(self, request: Any, load: _Load, first: int, num_tokens: int) -> None:
        view = self._view(request)
        num_blocks = num_tokens // self._block_tokens
        digests = view.block_hashes[first : first + num_blocks]
        keys = self._parts.keys_of(digests)
        needed = self._parts.needed(first, num_blocks)
        is_far = [False] * num_blocks
        answers = self._slab.lookup([keys[place] for place in needed])
        for place, answer in zip(needed, answers, strict=True):
            position, index = divmod(place, self._parts.width)
            part = self._parts.all[index]
            load.keys[load.block_ids[part.group][position], part.rank] = keys[place]
            is_far[position] |= answer is not Answer.HIT
        load.num_near_blocks = is_far.count(False)
        # vLLM's tables must have exactly the blocks to load, to which the next token attends.
        real = [block_id for ids in load.block_ids for block_id in ids if block_id != NULL_BLOCK]
        num_ranks = len(self._parts.shards)
        is_known = all(block_id != NULL_BLOCK for block_id, _rank in load.keys)
        if not is_known or not len(load.keys) == len(real) * num_ranks == len(needed):
            raise ValueError(
                f"vLLM has {len(real)} blocks for {num_tokens} tokens behind block {first} of "
                f"{view.request_id}, of which {len(view.block_hashes)} have hashes, where "
                f"{len(needed) // num_ranks} are needed"
            )
        self._side.begin_load(view, load.block_ids, num_tokens, overlapped=False)

    def _build(self, output: Any, plan: StepPlan) -> None:
        self._times.scheduled(output, plan.number)
        changed = self._adapters.take_changed()
        if changed:
            self._host_keys.drop_adapters(changed)
        evicted: list[CachedBlock] = []
        cold: list[CachedBlock] = []
        if self._watch is not None:
            evicted, cold = self._outgoing.choose(
                self._watch, output, self._side.stores_ahead.num_wanted_ahead()
            )
        host_keys = {block.block_id: block.host_key for block in (*evicted, *cold)}
        moves = self._side.build_meta(
            [self._as_evicted(block) for block in evicted], [self._as_evicted(b) for b in cold]
        )
        # These loads ended without a copy, because blocks were missing or late.
        for report in self._side.update_from_worker(NOTHING_FINISHED):
            self._given_up.append(report.request_id)
        for job in (*moves.stores, *moves.ahead):
            self._stores[job.job_id] = [host_keys[block_id] for block_id in job.block_ids]
        if moves.loads:
            plan.loads += self._as_told(moves)
        plan.moves = moves
        if self._hand_overs and not self._outgoing.num_coming:
            for request_id, keys in self._hand_overs:
                self._side.handover.hand_over(request_id, keys)
            self._hand_overs = []

    def _as_told(self, moves: ConnectorMetadata) -> list[RequestLoad]:
        """Return the loads whose copies begin now, and whose ends the worker reports to vLLM."""
        owners = {
            block_id: request_id
            for request_id, load in self._loads.items()
            if not load.is_told
            for block_id, _rank in load.keys
        }
        told: dict[str, RequestLoad] = {}
        for job in moves.loads:
            request_id = owners[job.block_ids[0]]
            load = self._loads[request_id]
            if request_id not in told:
                told[request_id] = RequestLoad(request_id)
                if not self._parts.whole_only:
                    told[request_id].missing = load.block_ids[0][len(job.block_ids) :]
            rank = job.part.rank
            keys = [load.keys[block_id, rank] for block_id in job.block_ids]
            proofs = self._slab.proofs(keys)
            digests = [None if proof is None else proof.digest for proof in proofs]
            told[request_id].parts.append(PartLoad(job.job_id, rank, list(job.slots), digests))
            load.job_ids.add(job.job_id)
            self._load_jobs[job.job_id] = _LoadJob(request_id, keys)
        for request_id in told:
            self._loads[request_id].is_told = True
        return list(told.values())

    def _apply_step_report(self, report: StepReport) -> None:
        self._times.ended(report.number)
        for job_id, positions in report.damaged.items():
            self._drop_damaged(job_id, positions)
        output = report.output
        for job_id in output.failed_stores:
            self._stores.pop(job_id, None)
        for job_id in output.finished_stores:
            host_keys = self._stores.pop(job_id, [])
            if self._events is not None:
                self._events.add_stored(
                    host_keys, [self._keys.derive_chunk_key(key) for key in host_keys]
                )
        for job_id in (*output.finished_loads, *output.failed_loads):
            self._load_jobs.pop(job_id, None)
        for ended in self._side.update_from_worker(output):
            # The worker has reported the end of each load that was sent to it.
            load = self._loads.pop(ended.request_id, None)
            if load is not None and not load.is_told:
                self._loads[ended.request_id] = load
                self._given_up.append(ended.request_id)
        if report.error is not None:
            raise RuntimeError(report.error)

    def _drop_damaged(self, job_id: int, positions: Sequence[int]) -> None:
        job = self._load_jobs.get(job_id)
        if job is None:
            return
        log.error("%d blocks were damaged in memory; they are computed", len(positions))
        self.damaged_blocks += len(positions)
        self._side.invalidate_blocks([job.keys[i][:PAGE_KEY_BYTES] for i in positions], "damaged")

    def _finished(self, request: Any) -> dict[str, Any] | None:
        view = self._requests.pop(request.request_id, None)
        self._offers.pop(request.request_id, None)
        self._side.request_finished(request.request_id)
        if view is None or not asks_for(request, "do_remote_decode"):
            return None
        if self._side.wants_all:
            num_blocks = min(
                request.num_computed_tokens // self._block_tokens, len(view.block_hashes)
            )
            keys = self._parts.keys_of(view.block_hashes[:num_blocks])
            needed = [keys[i][:PAGE_KEY_BYTES] for i in self._parts.needed(0, num_blocks)]
            self._hand_overs.append((request.request_id, list(dict.fromkeys(needed))))
        return params_for_decode(request)

    def _reset(self) -> bool:
        self._outgoing.clear()
        self._side.reset()
        return True

    def _read_stats(self) -> dict[str, Any]:
        stats: dict[str, Any] = self._side.stats()
        down = self._side.estimates.tiers_down() if self._side.estimates is not None else []
        if self._adapters.num_refused:
            stats["failures"] = stats["failures"] | {"adapter": self._adapters.num_refused}
        return {**stats, "down": down, "damaged_blocks": self.damaged_blocks}

    # Calls of the pool watch, on vLLM's thread, without the lock

    def _note_cached(self, request: Any, first: int, num_tokens: int) -> None:
        if self._events is not None:
            adapted = self._adapters.adapter_of(request)
            fingerprint = None if adapted is None else adapted.fingerprint
            end = num_tokens // self._block_tokens
            self._safely(
                self._events.add_cached, None, request, self._host_keys, first, end, fingerprint
            )

    def _drop_uncached(self, blocks: Sequence[CachedBlock], may_be_wrong: bool) -> None:
        self._safely(self._forget_uncached, None, blocks, may_be_wrong)

    def _forget_uncached(self, blocks: Sequence[CachedBlock], may_be_wrong: bool) -> None:
        self._outgoing.remove_uncached(blocks)
        uncached = [self._as_evicted(block) for block in blocks]
        self._side.stores_ahead.names_dropped(uncached)
        if may_be_wrong:
            self._side.invalidate_blocks([block.key for block in uncached], "invalid")

    def _as_evicted(self, block: CachedBlock) -> EvictedBlock:
        return EvictedBlock(
            block.block_id, self._keys.derive_chunk_key(block.host_key)[:PAGE_KEY_BYTES]
        )

    def _view(self, request: Any) -> HostRequest:
        view = self._requests.get(request.request_id)
        if view is None:
            view = self._requests[request.request_id] = HostRequest(
                request, self._keys, self._host_keys
            )
        return view

    def _safely(self, call: Callable[..., T], otherwise: T, *args: Any) -> T:
        """Call a function under the lock. Return `otherwise` if this or an earlier call raised."""
        if self.is_broken or self._closed:
            return otherwise
        with self._lock:
            try:
                return call(*args)
            except Exception:
                log.exception(STOPPED)
                self.is_broken = True
                return otherwise

    def _run(self) -> None:
        """Poll the tiers, even while vLLM is idle."""
        while not self._closed:
            self._woken.wait(LOOK_SECONDS)
            self._woken.clear()
            with self._lock:
                if self._closed or self.is_broken:
                    return
                try:
                    self._side.has_pending_work()
                except Exception:
                    log.exception(STOPPED)
                    self.is_broken = True
