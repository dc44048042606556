# SPDX-License-Identifier: Apache-2.0
"""A connector whose tiers are a dict: what it keeps is what the worker says its slots hold.

Time is counted in ticks, and luck, where there is any, decides how long a load takes and how much
of it comes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from stratakv.connector.base import (
    KVConnectorScheduler,
    OverlappedLoads,
    RequestView,
    StoresAhead,
)
from stratakv.connector.messages import (
    ConnectorMetadata,
    ConnectorWorkerOutput,
    CopyJob,
    EvictedBlock,
    GroupBlockIds,
    LoadReport,
    LoadState,
    Match,
    MatchKind,
)
from stratakv.connector.page_keys import group_suffix
from stratakv.engine.models.layer_attention import LayerAttention, full

SIZE = 4  # tokens in a block


@dataclass
class Load:
    """A load under way."""

    request_id: str
    block_ids: list[int]  # of the first group
    keys: list[bytes]
    ticks: int
    groups: GroupBlockIds = ()  # of all groups; 0: not wanted
    first_token: int = 0


@dataclass
class Copy:
    """Blocks `start` to `end` of a load from the back, being written to."""

    start: int
    end: int
    ticks: int
    fails: bool


@dataclass
class OverlappedLoad:
    """A load from the back. All are indices of its blocks."""

    first_token: int
    block_ids: list[int]
    keys: list[bytes]
    load_frontier: int
    next_end: int  # from here on blocks were copied, or have failed
    compute_frontier: int = 0
    copies: list[Copy] = field(default_factory=list)
    is_over: bool = False
    has_failed: bool = False

    @property
    def lowest(self) -> int:
        return min([copy.start for copy in self.copies], default=self.load_frontier)


class DictTiers(KVConnectorScheduler, OverlappedLoads, StoresAhead):
    """Tiers in a dict, with loads that take some ticks, fail, or come in part; some from the back.

    `evicted` of the present step lies in `stores` until the worker has read those blocks, what is
    to be stored ahead in `ahead` until the forward pass is over.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        attention: Sequence[LayerAttention] = (full(),),
    ) -> None:
        self.rng = rng
        self.overlapped_loads = self.stores_ahead = self
        self.attention = tuple(attention)
        self.num_state_pages = 0  # of a checkpoint of states
        self.kept: dict[bytes, list[int]] = {}
        self.loads: list[Load] = []
        self.overlapped: dict[str, OverlappedLoad] = {}
        self.from_back = False
        self.piece_fails: Callable[[Copy], bool] = lambda copy: False
        self.there: dict[str, int] = {}  # positions behind the computed ones that the pool has
        self.shorter: dict[str, int] = {}  # the longest hit of a request, in tokens
        self.has_news = False
        self.stores: list[EvictedBlock] = []
        self.ahead: list[EvictedBlock] = []
        self.asked_again: dict[str, int] = {}
        self.slots: dict[tuple[int, int], int] = {}
        self.load_ticks = 2
        self.outcome: Callable[[Load], int] = lambda load: len(load.keys)
        self.wakeup: Callable[[], None] | None = None
        self.num_metas = 0

    @property
    def busy_blocks(self) -> set[int]:
        return {
            block for load in self.loads for blocks in load.groups for block in blocks if block
        } | {
            block
            for load in self.overlapped.values()
            for copy in load.copies
            for block in load.block_ids[copy.start : copy.end]
        }

    @property
    def is_busy(self) -> bool:
        """Whether anything writes to the pool."""
        return bool(self.busy_blocks)

    def tick(self) -> bool:
        """Time passes on the disk; whether anything is under way there."""
        for load in (*self.loads, *[c for b in self.overlapped.values() for c in b.copies]):
            load.ticks -= 1
        return self.is_busy

    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        assert num_computed_tokens % SIZE == 0
        first = num_computed_tokens // SIZE
        there = (num_pool_tokens or num_computed_tokens) // SIZE  # K and V
        assert there >= first
        self.there[request.request_id] = there - first
        most = self.shorter.get(request.request_id, request.num_tokens)
        end = min(request.num_tokens - 1, most) // SIZE
        while end > first and not self._has(request.block_hashes, there, end):
            end -= 1
        if end <= first:
            return Match(0, MatchKind.NONE)
        if self.rng is not None and self.rng.random() < 0.2:
            return Match(0, MatchKind.RETRY)
        from_back = self.from_back if self.rng is None else self.rng.random() < 0.5
        from_back = from_back and self.attention == (full(),) and not self.num_state_pages
        return Match((end - first) * SIZE, MatchKind.OVERLAP if from_back else MatchKind.LOAD)

    def _has(self, digests: Sequence[bytes], first: int, end: int) -> bool:
        """Whether all is kept that a request reads behind `end` blocks, of which the pool has what
        lies before `first`."""
        has_states = all(key in self.kept for key in self._state_keys(digests[end - 1]))
        return has_states and all(
            digests[index] + group_suffix(group) in self.kept
            for group, attention in enumerate(self.attention)
            for index in range(max(first, attention.first_seen(end * SIZE) // SIZE), end)
        )

    def _state_keys(self, digest: bytes) -> list[bytes]:
        first = len(self.attention)
        return [digest + group_suffix(first + piece) for piece in range(self.num_state_pages)]

    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        blocks = block_ids[0]
        num_groups = len(self.attention)
        assert len(block_ids) == num_groups + (self.num_state_pages > 0)
        assert all(len(ids) * SIZE == num_tokens > 0 for ids in block_ids[:num_groups])
        assert all(len(ids) == self.num_state_pages for ids in block_ids[num_groups:])
        request_id = request.request_id
        first_token = request.num_computed_tokens  # type: ignore[attr-defined]
        digests = request.block_hashes[first_token // SIZE :][: len(blocks)]
        keys = [digest + b"\0\0" for digest in digests]
        if overlapped:
            load = OverlappedLoad(first_token, list(blocks), keys, len(keys), len(keys))
            assert self.overlapped.setdefault(request_id, load) is load
            return
        assert request_id not in {load.request_id for load in self.loads}
        ticks = self.load_ticks if self.rng is None else self.rng.randint(0, 4)
        there = min(self.there[request_id], len(blocks))
        kv = [[0] * there + list(ids[there:]) for ids in block_ids[:num_groups]]
        groups = [*kv, *block_ids[num_groups:]]
        load = Load(request_id, kv[0], keys, ticks, groups, first_token)
        self.loads.append(load)

    def load_state(self, request_id: str, num_computed_tokens: int) -> LoadState:
        load = self.overlapped[request_id]
        chunk = SIZE if self.rng is None else self.rng.randint(1, 3 * SIZE)
        bound = load.first_token + SIZE * load.lowest
        assert num_computed_tokens <= bound
        limit = min(bound, num_computed_tokens + chunk)
        frontier = -(-(limit - load.first_token) // SIZE)
        load.compute_frontier = max(load.compute_frontier, frontier)
        failure = "torn" if load.has_failed else None
        load_frontier = load.first_token + SIZE * load.load_frontier
        return LoadState(limit, load_frontier, bool(load.copies), failure)

    def end_load(self, request_id: str) -> LoadReport | None:
        load = self.overlapped[request_id]
        load.is_over = True
        failure = "torn" if load.has_failed else None
        if load.copies:
            return None
        del self.overlapped[request_id]
        tokens = SIZE * (len(load.keys) - load.load_frontier)
        by_tier = {"cpu": tokens} if tokens else {}
        return LoadReport(request_id, tokens, by_tier, failure=failure)

    def num_wanted_ahead(self) -> int:
        return 0 if self.rng is None else self.rng.choice([0, 0, 2])

    def names_dropped(self, blocks: Sequence[EvictedBlock]) -> None:
        pass

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        self.num_metas += 1
        self.stores = list(evicted)
        self.ahead = list(cold)
        self.has_news = False
        for load in self.overlapped.values():
            self._copy_more(load)
        jobs = [CopyJob(1, [block.block_id for block in evicted], [])] if evicted else []
        return ConnectorMetadata(stores=jobs)

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        reports = []
        for load in [load for load in self.loads if load.ticks <= 0]:
            self.loads.remove(load)
            count = self.outcome(load) if self.rng is None else self._luck(load)
            if self.num_state_pages:
                if count == len(load.keys):
                    self._write_states(load)
                else:
                    count = min(count, 0)  # all or shorter
            for group, blocks in enumerate(load.groups[: len(self.attention)]):
                for block, key in list(zip(blocks, load.keys, strict=True))[:count]:
                    if block:
                        for offset, state in enumerate(self.kept[key[:32] + group_suffix(group)]):
                            self.slots[block, offset] = state
            by_tier = {"cpu": count * SIZE} if count else {}
            failure = None if count == len(load.keys) else "lost"
            report = LoadReport(load.request_id, count * SIZE, by_tier, 0.5, failure=failure)
            is_windowed = self.num_state_pages or not all(kind.is_full for kind in self.attention)
            if failure and is_windowed:
                report.shorter_tokens = load.first_token + count * SIZE
                self.shorter[load.request_id] = report.shorter_tokens
            reports.append(report)
        for request_id, load_ in list(self.overlapped.items()):
            self._land(load_)
            if load_.is_over and not load_.copies:
                del self.overlapped[request_id]
                reports.append(LoadReport(request_id, 0))
        return reports

    def _write_states(self, load: Load) -> None:
        states = self._state_keys(load.keys[-1][:32])
        for page, key in zip(load.groups[len(self.attention)], states, strict=True):
            for offset, number in enumerate(self.kept[key]):
                self.slots[page, offset] = number

    def has_pending_work(self) -> bool:
        copies = [load.copies[0] for load in self.overlapped.values() if load.copies]
        return self.has_news or any(load.ticks <= 0 for load in (*self.loads, *copies))

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        self.wakeup = wakeup

    def reset(self) -> None:
        self.kept.clear()

    def stats(self) -> dict[str, object]:
        return {}

    def shutdown(self, timeout_seconds: float) -> None:
        self.loads.clear()

    def _copy_more(self, load: OverlappedLoad) -> None:
        """Begin to write to blocks that the front has not claimed."""
        most = load.next_end - load.compute_frontier
        if most <= 0 or load.is_over or load.has_failed or len(load.copies) == 2:
            return
        if self.rng is not None and self.rng.random() < 0.4:
            return
        size = 1 if self.rng is None else self.rng.randint(1, most)
        ticks = self.load_ticks if self.rng is None else self.rng.randint(0, 3)
        copy = Copy(load.next_end - size, load.next_end, ticks, fails=False)
        copy.fails = self.piece_fails(copy) if self.rng is None else self.rng.random() < 0.15
        load.next_end = copy.start
        load.copies.append(copy)

    def begin_copies(self) -> None:
        """Nothing is left of what was in these blocks, once those of the step are stored."""
        for block in self.busy_blocks:
            for offset in range(SIZE):
                self.slots[block, offset] = -1

    def _land(self, load: OverlappedLoad) -> None:
        while load.copies and load.copies[0].ticks <= 0:
            copy = load.copies.pop(0)
            self.has_news = True
            if copy.fails:
                load.has_failed = True
                continue
            # It writes when it ends, whoever has the blocks by then.
            for index in range(copy.start, copy.end):
                for offset, state in enumerate(self.kept[load.keys[index]]):
                    self.slots[load.block_ids[index], offset] = state
            if copy.end == load.load_frontier:
                load.load_frontier = copy.start

    def _luck(self, load: Load) -> int:
        assert self.rng is not None
        if self.rng.random() < 0.6:
            return len(load.keys)
        return self.rng.randint(0, len(load.keys))
