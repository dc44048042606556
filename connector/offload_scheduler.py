# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of offloading: which blocks go out, which come back, and who waits for them.

    get_matched_tokens   find ──► none, load or retry
    update_after_alloc   begin_load ──► parked; ready at once, or when a disk has been read
    build_meta           evicted blocks ──► begin_store; ready loads ──► copy jobs
    update_from_worker   end_store, end_load ──► one report for each parked request

Knows nothing of tensors, devices or files: blocks and slots are numbers here, and where bytes are
kept is the hierarchy's business.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TypeVar

from ..tiers.block import key_suffix
from ..tiers.hierarchy import Hierarchy
from ..tiers.read_up import LoadTicket
from ..tiers.tickets import Prefix, StoreTicket
from .base import (
    ConnectorMetadata,
    ConnectorWorkerOutput,
    CopyJob,
    EvictedBlock,
    KVConnectorScheduler,
    LoadReport,
    Match,
    MatchKind,
    RequestView,
)
from .counters import OffloadCounters
from .transfer import CopySignal

log = logging.getLogger(__name__)

T = TypeVar("T")

# Failed requests remembered; far above what waits at one time.
REMEMBERED_FAILURES = 4096
# Look-ups remembered. One of a long context holds the keys of thousands of blocks, and a step asks
# for few requests again: the first that waits, and those that were told to.
REMEMBERED_LOOKUPS = 256
# For closing what is already written, also when the time for writing is over.
CLOSE_SECONDS = 2.0
_GROUP_BYTES = 2
_NO_MATCH = Match(0, MatchKind.NONE)
_RETRY = Match(0, MatchKind.RETRY)


@dataclass(slots=True)
class _Lookup:
    """What `find` said of the blocks `first` to `first + len(keys)` of a request."""

    first: int
    keys: list[bytes]
    prefix: Prefix
    version: int
    is_counted: bool


@dataclass(slots=True)
class _Load:
    """One parked request."""

    request_id: str
    block_ids: list[int]
    ticket: LoadTicket
    started: float
    num_whole: int = 0  # leading blocks that are there to be copied


