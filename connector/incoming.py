# SPDX-License-Identifier: Apache-2.0
"""Blocks on their way from the tiers to the pool, and the requests that are parked for them.

begin ──► reading (a store answers) ──► ready ──► copying ──► report
             ├─ nothing of it came ────────────────────────────┤
             └─ given up, since computing is quicker by now ───┘ (with what had come)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.hierarchy.promotions import LoadTicket
from .base import ConnectorMetadata, CopyJob, LoadReport
from .counters import OffloadCounters
from .rates import ReadTimes
from .transfer import JobIds

COPY_FAULT = "a copy from the cpu tier to the KV pool failed"
SPOILT = "dropped"  # the tiers were told to forget blocks of a load that was under way


@dataclass(slots=True)
class Load:
    """One parked request."""

    request_id: str
    block_ids: list[int]
    ticket: LoadTicket
    started: float
    give_up_at: float | None = None  # on the monotonic clock
    num_whole: int = 0  # leading blocks that are there to be copied
    is_spoilt: bool = False  # what it brings may be wrong


def fault_of(ticket: LoadTicket) -> str | None:
    """What went wrong with a load that has ended, in words; None where all that was begun came."""
    if ticket.fault is None:
        return None
    missing = [i for i, slot in enumerate(ticket.slots[: ticket.begun]) if slot is None]
    tiers = " and ".join(sorted({ticket.tiers[i] for i in missing}))
    return f"{len(missing)} of {ticket.begun} blocks did not come from {tiers} ({ticket.fault})"


class Incoming:
    """Parked requests and their loads."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        block_size: int,
        counters: OffloadCounters,
        job_ids: JobIds,
        read_times: ReadTimes,
    ) -> None:
        self._hierarchy = hierarchy
        self._block_size = block_size
        self._counters = counters
        self._job_ids = job_ids
        self._read_times = read_times
        self._parked: dict[str, Load] = {}
        self._reading: list[Load] = []
        self._ready: list[Load] = []
        self._copying: dict[int, Load] = {}
        self._reports: list[LoadReport] = []
        self._coming: dict[bytes, int] = {}  # keys on their way to the pool, and for how many
        self.num_ended = 0

    def __len__(self) -> int:
        """Parked requests."""
        return len(self._parked)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._parked

    @property
    def has_due(self) -> bool:
        """Whether a step would have something to copy or to report."""
        return bool(self._ready or self._reports)

    def brings(self, key: bytes) -> bool:
        """Whether a block is on its way to the pool."""
        return key in self._coming

    def begin(
        self,
        request_id: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        origins: Mapping[bytes, str],
        max_wait_seconds: Callable[[int], float | None],
    ) -> float | None:
        """Park a request until its blocks are there. `origins`: where blocks came from that were
        read ahead for it and now are in the slab. `max_wait_seconds`: how many seconds to wait at
        most, given the first block that is not there yet. When the load is given up, if ever."""
        ticket = self._hierarchy.begin_load(keys)
        self._read_times.watch(ticket)
        if origins:
            ticket.tiers = [origins.get(k, t) for k, t in zip(keys, ticket.tiers, strict=True)]
        load = Load(request_id, list(block_ids), ticket, time.monotonic())
        self._parked[request_id] = load
        for key in keys:
            self._coming[key] = self._coming.get(key, 0) + 1
        if ticket.done():
            self._ready.append(load)
        else:
            self._reading.append(load)
            seconds = max_wait_seconds(ticket.slots.index(None))
            load.give_up_at = None if seconds is None else load.started + seconds
        return load.give_up_at

    def collect(self) -> None:
        """Look which reads have ended, or have taken too long."""
        if self._reading:
            now = time.monotonic()
            reading, self._reading = self._reading, []
            for load in reading:
                late = load.give_up_at is not None and load.give_up_at <= now
                (self._ready if late or load.ticket.done() else self._reading).append(load)

    def copy_ready(self, meta: ConnectorMetadata) -> None:
        """Have what has been read copied to the pool."""
        ready, self._ready = self._ready, []
        for load in ready:
            self._begin_copy(load, meta)

    def end_copy(self, job_id: int, ok: bool) -> None:
        """A copy has ended, well or not."""
        load = self._copying.pop(job_id)
        self._end(load, SPOILT if load.is_spoilt else None if ok else "load_copy")

    def spoil(self, keys: AbstractSet[bytes]) -> None:
        """Nothing that loads with one of these keys bring is to be used."""
        for load in self._parked.values():
            load.is_spoilt |= not keys.isdisjoint(load.ticket.keys)

    def take_reports(self) -> list[LoadReport]:
        """The requests that may go on."""
        reports, self._reports = self._reports, []
        return reports

    def _begin_copy(self, load: Load, meta: ConnectorMetadata) -> None:
        """Have the leading whole part of a load copied, or report that there is none."""
        slots: list[int] = []
        for slot in load.ticket.slots:
            if slot is None:
                break
            slots.append(slot)
        load.num_whole = len(slots)
        if load.is_spoilt:
            self._end(load, SPOILT)
            return
        if not slots:
            self._end(load, "unavailable" if load.ticket.done() else "slow")
            return
        job = CopyJob(self._job_ids.next(), load.block_ids[: len(slots)], slots)
        self._copying[job.job_id] = load
        meta.loads.append(job)

    def _end(self, load: Load, failure: str | None) -> None:
        """Give back the pins and report the request. `failure`: nothing of it was loaded."""
        ticket = load.ticket
        is_late = not ticket.done()
        self._read_times.let_go(ticket)
        del self._parked[load.request_id]
        self.num_ended += 1
        for key in ticket.keys:
            self._coming[key] -= 1
            if not self._coming[key]:
                del self._coming[key]
        num_blocks = 0 if failure else load.num_whole
        if num_blocks:
            self._counters.count_load_copy(num_blocks * self._hierarchy.block_bytes)
        if num_blocks < len(load.block_ids):
            self._counters.count_failure(failure or ("slow" if is_late else "partial"))
        by_tier = {
            tier: count * self._block_size
            for tier, count in Counter(ticket.tiers[:num_blocks]).items()
        }
        report = LoadReport(
            load.request_id,
            num_blocks * self._block_size,
            by_tier,
            time.monotonic() - load.started,
            is_whole=num_blocks == len(load.block_ids),
            # Given up while it was late, it has not failed.
            failure=COPY_FAULT if failure == "load_copy" else None if is_late else fault_of(ticket),
        )
        self._counters.count_load(report)
        self._reports.append(report)
