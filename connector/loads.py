# SPDX-License-Identifier: Apache-2.0
"""Loads blocks from the tiers to the pool, for requests that wait or compute meanwhile.

    load ──► pieces: reading (a store answers) ──► copying to the pool ──► landed ──► report

A *blocking* load is a single piece. The request waits for a `LoadReport`, which counts the leading
blocks that were loaded. The load ends early, perhaps without blocks, if computing is quicker.

An *overlapped* load brings pieces from the back while its request computes from the front:

    | computed, or soon | untouched    | read into the slab | copied to the pool | loaded |
      compute frontier ──►                                   ◄── load frontier

Only copies write to the request's blocks, so the request waits only at blocks that are being
copied. If a piece is still being read when the compute frontier reaches the piece, the load drops
the piece, and the request computes it. The loaded part has no gaps and reaches to the end: after a
failed piece no piece is loaded, and the request computes all blocks before the loaded part.

Blocks are counted by position in the request. A position has one block or more (`parts.py`), and is
loaded when all its needed blocks are loaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple, cast

from ..tiers.hierarchy.promotions import LoadTicket
from .base import OverlappedLoads
from .connector_context import ConnectorContext
from .costs.economics import OVERLAP_PARTS, PIECES_AT_ONCE
from .messages import (
    ConnectorMetadata,
    ConnectorWorkerOutput,
    CopyJob,
    GroupBlockIds,
    LoadReport,
    LoadState,
)
from .parts import whole_positions
from .request_offload import Load, Piece, RequestOffload, Stage

COPY_FAULT = "a copy from the cpu tier to the KV pool failed"
SPOILT = "dropped"  # the reason of a load whose blocks were invalidated


class Loads(OverlappedLoads):
    """The loads of one connector. `RequestOffload.load` is a single request's load."""

    def __init__(self, context: ConnectorContext) -> None:
        self._hierarchy = context.hierarchy
        self._counters = context.counters
        self._job_ids = context.job_ids
        self._read_times = context.read_times
        self._economics = context.economics
        self._alarm = context.alarm
        self._requests = context.requests
        self._parts = parts = context.parts
        self._block_size = parts.block_size
        self._num_parts = parts.width
        self._slab_link = context.economics.links[context.hierarchy.tiers[0]]
        self.under_way: list[Load] = []  # read only
        self._copies: dict[int, _Copy] = {}  # by job id
        self.ready: list[Load] = []  # loads that the next step copies; read only
        self._reports: list[LoadReport] = []
        # Key → number of blocking loads of the block, which other requests can await in the pool.
        self.coming: dict[bytes, int] = {}
        self._has_news = False  # whether an overlapped load changed since the last `copy_ready`
        self.num_ended = 0  # blocking loads that ended

    @property
    def has_due(self) -> bool:
        """Whether a step would have something to copy, to compute or to report."""
        return bool(self._has_news or self._reports or self.ready)

    def num_sharing(self, offload: RequestOffload) -> int:
        """Return how many requests, including the request of `offload`, would share the engine if
        its load was overlapped; 0 if a request without a load computes now or soon."""
        loads = [load for load in self.under_way if load.offload.stage is not Stage.FINISHED]
        # A load under way keeps the record of its request, even if the request has ended.
        num_alive = len(self._requests) - (len(self.under_way) - len(loads))
        num_others = num_alive - 1
        if not num_others:
            return 1
        if offload.load is not None or len(loads) < num_others:
            return 0
        return 1 + sum(load.is_overlapped for load in loads)

    def begin_blocking(
        self,
        offload: RequestOffload,
        first_token: int,
        keys: Sequence[bytes],
        block_ids: GroupBlockIds,
        num_queued_tokens: int,
        num_short_tokens: int = 0,
        num_kept: int = 0,
    ) -> None:
        """Begin a load for which its request waits, at most as long as computing would take, after
        `num_queued_tokens` of other requests. The last `num_short_tokens` of the last position do
        not count as loaded. `num_kept`: see `Parts.needed`."""
        num_blocks = len(block_ids[0])
        load = Load(
            offload,
            first_token,
            list(keys),
            block_ids,
            num_blocks,
            time.monotonic(),
            load_frontier=num_blocks,
            next_end=0,
            num_short_tokens=num_short_tokens,
            needed=[
                *self._parts.needed(
                    first_token // self._block_size,
                    num_blocks,
                    first_token + num_blocks * self._block_size - num_short_tokens,
                    num_kept,
                ),
                # The states belong to the last position.
                *[(num_blocks - 1) * self._num_parts] * self._parts.num_state_keys,
            ],
        )
        ticket = self._begin_read(load, 0, num_blocks)
        if (ahead := offload.read_ahead) is not None:  # the blocks read ahead are in the slab now
            origins = dict(zip(ahead.keys, ahead.tiers, strict=True))
            ticket.tiers = [origins.get(k, t) for k, t in zip(keys, ticket.tiers, strict=True)]
        self._begin(load)
        coming = self.coming
        for key in keys:
            coming[key] = coming.get(key, 0) + 1
        if ticket.waiting:
            missing = load.needed[ticket.slots.index(None)] // self._num_parts
            seconds = self._economics.max_wait_seconds(
                first_token + missing * self._block_size,
                num_blocks - missing,
                num_queued_tokens=num_queued_tokens,
            )
            if seconds is not None:
                load.give_up_at = load.started + seconds
                self._alarm.at(load.give_up_at)

    def begin_overlapped(
        self,
        offload: RequestOffload,
        first_token: int,
        keys: Sequence[bytes],
        block_ids: GroupBlockIds,
        compute_blocks: int,
    ) -> None:
        """Begin a load whose request computes about `compute_blocks` blocks in the meantime."""
        num_blocks = len(keys) // self._num_parts
        compute_blocks = min(compute_blocks, num_blocks)
        load = Load(
            offload,
            first_token,
            list(keys),
            block_ids,
            num_blocks,
            time.monotonic(),
            load_frontier=num_blocks,
            next_end=num_blocks,
            is_overlapped=True,
            piece_blocks=-(-(num_blocks - compute_blocks) // OVERLAP_PARTS) or 1,
            chunk_tokens=(-(-compute_blocks // OVERLAP_PARTS) or 1) * self._block_size,
        )
        self._begin(load)
        self._read_more(load)

    def load_state(self, request_id: str, num_computed_tokens: int) -> LoadState:
        load = self._requests[request_id].load
        assert load is not None
        lowest = min([piece.start for piece in load.copying], default=load.load_frontier)
        bound = load.first_token + lowest * self._block_size
        limit = min(bound, num_computed_tokens + load.chunk_tokens)
        frontier = -(-(limit - load.first_token) // self._block_size)
        if (
            frontier > load.compute_frontier > 0
            and load.load_frontier == load.num_blocks
            and not load.copying
        ):
            load.chunk_tokens *= 2
        load.compute_frontier = max(load.compute_frontier, frontier)
        load_frontier = load.first_token + load.load_frontier * self._block_size
        return LoadState(limit, load_frontier, bool(load.copying), load.fault)

    def end_load(self, request_id: str) -> LoadReport | None:
        load = self._requests[request_id].load
        assert load is not None
        load.is_over = True
        self._stop_reading(load)
        if load.copying:
            return None
        report = self._report_of(load)
        self._counters.count_load(report)
        self._end(load, has_failed=not report.is_whole)
        return report

    def poll_reads(self) -> None:
        """Find the loads whose reads have ended or have taken too long."""
        now = time.monotonic()
        self.ready = [load for load in self.under_way if _is_ready(load, now)]

    def copy_ready(self, meta: ConnectorMetadata) -> None:
        """Add copies of the blocks that are in the slab to `meta`, and begin more reads."""
        self._has_news = False
        ready, self.ready = self.ready, []
        for load in ready:
            if not load.is_overlapped:
                self._copy_blocking(load, load.reading.popleft(), meta)
                continue
            # Overlapped loads have no time limit.
            while _is_ready(load, load.started):
                self._copy_piece(load, load.reading.popleft(), meta)
            self._read_more(load)

    def spoil(self, keys: AbstractSet[bytes]) -> None:
        """Discard all blocks of each load that has one of `keys`; the request computes them."""
        for load in self.under_way:
            if load.is_spoilt or keys.isdisjoint(load.keys):
                continue
            load.is_spoilt = True
            if load.is_overlapped:
                load.load_frontier = load.num_blocks
                load.blocks_by_tier.clear()
                self._fail_load(load, SPOILT, None)
                self._has_news = True

    def take_reports(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        """Process copies that have ended. Return the reports of ended blocking loads, and of
        overlapped loads that the engine ended while copies wrote to their blocks."""
        if output.finished_loads or output.failed_loads:
            self._learn_copy_rate(output)
            for ids, ok in ((output.finished_loads, True), (output.failed_loads, False)):
                for job_id in ids:
                    self._end_copy(job_id, ok)
        reports, self._reports = self._reports, []
        return reports

    def _learn_copy_rate(self, output: ConnectorWorkerOutput) -> None:
        """Record the copies of one poll as a single transfer, whose last end is now."""
        ended = [self._copies[i] for i in (*output.finished_loads, *output.failed_loads)]
        if not output.failed_loads:
            num_bytes = sum(copy.num_blocks for copy in ended) * self._hierarchy.block_bytes
            waited = time.monotonic() - min(copy.began for copy in ended)
            seconds = output.load_copy_seconds
            self._slab_link.record_transfer(num_bytes, seconds, max(waited, seconds))

    def _end_copy(self, job_id: int, ok: bool) -> None:
        copy = self._copies.pop(job_id)
        load, piece = copy.load, copy.piece
        piece.jobs.remove(job_id)
        piece.is_good = piece.is_good and ok and not load.is_spoilt
        if not load.is_overlapped:
            if not piece.jobs:
                self._end_blocking(load, piece, None if piece.is_good else "load_copy")
            return
        self._has_news = True
        while load.copying and not load.copying[0].jobs:
            self._land(load, load.copying.popleft())
        if load.is_over and not load.copying:
            self._end(load, has_failed=load.failure is not None)
            self._reports.append(
                LoadReport(
                    load.offload.request_id,
                    0,
                    is_whole=False,
                    failure=load.fault,
                    is_cancelled=load.failure is None,
                )
            )

    def _begin_read(self, load: Load, start: int, end: int) -> LoadTicket:
        keys = load.keys
        if load.is_overlapped:
            keys = keys[start * self._num_parts : end * self._num_parts]
        ticket = self._read_times.begin_load(keys, load.offload.context)
        load.reading.append(Piece(start, end, ticket))
        return ticket

    def _read_more(self, load: Load) -> None:
        while (
            len(load.reading) < PIECES_AT_ONCE
            and load.next_end > load.compute_frontier
            and not (load.is_over or load.failure)
        ):
            end = load.next_end
            start = load.next_end = max(load.compute_frontier, end - load.piece_blocks)
            self._begin_read(load, start, end)

    def _copy_blocking(self, load: Load, piece: Piece, meta: ConnectorMetadata) -> None:
        """Add copies of the leading positions in the slab, or end the load if there are none."""
        slots = piece.ticket.slots
        missing = slots.index(None) if None in slots else len(slots)
        if missing < len(slots):
            whole = load.needed[missing] // self._num_parts
            piece.end = 0 if self._parts.whole_only else whole
            if self._parts.is_windowed and not piece.ticket.waiting:
                # Every longer hit needs this block, or an earlier block that is missing too.
                load.shorter_tokens = load.first_token + whole * self._block_size
        if load.is_spoilt:
            self._end_blocking(load, piece, SPOILT)
        elif not piece.end:
            reason = "slow" if piece.ticket.waiting else "unavailable"
            self._end_blocking(load, piece, reason)
        else:
            if piece.end < load.num_blocks:
                slots = slots[: piece.end * self._num_parts]
            self._copy(load, piece, cast("list[int]", slots), meta)

    def _copy_piece(self, load: Load, piece: Piece, meta: ConnectorMetadata) -> None:
        """Copy the last blocks of a piece that were read and lie after the compute frontier."""
        width = self._num_parts
        slots = piece.ticket.slots
        lowest = max(0, load.compute_frontier - piece.start)
        first = len(slots) // width
        wanted = first - lowest
        while first > lowest and None not in slots[(first - 1) * width : first * width]:
            first -= 1
        num_whole = len(slots) // width - first
        if num_whole > 0:
            piece.start = piece.end - num_whole
            self._copy(load, piece, cast("list[int]", slots[first * width :]), meta)
        if num_whole < wanted:
            self._fail_load(load, "partial", fault_of(piece.ticket))
        if not num_whole:
            self._read_times.let_go(piece.ticket)

    def _copy(self, load: Load, piece: Piece, slots: list[int], meta: ConnectorMetadata) -> None:
        """Add one copy job for each part (cache group and rank) of a piece."""
        load.copying.append(piece)
        began = time.monotonic()
        width, num_state_keys = self._num_parts, self._parts.num_state_keys
        states = slots[len(slots) - num_state_keys :]
        slots = slots[: len(slots) - num_state_keys]
        for index, part in enumerate(self._parts.all):
            block_ids = list(load.block_ids[part.group][piece.start : piece.end])
            mine = slots[index::width]
            if self._parts.is_windowed:
                pairs = zip(load.needed[: len(slots)], slots, strict=True)
                mine = [slot for place, slot in pairs if place % width == index]
                block_ids = block_ids[len(block_ids) - len(mine) :]
            if states and part.group == 0:  # the job also copies the states of its rank
                pieces = load.block_ids[self._parts.num_groups]
                first = index * len(pieces)
                block_ids += pieces
                mine = [*mine, *states[first : first + len(pieces)]]
            if not mine:
                continue
            job = CopyJob(next(self._job_ids), block_ids, mine, part)
            piece.jobs.add(job.job_id)
            self._copies[job.job_id] = _Copy(load, piece, len(mine), began)
            meta.loads.append(job)

    def _end_blocking(self, load: Load, piece: Piece, failure: str | None) -> None:
        """Unpin the load's slots and report it. `failure` is the reason if no block was loaded."""
        if load.is_spoilt:
            failure = SPOILT
        ticket = piece.ticket
        is_late = ticket.waiting > 0
        self._read_times.let_go(ticket)
        self.num_ended += 1
        coming = self.coming
        for key in load.keys:
            left = coming[key] - 1
            if left:
                coming[key] = left
            else:
                del coming[key]
        num_blocks = 0 if failure else piece.end
        num_copied = num_blocks * self._num_parts
        if num_blocks == load.num_blocks:
            num_copied = len(load.keys)
        else:
            load.failure = failure or ("slow" if is_late else "partial")
            self._counters.count_failure(load.failure)
        # A load that is given up because it is late has no fault.
        late_fault = None if is_late else fault_of(ticket)
        load.fault = COPY_FAULT if failure == "load_copy" else late_fault
        tiers = self._tiers_of(load, ticket)[:num_blocks]
        load.blocks_by_tier.update(tiers)
        report = self._report_of(load)
        if load.num_short_tokens and num_blocks == load.num_blocks:
            report.num_loaded_tokens -= load.num_short_tokens
            report.tokens_by_tier[tiers[-1]] -= load.num_short_tokens
        report.seconds = time.monotonic() - load.started
        self._counters.count_load(report, num_copied * self._hierarchy.block_bytes)
        self._reports.append(report)
        if report.shorter_tokens:
            load.offload.most_blocks = report.shorter_tokens // self._block_size
        self._end(load, has_failed=not (report.is_whole or report.shorter_tokens))

    def _land(self, load: Load, piece: Piece) -> None:
        """Process the next piece of an overlapped load, whose copy has ended."""
        self._read_times.let_go(piece.ticket)
        if not piece.is_good:
            # A load that the engine has ended itself reports no fault.
            self._fail_load(load, "load_copy", None if load.is_over else COPY_FAULT)
        elif piece.end == load.load_frontier:
            load.load_frontier = piece.start
            num_blocks = piece.end - piece.start
            load.blocks_by_tier.update(self._tiers_of(load, piece.ticket)[-num_blocks:])
            num_copied = num_blocks * self._num_parts
            self._counters.count_load_copy(num_copied * self._hierarchy.block_bytes)

    def _tiers_of(self, load: Load, ticket: LoadTicket) -> list[str]:
        """Return, for each position that was read, the slowest tier of its blocks."""
        order = self._hierarchy.tiers
        if not self._parts.is_windowed:
            return whole_positions(ticket.tiers, self._num_parts, order)
        tiers = order[:1] * load.num_blocks
        for place, tier in zip(load.needed, ticket.tiers, strict=False):
            position = place // self._num_parts
            tiers[position] = max(tiers[position], tier, key=order.index)
        return tiers

    def _report_of(self, load: Load) -> LoadReport:
        tokens = {t: n * self._block_size for t, n in load.blocks_by_tier.items()}
        return LoadReport(
            load.offload.request_id,
            sum(tokens.values()),
            tokens,
            is_whole=load.failure is None,
            failure=load.fault,
            shorter_tokens=0 if load.is_spoilt else load.shorter_tokens,
        )

    def _begin(self, load: Load) -> None:
        self.under_way.append(load)
        load.offload.load = load
        load.offload.stage = Stage.LOADING

    def _end(self, load: Load, *, has_failed: bool) -> None:
        """End the load, and drop the record of its request if the request has ended."""
        self.under_way.remove(load)
        offload = load.offload
        offload.load = None
        if offload.stage is Stage.FINISHED:
            del self._requests[offload.request_id]
        else:
            offload.stage = Stage.FAILED if has_failed else Stage.READY

    def _fail_load(self, load: Load, reason: str, fault: str | None) -> None:
        """Give up a load: its request computes all blocks whose copy to the pool has not begun."""
        load.failure = reason
        load.fault = load.fault or fault
        self._counters.count_failure(reason)
        self._stop_reading(load)

    def _stop_reading(self, load: Load) -> None:
        while load.reading:
            self._read_times.let_go(load.reading.pop().ticket)


class _Copy(NamedTuple):
    load: Load
    piece: Piece
    num_blocks: int
    began: float


def _is_ready(load: Load, now: float) -> bool:
    """Whether the load's next piece can be copied, or has taken too long."""
    if not load.reading or len(load.copying) >= PIECES_AT_ONCE:
        return False
    is_late = load.give_up_at is not None and load.give_up_at <= now
    return is_late or not load.reading[0].ticket.waiting


def fault_of(ticket: LoadTicket) -> str | None:
    """Return a description of the reads that ended without blocks; None if no read did."""
    if ticket.fault is None:
        return None
    missing = [i for i, slot in enumerate(ticket.slots[: ticket.begun]) if slot is None]
    tiers = " and ".join(sorted({ticket.tiers[i] for i in missing}))
    return f"{len(missing)} of {ticket.begun} blocks did not come from {tiers} ({ticket.fault})"