class OffloadScheduler(KVConnectorScheduler):
    """Decides what moves between the pool and `hierarchy`. Takes over the hierarchy."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        block_size: int,
        signal: CopySignal,
        *,
        shard_rank: int = 0,
        shard_count: int = 1,
    ) -> None:
        self._hierarchy = hierarchy
        self._block_size = block_size
        self._signal = signal
        self._suffix = key_suffix(0, shard_rank, shard_count)
        self._shard = self._suffix[_GROUP_BYTES:]  # the pool's keys carry the group already
        self._lookups: OrderedDict[str, _Lookup] = OrderedDict()
        self._failed: OrderedDict[str, None] = OrderedDict()
        self._parked: set[str] = set()
        self._reading: list[_Load] = []
        self._ready: list[_Load] = []
        self._loads: dict[int, _Load] = {}
        self._stores: dict[int, StoreTicket] = {}
        self._reports: list[LoadReport] = []
        self._next_job_id = 0
        self._jobs_reported = 0
        self._retry_version: int | None = None  # of the tiers, when RETRY was last answered
        self._retry_due = False
        self._seen_version = hierarchy.version
        self._closed = False
        self._counters = OffloadCounters()

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self._signal.set_wakeup(wakeup)

    def get_matched_tokens(self, request: RequestView, num_computed_tokens: int) -> Match:
        request_id = request.request_id
        if request_id in self._failed or request_id in self._parked:
            return _NO_MATCH
        first = num_computed_tokens // self._block_size
        # One token is always left to compute, so that there are logits to sample from.
        end = min((request.num_tokens - 1) // self._block_size, len(request.block_hashes))
        if end <= first:
            return _NO_MATCH
        prefix = self._look_up(request, first, end).prefix
        if prefix.tiers:
            return Match(len(prefix.tiers) * self._block_size, MatchKind.LOAD)
        if prefix.pending:
            self._retry_version = self._hierarchy.version
            return _RETRY
        return _NO_MATCH

    def update_after_alloc(
        self, request: RequestView, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        if num_external_tokens == 0:
            return
        request_id = request.request_id
        lookup = self._lookups.pop(request_id, None)
        self._parked.add(request_id)
        keys = [] if lookup is None else lookup.keys[: num_external_tokens // self._block_size]
        ticket = self._hierarchy.begin_load(keys)
        load = _Load(request_id, list(block_ids), ticket, time.monotonic())
        (self._ready if ticket.done() else self._reading).append(load)

    def build_meta(self, evicted: Sequence[EvictedBlock]) -> ConnectorMetadata:
        self._retry_due = False
        self._collect()
        meta = ConnectorMetadata()
        if evicted:
            self._begin_stores(evicted, meta)
        if self._ready:
            ready, self._ready = self._ready, []
            for load in ready:
                self._begin_copy(load, meta)
        if meta:
            self._signal.jobs_given(len(meta.stores) + len(meta.loads))
        return meta

    def build_final_meta(self, resident: Sequence[EvictedBlock]) -> ConnectorMetadata:
        return self.build_meta(resident)

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        self._counters.count_costs(output)
        if output:
            for ids, ok in ((output.finished_stores, True), (output.failed_stores, False)):
                for job_id in ids:
                    self._end_store(job_id, ok)
            for ids, ok in ((output.finished_loads, True), (output.failed_loads, False)):
                for job_id in ids:
                    self._jobs_reported += 1
                    self._end_load(self._loads.pop(job_id), None if ok else "load_copy")
        reports, self._reports = self._reports, []
        return reports

    def has_pending_work(self) -> bool:
        self._collect()
        return (
            self._retry_due
            or bool(self._ready or self._reports)
            or self._signal.ended > self._jobs_reported
        )

    def reset(self) -> None:
        self._lookups.clear()
        self._hierarchy.clear()

    def stats(self) -> dict[str, object]:
        """`tiers`: counters of each tier by name, the fastest first; `traffic`: those of what moved
        between the slab and each store; the rest as in `OffloadCounters`, and what is in flight
        now, in requests and jobs."""
        result: dict[str, object] = asdict(self._counters)
        result["tiers"] = {name: asdict(s) for name, s in self._hierarchy.stats().items()}
        result["traffic"] = {name: asdict(t) for name, t in self._hierarchy.traffic().items()}
        result["loads_in_flight"] = len(self._parked)
        result["stores_in_flight"] = len(self._stores)
        return result

    def shutdown(self, timeout_seconds: float) -> None:
        if self._closed:
            return
        self._closed = True
        self._signal.set_wakeup(None)  # the engine's loop is over
        deadline = time.monotonic() + timeout_seconds
        if not self._signal.wait_idle(timeout_seconds):
            log.error("copies are still running %s s after the shutdown began", timeout_seconds)
        if not self._hierarchy.flush(deadline - time.monotonic()):
            log.warning("the time was too short to write every block down; those are lost")
        if not self._hierarchy.close(max(CLOSE_SECONDS, deadline - time.monotonic())):
            log.error("a tier still uses memory that it should have given back")

    def _look_up(self, request: RequestView, first: int, end: int) -> _Lookup:
        """`find` for these blocks of the request, or what it said if nothing changed since."""
        version = self._hierarchy.version
        digests = request.block_hashes
        known = self._lookups.get(request.request_id)
        # The last digest stands for the whole chain, also where an id is used again.
        if (
            known is None
            or known.first != first
            or known.keys[-1] != digests[end - 1] + self._suffix
        ):
            keys = [digest + self._suffix for digest in digests[first:end]]
        elif known.version == version:
            return known
        else:
            keys = known.keys
        prefix = self._hierarchy.find(keys)
        is_counted = known is not None and known.keys is keys and known.is_counted
        if not is_counted and (prefix.tiers or not prefix.pending):
            self._counters.count_lookup(self._hierarchy.tiers, prefix.tiers, len(keys))
            is_counted = True
        lookup = _Lookup(first, keys, prefix, version, is_counted)
        _remember(self._lookups, request.request_id, lookup, REMEMBERED_LOOKUPS)
        return lookup

    def _collect(self) -> None:
        """Take in what the tiers have finished."""
        self._hierarchy.poll()
        version = self._hierarchy.version
        if version == self._seen_version:
            return
        self._seen_version = version
        if self._retry_version not in (None, version):
            self._retry_version = None
            self._retry_due = True
        if self._reading:
            self._ready += [load for load in self._reading if load.ticket.done()]
            self._reading = [load for load in self._reading if not load.ticket.done()]

    def _begin_stores(self, evicted: Sequence[EvictedBlock], meta: ConnectorMetadata) -> None:
        # A pool evicts the tail of a chain first, tiers are told of the head first. Two blocks may
        # have one key; their bytes are the same.
        blocks = {block.key + self._shard: block.block_id for block in reversed(evicted)}
        ticket = self._hierarchy.begin_store(list(blocks))
        self._counters.allocation_failures += bool(ticket.num_refused)
        if ticket.keys:
            job = self._job([blocks[key] for key in ticket.keys], ticket.slots)
            self._stores[job.job_id] = ticket
            meta.stores.append(job)

    def _begin_copy(self, load: _Load, meta: ConnectorMetadata) -> None:
        """Have the leading whole part of a load copied, or report that there is none."""
        slots: list[int] = []
        for slot in load.ticket.slots:
            if slot is None:
                break
            slots.append(slot)
        load.num_whole = len(slots)
        if not slots:
            self._end_load(load, "unavailable")
            return
        job = self._job(load.block_ids[: len(slots)], slots)
        self._loads[job.job_id] = load
        meta.loads.append(job)

    def _job(self, block_ids: list[int], slots: list[int]) -> CopyJob:
        self._next_job_id += 1
        return CopyJob(self._next_job_id, block_ids, slots)

    def _end_store(self, job_id: int, ok: bool) -> None:
        ticket = self._stores.pop(job_id)
        self._jobs_reported += 1
        self._hierarchy.end_store(ticket, ok)
        if ok:
            num_blocks = len(ticket.keys)
            self._counters.count_store(num_blocks, num_blocks * self._hierarchy.block_bytes)
        else:
            self._counters.count_failure("store_copy")

    def _end_load(self, load: _Load, failure: str | None) -> None:
        """Give back the pins and report the request. `failure`: nothing of it was loaded."""
        self._hierarchy.end_load(load.ticket)
        self._parked.discard(load.request_id)
        num_blocks = 0 if failure else load.num_whole
        if num_blocks:
            self._counters.count_load_copy(num_blocks * self._hierarchy.block_bytes)
        if num_blocks < len(load.block_ids):
            _remember(self._failed, load.request_id, None, REMEMBERED_FAILURES)
            self._counters.count_failure(failure or "partial")
        by_tier = {
            tier: count * self._block_size
            for tier, count in Counter(load.ticket.tiers[:num_blocks]).items()
        }
        report = LoadReport(
            load.request_id,
            num_blocks * self._block_size,
            by_tier,
            time.monotonic() - load.started,
        )
        self._counters.count_load(report)
        self._reports.append(report)


def _remember(memory: OrderedDict[str, T], request_id: str, value: T, most: int) -> None:
    """Keep the newest `most`, forget the oldest."""
    memory[request_id] = value
    memory.move_to_end(request_id)
    if len(memory) > most:
        memory.popitem(last=False)
