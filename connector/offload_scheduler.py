# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of offloading: decides which blocks are stored in and loaded from the tiers.

    request_queued       blocks that only a store has are read while the request waits to run
    get_matched_tokens   find ──► none, load, overlap or retry; none also if computing is quicker
    begin_load           blocking or overlapped; ready at once, or when a store has been read
    build_meta           evicted and cold blocks ──► begin_store; ready loads ──► copy jobs
    update_from_worker   end_store, end_load ──► one report for each waiting request

This module handles no tensors, devices or files. Blocks and slots are numbers; the `Hierarchy`
records where the bytes of a block are."""

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
)
from .outgoing import Outgoing
from .prefill_decode.hand_overs import HandOvers
from .prefill_decode.prefill_waits import PrefillWaits
from .prefill_decode.wait_limit import End
from .request_offload import RequestOffload, Stage

log = logging.getLogger(__name__)

# The time to close the stores, even if writing blocks took all of the shutdown's time.
CLOSE_SECONDS = 2.0
FORGET_SECONDS = 5.0  # how long a disk may take to record that all its blocks were dropped


class OffloadScheduler(KVConnectorScheduler):
    """Decides which blocks move between the pool and the tiers of `context`. `shutdown` closes the
    hierarchy and `serving`."""

    stores_ahead: Outgoing
    prompts_elsewhere: PrefillWaits
    handover: HandOvers
    job_retention: KeptTurns
    overlapped_loads: Loads
    estimates: Calibration

    def __init__(self, context: ConnectorContext, *, serving: SlabServing | None = None) -> None:
        self._hierarchy = hierarchy = context.hierarchy
        self._shards = context.parts.shards
        self._signal = context.signal
        self._alarm = context.alarm
        self._economics = context.economics
        self._read_times = context.read_times
        self._counters = context.counters
        # The worker side calls `note_ended`, from any thread, with its number of ended jobs.
        self.note_ended = context.signal.note_ended
        self.requests: dict[str, RequestOffload] = context.requests
        self._serving = serving
        self.overlapped_loads = self._loads = Loads(context)
        self.prompts_elsewhere = PrefillWaits(context)
        self._lookups = Lookups(context, self._loads, self.prompts_elsewhere)
        self.stores_ahead = self._outgoing = Outgoing(context)
        self.job_retention = self._kept_turns = KeptTurns(context)
        self.awaiting_prefill = self.prompts_elsewhere.waiting.keys()
        self.handover = HandOvers(context)
        self.estimates = self._calibration = Calibration(context)
        self.wants_all = hierarchy.is_shared
        self._jobs_reported = 0
        self._retry_due = False
        self._closed = False

    @property
    def tiers(self) -> list[str]:
        """The names of the tiers, the fastest first."""
        return self._hierarchy.tiers

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._signal.set_wakeup(wakeup)

    def request_queued(self, request: RequestView, context: RequestContext = NO_CONTEXT) -> None:
        offload = self._offload_of(request.request_id)
        if offload.stage is Stage.FINISHED:  # a new request has the same id
            offload.stage = Stage.LOADING
            offload.most_blocks = None
        offload.context = context
        self._lookups.queued(offload, request)

    def request_finished(self, request_id: str) -> None:
        offload = self.requests.get(request_id)
        if offload is None:
            return
        if offload.wait is not None:
            self.prompts_elsewhere.end_wait(offload, End.GONE)
        self._lookups.drop_lookup(offload)
        if offload.load is None:
            del self.requests[request_id]
        else:  # the end of the load deletes the record
            offload.stage = Stage.FINISHED
            offload.elsewhere = Elsewhere.NO

    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        offload = self._offload_of(request.request_id)
        if offload.stage is not Stage.READY:
            return NO_MATCH
        return self._lookups.match_prefix(
            offload, request, num_computed_tokens, num_queued_tokens, num_pool_tokens
        )

    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        if num_tokens:
            offload = self.requests[request.request_id]
            self._lookups.begin_load(offload, block_ids, num_tokens, overlapped=overlapped)

    def invalidate_blocks(self, keys: Sequence[bytes], cause: str) -> None:
        tier_keys = [key + shard for key in keys for shard in self._shards]
        log.warning("%d blocks are forgotten in every tier (%s)", len(tier_keys), cause)
        self._counters.count_dropped(cause, len(tier_keys))
        self._hierarchy.forget_blocks(tier_keys)
        self._loads.spoil(set(tier_keys))

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        self._retry_due = False
        is_due = self._poll_tiers()
        if not (evicted or cold or is_due or self._outgoing.overtaken):
            return NOTHING_TO_MOVE
        meta = ConnectorMetadata()
        self._outgoing.plan_stores(evicted, cold, meta)
        self._loads.copy_ready(meta)
        if num_jobs := len(meta.stores) + len(meta.ahead) + len(meta.loads):
            self._signal.jobs_given(num_jobs)
        return meta

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        if output is not NOTHING_FINISHED:
            self._handle_worker_output(output)
        return self._loads.take_reports(output)

    def has_pending_work(self) -> bool:
        is_due = self._poll_tiers()
        return bool(
            is_due
            or self._retry_due
            or self.handover.ended
            or self._signal.ended > self._jobs_reported
        )

    def reset(self) -> None:
        self._forget_answers()
        self._hierarchy.clear()
        for store in self._hierarchy.stores:
            if not store.wait_forgotten(FORGET_SECONDS):
                log.warning("blocks that were dropped may come back from the %s tier", store.name)

    def stats(self) -> dict[str, object]:
        """`tiers`: counters of each tier by name, the fastest first; `traffic`: counters of
        transfers between the slab and each store; the fields of `OffloadCounters`; and counts of
        requests and jobs in flight now."""
        result: dict[str, object] = asdict(self._counters)
        result["tiers"] = {name: asdict(s) for name, s in self._hierarchy.stats().items()}
        result["traffic"] = {name: asdict(t) for name, t in self._hierarchy.traffic().items()}
        result["estimates"] = self._economics.stats()
        result["declined_tokens"] = dict(self._economics.declined_tokens)
        result["probes"] = self._economics.probes
        result["followed"] = self.prompts_elsewhere.follows.num_followed
        result["kept_turns"] = len(self._kept_turns.turns)
        result["turns_kept"] = self._kept_turns.num_kept
        result["blocks_read_ahead_of_turns"] = self._kept_turns.blocks_read_ahead
        result["awaiting_prefill"] = len(self.awaiting_prefill)
        result["serving"] = None if self._serving is None else self._serving.stats()
        result["loads_in_flight"] = len(self._loads.under_way)
        result["stores_in_flight"] = len(self._outgoing)
        return result

    def shutdown(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._signal.set_wakeup(None)  # the engine's step loop has ended
        self._alarm.close()
        self._forget_answers()
        # Closing the stores gets CLOSE_SECONDS, within `timeout_seconds` if possible.
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
        # A store that failed to write in time has at most CLOSE_SECONDS to close.
        if not self._hierarchy.close(left if is_flushed else min(left, CLOSE_SECONDS)):
            log.error("a tier still uses memory that it should have given back")

    def _offload_of(self, request_id: str) -> RequestOffload:
        """Return the record of a request, created at the first call."""
        offload = self.requests.get(request_id)
        if offload is None:
            offload = self.requests[request_id] = RequestOffload(request_id)
        return offload

    def _forget_answers(self) -> None:
        """End all look-ups, reads ahead, waits for other engines and kept turns."""
        for offload in self.requests.values():
            self._lookups.drop_lookup(offload)
        self.prompts_elsewhere.clear()
        self._kept_turns.clear()

    def _poll_tiers(self) -> bool:
        """Process finished transfers of the tiers. Return whether a load can be copied or ended."""
        self._hierarchy.poll()
        # Most steps have no such work; the checks avoid calls of code outside the CPU's cache.
        if self._read_times.watched:
            self._read_times.record_ended_loads()
        if self._loads.under_way or self._loads.ready:
            self._loads.poll_reads()
        if self._kept_turns.turns:
            self._kept_turns.poll_turns()
        if self.handover.moving:
            self.handover.poll_hand_overs()
        waits, lookups = self.prompts_elsewhere, self._lookups
        if (waits.waiting or waits.follows.prompts) and waits.poll_waits():
            self._retry_due = True
        if (lookups.unanswered or lookups.retry_version is not None) and lookups.poll_answers():
            self._retry_due = True
        return self._loads.has_due

    def _handle_worker_output(self, output: ConnectorWorkerOutput) -> None:
        """Process the stores that the worker has finished, its timings, and calibration jobs."""
        if output.num_ended > self._signal.ended:  # rare: `note_ended` usually comes first
            self._signal.catch_up(output.num_ended)
        if self._calibration.job is not None:
            self._jobs_reported += self._calibration.pop_calibration_job(output)
        counters = self._counters
        counters.load_copy_seconds += output.load_copy_seconds
        counters.store_copy_seconds += output.store_copy_seconds
        counters.store_wait_seconds += output.store_wait_seconds
        self._jobs_reported += len(output.finished_loads) + len(output.failed_loads)
        for ids, ok in ((output.finished_stores, True), (output.failed_stores, False)):
            self._jobs_reported += len(ids)
            for job_id in ids:
                self._outgoing.complete_job(job_id, ok, output.store_digests.get(job_id))
