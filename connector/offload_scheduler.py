# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of offloading: which blocks go out, which come back, and who waits for them.

    request_queued       what only a disk has is read while the request waits for its turn
    get_matched_tokens   find ──► none, load, overlap or retry; none too where computing is quicker
    begin_load           blocking or overlapped; ready at once, or when a disk has been read
    build_meta           evicted and cold blocks ──► begin_store; ready loads ──► copy jobs
    update_from_worker   end_store, end_load ──► one report for each waiting request

Knows nothing of tensors, devices or files: blocks and slots are numbers here, and where bytes are
kept is the hierarchy's business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

from ..tiers.base import NO_CONTEXT, RequestContext
from ..tiers.cache_server.slab_serving.serving import SlabServing
from .base import KVConnectorScheduler, RequestView
from .connector_context import ConnectorContext
from .costs.calibration import Calibration
from .costs.economics import NOTHING
from .kept_turns import KeptTurns
from .loads import Loads
from .lookups import Lookups
from .messages import (
    NO_MATCH,
    NOTHING_FINISHED,
    NOTHING_TO_MOVE,
    ConnectorMetadata,
    ConnectorWorkerOutput,
    Elsewhere,
    EvictedBlock,
    GroupBlockIds,
    LoadReport,
    Match,
    MatchKind,
)
from .outgoing import Outgoing
from .prefill_decode.hand_overs import HandOvers
from .prefill_decode.prefill_waits import PrefillWaits
from .prefill_decode.wait_limit import End
from .request_offload import RequestOffload, Stage

log = logging.getLogger(__name__)

# For closing what is already written, also when the time for writing is over.
CLOSE_SECONDS = 2.0
FORGET_SECONDS = 5.0  # for a disk to write down that everything was forgotten
_RETRY = Match(0, MatchKind.RETRY)


