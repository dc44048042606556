# SPDX-License-Identifier: Apache-2.0
"""Blocks loaded from the back of a prompt, while its request computes from the front.

    | computed, or soon | nobody's yet | read into the slab | copied to the pool | loaded |
      front ──►                                             ◄── pieces, one after the other

Only a copy writes to the request's blocks, so only blocks being copied stop the front; what is
still being read when the front comes by is computed, and its piece forgotten. The loaded part has
no gaps and reaches to the end: a piece that fails is the last one, and the front goes on to what
was loaded behind it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from ..tiers.hierarchy.hierarchy import Hierarchy
from ..tiers.hierarchy.promotions import LoadTicket
from .base import ConnectorMetadata, CopyJob, FrontState, LoadReport
from .counters import OffloadCounters
from .economics import MEETING_PARTS, PIECES_AT_ONCE
from .incoming import COPY_FAULT, SPOILT, fault_of
from .rates import ReadTimes
from .transfer import JobIds


@dataclass(slots=True)
class _Piece:
    """Blocks `start` to `end` of a load."""

    start: int
    end: int
    ticket: LoadTicket
    is_good: bool | None = None  # once its copy has ended


@dataclass(slots=True)
class _BackLoad:
    request_id: str
    first_token: int
    keys: list[bytes]
    block_ids: list[int]
    piece_blocks: int
    chunk_tokens: int  # grows while nothing comes, so that a late store costs few steps
    next_end: int  # blocks from here on have been asked for
    loaded_from: int
    front: int = 0  # blocks below are the front's own
    reading: deque[_Piece] = field(default_factory=deque)
    copying: dict[int, _Piece] = field(default_factory=dict)  # by job, in their order
    failure: str | None = None
    fault: str | None = None  # see `LoadReport.failure`
    is_over: bool = False  # only the copies under way are waited for
    is_spoilt: bool = False  # what it brings may be wrong
    blocks_by_tier: Counter[str] = field(default_factory=Counter)


class BackLoads:
    """Requests that are loaded from the back."""

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
        self._loads: dict[str, _BackLoad] = {}
        self._load_of: dict[int, _BackLoad] = {}  # by copy job
        self._reports: list[LoadReport] = []
        self._has_news = False  # that the scheduler has not asked for

    def __len__(self) -> int:
        return len(self._loads)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._loads

    @property
    def has_due(self) -> bool:
        """Whether a step would have something to copy, to compute or to report."""
        if not self._loads:
            return self._has_news or bool(self._reports)
        return bool(
            self._has_news
            or self._reports
            or any(
                load.reading and load.reading[0].ticket.done() and self._may_copy(load)
                for load in self._loads.values()
            )
        )

    def begin(
        self,
        request_id: str,
        first_token: int,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        front_blocks: int,
    ) -> None:
        """Load from the back, and expect to meet the front after about `front_blocks`."""
        num_blocks = len(keys)
        front_blocks = min(front_blocks, num_blocks)
        self._loads[request_id] = load = _BackLoad(
            request_id,
            first_token,
            list(keys),
            list(block_ids),
            piece_blocks=-(-(num_blocks - front_blocks) // MEETING_PARTS) or 1,
            chunk_tokens=(-(-front_blocks // MEETING_PARTS) or 1) * self._block_size,
            next_end=num_blocks,
            loaded_from=num_blocks,
        )
        self._read_more(load)

    def state(self, request_id: str, num_computed_tokens: int) -> FrontState:
        """See `KVConnectorScheduler.front_state`."""
        load = self._loads[request_id]
        lowest = min([piece.start for piece in load.copying.values()], default=load.loaded_from)
        bound = load.first_token + lowest * self._block_size
        limit = min(bound, num_computed_tokens + load.chunk_tokens)
        front = -(-(limit - load.first_token) // self._block_size)
        if front > load.front > 0 and load.loaded_from == len(load.keys) and not load.copying:
            load.chunk_tokens *= 2
        load.front = max(load.front, front)
        loaded_from = load.first_token + load.loaded_from * self._block_size
        return FrontState(limit, loaded_from, bool(load.copying))

    def copy_ready(self, meta: ConnectorMetadata) -> None:
        """Have what has been read copied to the pool, and more read."""
        self._has_news = False
        for load in self._loads.values():
            while load.reading and load.reading[0].ticket.done() and self._may_copy(load):
                self._begin_copy(load, load.reading.popleft(), meta)
            self._read_more(load)

    def end_copy(self, job_id: int, ok: bool) -> bool:
        """A copy has ended, well or not; False if it is none of these."""
        load = self._load_of.pop(job_id, None)
        if load is None:
            return False
        load.copying[job_id].is_good = ok and not load.is_spoilt
        self._has_news = True
        for job_id, piece in list(load.copying.items()):
            if piece.is_good is None:
                break
            del load.copying[job_id]
            self._land(load, piece)
        if load.is_over and not load.copying:
            del self._loads[load.request_id]
            is_cancelled = load.failure is None
            self._reports.append(
                LoadReport(load.request_id, 0, is_whole=False, is_cancelled=is_cancelled)
            )
        return True

    def end(self, request_id: str) -> LoadReport | None:
        """See `KVConnectorScheduler.end_back_load`."""
        load = self._loads[request_id]
        load.is_over = True
        self._stop_reading(load)
        if load.copying:
            return None
        del self._loads[request_id]
        tokens = {t: n * self._block_size for t, n in load.blocks_by_tier.items()}
        report = LoadReport(
            request_id,
            sum(tokens.values()),
            tokens,
            is_whole=load.failure is None,
            failure=load.fault,
        )
        self._counters.count_load(report)
        return report

    def failure_of(self, request_id: str) -> str | None:
        """See `KVConnectorScheduler.back_load_failure`."""
        return self._loads[request_id].fault

    def spoil(self, keys: AbstractSet[bytes]) -> None:
        """Nothing that loads with one of these keys bring is to be used; their requests compute."""
        for load in self._loads.values():
            if not (load.is_spoilt or keys.isdisjoint(load.keys)):
                load.is_spoilt = True
                load.loaded_from = len(load.keys)
                load.blocks_by_tier.clear()
                self._fail(load, SPOILT, None)
                self._has_news = True

    def take_reports(self) -> list[LoadReport]:
        """Reports of loads that were ended while blocks were being written to."""
        reports, self._reports = self._reports, []
        return reports

    def _may_copy(self, load: _BackLoad) -> bool:
        return len(load.copying) < PIECES_AT_ONCE

    def _read_more(self, load: _BackLoad) -> None:
        while (
            len(load.reading) < PIECES_AT_ONCE
            and load.next_end > load.front
            and not (load.is_over or load.failure)
        ):
            end = load.next_end
            start = load.next_end = max(load.front, end - load.piece_blocks)
            ticket = self._hierarchy.begin_load(load.keys[start:end])
            self._read_times.watch(ticket)
            load.reading.append(_Piece(start, end, ticket))

    def _begin_copy(self, load: _BackLoad, piece: _Piece, meta: ConnectorMetadata) -> None:
        """Copy what has come of a piece and still is in front of the front, from its end on."""
        slots: list[int] = []
        wanted = piece.ticket.slots[max(0, load.front - piece.start) :]
        for slot in reversed(wanted):
            if slot is None:
                break
            slots.insert(0, slot)
        if slots:
            piece.start = piece.end - len(slots)
            job = CopyJob(self._job_ids.next(), load.block_ids[piece.start : piece.end], slots)
            load.copying[job.job_id] = piece
            self._load_of[job.job_id] = load
            meta.loads.append(job)
        if len(slots) < len(wanted):
            self._fail(load, "partial", fault_of(piece.ticket))
        if not slots:
            self._read_times.let_go(piece.ticket)

    def _land(self, load: _BackLoad, piece: _Piece) -> None:
        """The copy of the next piece has ended."""
        self._read_times.let_go(piece.ticket)
        if not piece.is_good:
            self._fail(load, "load_copy", COPY_FAULT)
        elif piece.end == load.loaded_from:
            load.loaded_from = piece.start
            num_blocks = piece.end - piece.start
            load.blocks_by_tier.update(piece.ticket.tiers[-num_blocks:])
            self._counters.count_load_copy(num_blocks * self._hierarchy.block_bytes)

    def _fail(self, load: _BackLoad, reason: str, fault: str | None) -> None:
        """Give a load up: every block that is not on its way to the pool will be computed."""
        load.failure = reason
        load.fault = load.fault or fault
        self._counters.count_failure(reason)
        self._stop_reading(load)

    def _stop_reading(self, load: _BackLoad) -> None:
        while load.reading:
            self._read_times.let_go(load.reading.pop().ticket)
