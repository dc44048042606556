# SPDX-License-Identifier: Apache-2.0
"""Both sides of the connector, led through a few steps on a device that watches the order.

A walk says for every step what happens to each block of a small pool; the device chooses what ends
when. `explore` leads the same walk through every order there is. The K and V of blocks are no
matter here: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.messages import EvictedBlock, MatchKind
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.hierarchy.hierarchy import Hierarchy

from ..simulation.small_slab import small_slab
from .order_checker import Choose, RecordingDevice

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
SLOTS = 48
GROUP = b"\0\0"


def digest(kind: str, number: int) -> bytes:
    return f"{kind} {number}".encode().ljust(32, b".")


# Blocks that the slab may have from the beginning.
LOADABLE = [digest("kept", number) for number in range(24)]


class Role(StrEnum):
    """What a step does to a block that no load is writing to."""

    REST = "-"
    READ = "r"  # the pass attends to it
    WRITE = "w"  # the pass writes it; evicted before, if it had a key
    LOAD = "l"  # a parked request gets it; evicted before, if it had a key
    COLD = "c"  # offered to be stored ahead of need
    DROP = "d"  # loses its key without being evicted, then the pass writes it


Step = Sequence[Role]


@dataclass
class Asks:
    """A request that wants one block, and the block of the pool it gets."""

    request_id: str
    block_hashes: list[bytes]
    block_id: int
    num_tokens: int = LAYOUT.block_size + 1
    tail_hash: bytes | None = None


class Known(Exception):
    """This state has been seen: what follows has been explored."""


class Walk:
    """One run. The slab has `num_loadable` blocks from the beginning."""

    def __init__(
        self,
        num_blocks: int,
        device: RecordingDevice,
        *,
        num_loadable: int = len(LOADABLE),
        worker: type[OffloadWorker] = OffloadWorker,
        scheduler: type[OffloadScheduler] = OffloadScheduler,
    ) -> None:
        self.device = device
        self.slab = small_slab(LAYOUT, SLOTS)
        signal = CopySignal()
        self.hierarchy = Hierarchy(self.slab, [], wakeup=signal.wake)
        self.loadable = LOADABLE[:num_loadable]
        kept = self.hierarchy.begin_store([pack_key(each) for each in self.loadable])
        self.hierarchy.end_store(kept, ok=True)
        self.worker = worker(device, signal.note_ended)
        self.side = scheduler(ConnectorContext(self.hierarchy, Parts(LAYOUT.block_size), signal))
        self.worker.register_pool(torch.empty(0))
        # All blocks were computed by a pass that may still run.
        device.compute((), range(num_blocks))
        self.digests: list[bytes | None] = [digest("first", i) for i in range(num_blocks)]
        self.offered = [False] * num_blocks
        self.loading: dict[str, Asks] = {}
        self.loads = 0
        self.history: list[Hashable] = []  # all that the host has seen
        self.given: list[int] = []
        self.reported: list[int] = []
        self.failed: set[int] = set()

    def step(self, roles: Step, *, content: Callable[[int], bytes] | None = None) -> None:
        """One step of an engine; `content` gives written blocks their digests."""
        at: dict[Role, list[int]] = {role: [] for role in Role}
        for block in self._free():
            at[roles[block]].append(block)
        evicted: list[EvictedBlock] = []
        if at[Role.DROP]:
            dropped = []
            for block in at[Role.DROP]:
                if (old := self.digests[block]) is not None:
                    dropped.append(EvictedBlock(block, old + GROUP))
                self.digests[block] = None
            self.side.stores_ahead.names_dropped(dropped)
        for block in [*at[Role.WRITE], *at[Role.LOAD]]:
            self._evict(block, evicted)
        for block in at[Role.LOAD]:
            self._load(block)
        meta = self.side.build_meta(evicted, self._cold(at[Role.COLD]))
        for job in [*meta.stores, *meta.loads, *meta.ahead]:
            self.given.append(job.job_id)
        self.worker.start_step(meta)
        self.device.let_time_pass()
        writes = [*at[Role.WRITE], *at[Role.DROP]]
        if at[Role.READ] or writes:
            self.worker.wait_before_forward()
            self.device.compute(at[Role.READ], writes)
            for block in writes:
                fresh = digest(f"at {len(self.given)}", block)
                self.digests[block] = content(block) if content else fresh
                self.offered[block] = False
            self.device.let_time_pass()
        self._poll()

    def fail(self, roles: Step) -> None:
        """A step that raises in the worker before its pass."""
        evicted: list[EvictedBlock] = []
        for block in self._free():
            if roles[block] is Role.WRITE:
                self._evict(block, evicted)
        meta = self.side.build_meta(evicted)
        self.given += [job.job_id for job in [*meta.stores, *meta.loads]]
        self.worker.start_step(meta)
        self._poll()

    def end(self) -> None:
        """Everything ends, and nothing is left anywhere."""
        for _ in range(4):
            self.device.close(0.0)
            self.step([Role.REST] * len(self.digests))
        assert not self.loading
        assert sorted(self.reported) == sorted(self.given), "each job is reported once"
        stats = self.slab.stats()
        assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)
        assert not (self.worker._stores or self.worker._loads or self.worker._ahead)
        assert not (self.worker._torn or len(self.side._outgoing) or self.side._loads.under_way)
        assert not (self.side._outgoing._ahead or self.side._outgoing._ahead_job_of)

    def close(self) -> None:
        self.hierarchy.close(0.0)

    def state(self) -> Hashable:
        """Two walks of one kind that agree in this go on in the same way."""
        return len(self.given), tuple(self.history), tuple(self.device.moments)

    def _free(self) -> list[int]:
        taken = {asks.block_id for asks in self.loading.values()}
        return [block for block in range(len(self.digests)) if block not in taken]

    def _evict(self, block: int, evicted: list[EvictedBlock]) -> None:
        found = self.digests[block]
        if found is not None:
            evicted.append(EvictedBlock(block, found + GROUP))
        self.digests[block] = None
        self.offered[block] = False

    def _cold(self, blocks: Sequence[int]) -> list[EvictedBlock]:
        cold = []
        for block in blocks[: self.side.stores_ahead.num_wanted_ahead()]:
            found = self.digests[block]
            if found is not None and not self.offered[block]:
                self.offered[block] = True
                cold.append(EvictedBlock(block, found + GROUP))
        return cold

    def _load(self, block: int) -> None:
        asks = Asks(f"r{self.loads}", [self.loadable[self.loads % len(self.loadable)]], block)
        match = self.side.get_matched_tokens(asks, 0)
        if match.kind is not MatchKind.LOAD:
            return
        self.loads += 1
        self.side.begin_load(asks, [[block]], match.tokens, overlapped=False)
        self.loading[asks.request_id] = asks

    def _poll(self) -> None:
        output = self.worker.poll()
        ended = [*output.finished_stores, *output.failed_stores]
        ended += [*output.finished_loads, *output.failed_loads]
        self.reported += ended
        self.failed |= {*output.failed_stores, *output.failed_loads}
        self.history.append(tuple(ended))
        for report in self.side.update_from_worker(output):
            asks = self.loading.pop(report.request_id)
            if report.num_loaded_tokens:
                self.digests[asks.block_id] = asks.block_hashes[0]


class Explorer:
    """Goes through a tree of choices, one path a run; a state that was seen before ends a run."""

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self._path: list[list[int]] = []  # for each choice: what was chosen, and of how many
        self._position = 0
        self.walk: Walk

    def choose(self, count: int) -> int:
        """The next choice of this run."""
        if count == 1:
            return 0
        if self._position == len(self._path):
            state = (self.walk.state(), self.walk.device.progress(), count)
            if state in self._seen:
                raise Known
            self._seen.add(state)
            self._path.append([0, count])
        self._position += 1
        return self._path[self._position - 1][0]

    def go_on(self) -> bool:
        """Whether there is a path left; then the next run takes it."""
        self._position = 0
        while self._path and self._path[-1][0] == self._path[-1][1] - 1:
            self._path.pop()
        if self._path:
            self._path[-1][0] += 1
        return bool(self._path)


def explore(make: Callable[[Choose], Walk], go: Callable[[Walk], None]) -> int:
    """Have a walk go its way under every sequence of choices; how many runs that took."""
    explorer = Explorer()
    runs = 0
    while True:
        walk = explorer.walk = make(explorer.choose)
        runs += 1
        try:
            go(walk)
        except Known:
            pass
        finally:
            walk.close()
        if not explorer.go_on():
            return runs