class OffloadScheduler(KVConnectorScheduler):
    """Decides what moves between the pool and the tiers of `connector`. Takes over the hierarchy.

    `copies_beside`: see `Outgoing`. `serving` ends with it.
    """

    stores_ahead: Outgoing
    prompts_elsewhere: PrefillWaits
    handover: HandOvers
    job_retention: KeptTurns
    overlapped_loads: Loads
    estimates: Calibration

    def __init__(
        self,
        connector: ConnectorContext,
        *,
        copies_beside: bool = True,
        serving: SlabServing | None = None,
    ) -> None:
        self._hierarchy = hierarchy = connector.hierarchy
        self._parts = connector.parts
        self._block_size = connector.parts.block_size
        self._signal = connector.signal
        self._alarm = connector.alarm
        self._economics = connector.economics
        self._links = connector.economics.links
        self._read_times = connector.read_times
        self._counters = connector.counters
        self.requests: dict[str, RequestOffload] = connector.requests
        self._serving = serving
        self._copies: dict[int, tuple[float, int]] = {}  # loads: when they began, bytes
        self.overlapped_loads = self._loads = Loads(connector)
        self._lookups = Lookups(connector, self._loads)
        self.stores_ahead = self._outgoing = Outgoing(connector, copies_beside=copies_beside)
        self.job_retention = self._kept_turns = KeptTurns(connector)
        self.prompts_elsewhere = PrefillWaits(connector)
        self.awaiting_prefill = self.prompts_elsewhere.request_ids
        self.handover = HandOvers(connector)
        self.estimates = self._calibration = Calibration(connector)
        self.wants_all = hierarchy.is_shared
        self._jobs_reported = 0
        self._retry_version: int | None = None  # when RETRY was last answered
        self._retry_due = False
        self._has_begun = False  # something that is to be looked at until it has ended
        self._closed = False

    @property
    def tiers(self) -> list[str]:
        """The names of the tiers, the fastest first."""
        return self._hierarchy.tiers

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._signal.set_wakeup(wakeup)

    def note_ended(self, num_jobs: int) -> None:
        """The worker side has ended so many jobs since its start. From any thread; returns at
        once."""
        self._signal.note_ended(num_jobs)

    def request_queued(self, request: RequestView, context: RequestContext = NO_CONTEXT) -> None:
        self._has_begun = True
        offload = self._offload_of(request.request_id)
        if offload.stage is Stage.FINISHED:  # its name is used again
            offload.stage = Stage.LOADING
        if context is not NO_CONTEXT:
            offload.context = context
        self._lookups.queued(offload, request)

    def request_finished(self, request_id: str) -> None:
        offload = self.requests.get(request_id)
        if offload is None:
            return
        self.prompts_elsewhere.end_wait(offload, End.GONE)
        self._lookups.drop_lookup(offload)
        if offload.load is None:
            del self.requests[request_id]
        else:  # the record ends with the load
            offload.stage = Stage.FINISHED

    def get_matched_tokens(
        self, request: RequestView, num_computed_tokens: int, *, num_queued_tokens: int = 0
    ) -> Match:
        offload = self._offload_of(request.request_id)
        if offload.stage is not Stage.READY:
            return NO_MATCH
        first = num_computed_tokens // self._block_size
        end = self._lookups.end_of(request)
        most = end if offload.most_blocks is None else offload.most_blocks
        lookup = self._lookups.look_up_range(offload, request, first, min(end, most))
        if lookup is None:
            return NO_MATCH
        if most < end:  # it was counted, and decided upon, when the longer hit was found
            lookup.is_counted = lookup.is_decided = True
        if lookup.prefix.asked:  # a store that is far away will soon say what it has
            self._retry_version = self._version
            return _RETRY
        is_elsewhere = offload.elsewhere is not Elsewhere.NO
        if is_elsewhere and self.prompts_elsewhere.begin_wait(offload, request, lookup):
            return _RETRY
        tiers = lookup.prefix.tiers
        plan = NOTHING
        if tiers:
            plan = self._lookups.plan_of(offload, lookup, num_queued_tokens)
            if not plan.num_blocks:
                self._lookups.record_lookup(lookup)
                self._lookups.let_go(offload)
                return NO_MATCH
        # Blocks that another request is loading will be in the pool for this one too.
        if (not tiers and lookup.prefix.pending) or (
            tiers and self._loads.will_bring(self._lookups.needed_keys(lookup, len(tiers))[0])
        ):
            self._retry_version = self._version
            return _RETRY
        self._lookups.record_lookup(lookup)
        if not tiers:
            return NO_MATCH
        num_tokens = plan.num_blocks * self._block_size
        # The last token is computed; the block that it lies in may be loaded all the same.
        num_wanted = request.num_tokens - 1 - num_computed_tokens
        if not plan.compute_blocks or self._parts.is_windowed:
            return Match(min(num_tokens, num_wanted), MatchKind.LOAD)
        if num_tokens > num_wanted:  # the frontiers meet where a block begins
            num_tokens -= self._block_size
        return Match(num_tokens, MatchKind.OVERLAP) if num_tokens else NO_MATCH

    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        if num_tokens == 0:
            return
        self._has_begun = True
        offload = self.requests[request.request_id]
        lookup = self._lookups.taken(offload)
        num_blocks = -(-num_tokens // self._block_size)
        first_token = lookup.first * self._block_size
        keys = self._lookups.needed_keys(lookup, num_blocks, first_token + num_tokens)

        if overlapped:
            compute_blocks = lookup.plan.compute_blocks if lookup.plan else 0
            self._loads.begin_overlapped(offload, first_token, keys, block_ids, compute_blocks)
        else:
            self._loads.begin_blocking(
                offload,
                first_token,
                keys,
                block_ids,
                lookup.num_queued_tokens,
                num_blocks * self._block_size - num_tokens,
            )
        self._lookups.drop_lookup(offload)

    def invalidate_blocks(self, keys: Sequence[bytes], cause: str) -> None:
        named = [key + shard for key in keys for shard in self._parts.shards]
        log.warning("%d blocks are forgotten in every tier (%s)", len(named), cause)
        self._counters.count_dropped(cause, len(named))
        self._hierarchy.forget_blocks(named)
        self._loads.spoil(set(named))

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        self._retry_due = False
        self._poll_tiers()
        is_due = self._outgoing.has_due or self._loads.has_due
        if not (evicted or cold or is_due):
            return NOTHING_TO_MOVE
        meta = ConnectorMetadata()
        self._outgoing.plan_stores(evicted, cold, meta)
        self._loads.copy_ready(meta)
        if meta.loads:
            now = time.monotonic()
            for job in meta.loads:
                self._copies[job.job_id] = now, len(job.slots) * self._hierarchy.block_bytes
        if meta:
            self._signal.jobs_given(len(meta.stores) + len(meta.ahead) + len(meta.loads))
        return meta

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        if output is not NOTHING_FINISHED:
            self._handle_worker_output(output)
        return self._loads.take_reports()

    def has_pending_work(self) -> bool:
        self._poll_tiers()
        return (
            self._retry_due
            or self._loads.has_due
            or self.handover.has_ended
            or self._signal.ended > self._jobs_reported
        )

    def reset(self) -> None:
        self._forget_answers()
        self._hierarchy.clear()
        for store in self._hierarchy.stores:
            if not store.wait_forgotten(FORGET_SECONDS):
                log.warning("what was forgotten may come back from the %s tier", store.name)

    def stats(self) -> dict[str, object]:
        """`tiers`: counters of each tier by name, the fastest first; `traffic`: those of what moved
        between the slab and each store; the rest as in `OffloadCounters`, and what is in flight
        now, in requests and jobs."""
        result: dict[str, object] = asdict(self._counters)
        result["tiers"] = {name: asdict(s) for name, s in self._hierarchy.stats().items()}
        result["traffic"] = {name: asdict(t) for name, t in self._hierarchy.traffic().items()}
        result["estimates"] = self._economics.stats()
        result["declined_tokens"] = dict(self._economics.declined_tokens)
        result["probes"] = self._economics.probes
        result["followed"] = self.prompts_elsewhere.follows.num_followed
        result["kept_turns"] = len(self._kept_turns)
        result["turns_kept"] = self._kept_turns.num_kept
        result["blocks_read_ahead_of_turns"] = self._kept_turns.blocks_read_ahead
        result["awaiting_prefill"] = len(self.awaiting_prefill)
        result["serving"] = None if self._serving is None else self._serving.stats()
        result["loads_in_flight"] = len(self._loads)
        result["stores_in_flight"] = len(self._outgoing)
        return result

    def shutdown(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._signal.set_wakeup(None)  # the engine's loop is over
        self._alarm.close()
        self._forget_answers()
        # Closing what was written has time of its own, within the limit where possible.
        deadline = time.monotonic() + max(timeout_seconds, CLOSE_SECONDS)
        flush_seconds = timeout_seconds - CLOSE_SECONDS
        if not self._signal.wait_idle(flush_seconds):
            log.error("copies are still running %.1f s after the shutdown began", flush_seconds)
        is_flushed = self._hierarchy.flush(deadline - CLOSE_SECONDS - time.monotonic())
        if not is_flushed:
            log.warning("not every block could be written down in time; those are lost")
        if self._serving is not None:
            self._serving.close(CLOSE_SECONDS)
        left = deadline - time.monotonic()
        # A store that takes nothing does not close any faster for being waited for.
        if not self._hierarchy.close(left if is_flushed else min(left, CLOSE_SECONDS)):
            log.error("a tier still uses memory that it should have given back")

    def _offload_of(self, request_id: str) -> RequestOffload:
        """The record of a request, which begins here if there is none."""
        offload = self.requests.get(request_id)
        if offload is None:
            offload = self.requests[request_id] = RequestOffload(request_id)
        return offload

    def _forget_answers(self) -> None:
        """Forget what the tiers had, for requests and jobs, and let go of what was read ahead."""
        for offload in self.requests.values():
            self._lookups.drop_lookup(offload)
        self.prompts_elsewhere.clear()
        self._kept_turns.clear()

    @property
    def _version(self) -> int:
        """Changes with everything that an answer to the scheduler depends on."""
        return self._hierarchy.version + self._loads.num_ended

    def _poll_tiers(self) -> None:
        """Take in what the tiers have finished."""
        self._hierarchy.poll()
        # Most steps find nothing that anybody waits for, and the code of all of these is cold.
        if self._has_begun or self.handover or self.prompts_elsewhere or self._kept_turns:
            self._read_times.record_ended_loads()
            self._loads.poll_reads()
            self._kept_turns.poll_turns()
            self.handover.poll_hand_overs()
            if self.prompts_elsewhere.poll_waits():
                self._retry_due = True
            if self._lookups.num_asked:
                self._lookups.answered()
            self._has_begun = bool(self._read_times or self._loads or self._lookups.num_asked)
        if self._retry_version is not None and self._retry_version != self._version:
            self._retry_version = None
            self._retry_due = True

    def _handle_worker_output(self, output: ConnectorWorkerOutput) -> None:
        """Take in what the worker has finished."""
        self._signal.catch_up(output.num_ended)
        self._jobs_reported += self._calibration.pop_calibration_job(output)
        self._counters.count_costs(output)
        if output.finished_loads or output.failed_loads:
            self._note_copies(output)
        for ids, ok in ((output.finished_stores, True), (output.failed_stores, False)):
            for job_id in ids:
                self._jobs_reported += 1
                self._outgoing.complete_job(job_id, ok, output.store_digests.get(job_id))
        for ids, ok in ((output.finished_loads, True), (output.failed_loads, False)):
            for job_id in ids:
                self._jobs_reported += 1
                self._loads.end_copy(job_id, ok)

    def _note_copies(self, output: ConnectorWorkerOutput) -> None:
        """Copies run one after the other; when exactly they ended nobody looked."""
        ended = [self._copies.pop(i) for i in (*output.finished_loads, *output.failed_loads)]
        if not output.failed_loads:
            num_bytes = sum(size for _, size in ended)
            waited = time.monotonic() - min(began for began, _ in ended)
            self._links[self._hierarchy.tiers[0]].record_transfer(
                num_bytes, output.load_copy_seconds, max(waited, output.load_copy_seconds)
            )
