# SPDX-License-Identifier: Apache-2.0
"""Both sides of the connector under a small engine that does everything at random.

The engine here has a pool of blocks, a prefix map, and an oracle that knows the bytes of every
key. Stores fail, hang, come late and refuse; copies fail; requests are aborted while they load.
Whatever happens: never a wrong byte, every loading request reported exactly once, and in the end
no slot pinned or reserved.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.device.base import DeviceError, Event, Stream
from stratakv.connector.device.cpu import CpuCopyDevice
from stratakv.connector.messages import EvictedBlock, LoadReport, MatchKind
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.errors import TierBusy, TierError
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.memory_store import MemoryStore

LAYOUT = BlockLayout(1, 2, 1, 4, "float32")  # 64 bytes
WAIT_SECONDS = 20.0
STEPS = 40
RUNS = {"ci": 100, "long": 20_000}


def page_of(digest: bytes) -> np.ndarray:
    """The oracle: what a block of this digest holds."""
    return np.frombuffer(hashlib.sha256(digest).digest() * 2, np.uint8)


class FaultyDevice(CpuCopyDevice):
    """Copies that fail, at once or later, at the given rate."""

    def __init__(self, rng: random.Random, rate: float) -> None:
        super().__init__()
        self._rng = rng
        self._rate = rate

    def copy(
        self,
        stream: Stream,
        block_ids: Sequence[int],
        slots: Sequence[int],
        after: Sequence[Event] = (),
    ) -> Event:
        self._may_refuse()
        return super().copy(stream, block_ids, slots, after)

    def copy_held(
        self, block_ids: Sequence[int], slots: Sequence[int], after: Sequence[Event] = ()
    ) -> Event:
        self._may_refuse()
        return super().copy_held(block_ids, slots, after)

    def _may_refuse(self) -> None:
        if self._rng.random() < self._rate:
            raise DeviceError("refused")


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    block_hashes: list[bytes]
    tail_hash: bytes | None = None
    block_ids: list[int] = field(default_factory=list)
    num_local: int = 0
    num_external: int = 0
    steps_left: int = 0
    load_failed: bool = False
    aborted: bool = False

    @property
    def num_tokens(self) -> int:
        return LAYOUT.block_size * len(self.block_hashes) + 1


class FakeEngine:
    """Blocks of the pool: used by one request each, or free, with or without a key."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_blocks = rng.randint(6, 14)
        slab = CpuSlab(LAYOUT, rng.randint(2, 12) * LAYOUT.slot_bytes, populate_threads=1)
        self.slab = slab
        stores = []
        if rng.random() < 0.85:
            blocks = rng.choice([8, 1000])
            stores.append(MemoryStore(LAYOUT, blocks * LAYOUT.page_bytes, fault=self._fault))
        self.fault_rate = rng.choice([0.0, 0.0, 0.2, 1.0])
        self.delay = rng.choice([0.0, 0.001, 0.006])
        self.signal = CopySignal()
        hierarchy = Hierarchy(
            slab,
            stores,
            wakeup=self.signal.wake,
            options=HierarchyOptions(read_seconds=rng.choice([0.003, 5.0])),
        )
        self.hierarchy = hierarchy
        device = FaultyDevice(rng, rng.choice([0.0, 0.0, 0.3]))
        device.register_slab(slab)
        self.scheduler = OffloadScheduler(
            ConnectorContext(hierarchy, Parts(LAYOUT.block_size), self.signal)
        )
        self.worker = OffloadWorker(device, self.signal.note_ended)
        self.woken = threading.Event()
        self.scheduler.set_wakeup(self.woken.set)
        pool = torch.zeros(self.num_blocks, 1, 2, 2, 1, 4)
        self.worker.register_pool(pool)
        self.pool = pool.view(torch.uint8).reshape(self.num_blocks, -1).numpy()
        self.free: OrderedDict[int, bytes | None] = OrderedDict.fromkeys(range(self.num_blocks))
        self.waiting: list[FakeRequest] = []
        self.running: list[FakeRequest] = []
        self.loading: dict[str, FakeRequest] = {}
        self.evicted: list[EvictedBlock] = []

    def _fault(self, op: str, _keys: Sequence[bytes]) -> float | None:
        if op in ("load", "store") and self.rng.random() < self.fault_rate / 2:
            raise self.rng.choice([TierBusy("full"), TierError("broken"), OSError("odd")])
        if op == "lookup" and self.rng.random() < self.fault_rate / 10:
            raise TierError("broken")
        return self.delay * self.rng.random() if op in ("load", "store") else None

    def step(self) -> bool:
        """One step; False if no request got any further."""
        before = len(self.waiting)
        while self.waiting and self._admit(self.waiting[0]):
            self.waiting.pop(0)
        moved = bool(self.running) or len(self.waiting) < before
        meta = self.scheduler.build_meta(self.evicted)
        self.evicted = []
        self.worker.start_step(meta)
        self.worker.wait_before_forward()
        for request in self.running:
            self._forward(request)
        for report in self.scheduler.update_from_worker(self.worker.poll()):
            self._resume(report)
            moved = True
        for request in [r for r in self.running if r.steps_left == 0]:
            self.running.remove(request)
            self._release(request, keep=True)
        return moved

    def _admit(self, request: FakeRequest) -> bool:
        """True if the request is running or loading now, False if it must wait."""
        by_digest = {found: block_id for block_id, found in self.free.items() if found is not None}
        local = []
        for digest in request.block_hashes[: (request.num_tokens - 1) // LAYOUT.block_size]:
            if digest not in by_digest:
                break
            local.append(by_digest[digest])
        asked = 0
        if not request.load_failed:
            match = self.scheduler.get_matched_tokens(request, len(local) * LAYOUT.block_size)
            if match.kind is MatchKind.RETRY:
                return False
            assert match.tokens % LAYOUT.block_size == 0
            assert len(local) * LAYOUT.block_size + match.tokens < request.num_tokens
            asked = match.tokens // LAYOUT.block_size
        missing = len(request.block_hashes) - len(local)
        if missing > len(self.free) - len(local):
            return False
        for block_id in local:
            del self.free[block_id]
        request.block_ids = local + [self._allocate() for _ in range(missing)]
        if not asked:
            self._start(request)
            return True
        request.num_local, request.num_external = len(local), asked
        external = request.block_ids[len(local) : len(local) + asked]
        self.scheduler.begin_load(request, [external], asked * LAYOUT.block_size, overlapped=False)
        self.loading[request.request_id] = request
        return True

    def _allocate(self) -> int:
        block_id, digest = self.free.popitem(last=False)
        if digest is not None:
            self.evicted.append(EvictedBlock(block_id, digest + b"\0\0"))
        return block_id

    def _start(self, request: FakeRequest) -> None:
        request.steps_left = self.rng.randint(1, 3)
        self.running.append(request)

    def _forward(self, request: FakeRequest) -> None:
        """Compute every block, so that whatever was there is overwritten now."""
        request.steps_left -= 1
        for block_id, digest in zip(request.block_ids, request.block_hashes, strict=True):
            self.pool[block_id] = 0xEE
            self.pool[block_id] = page_of(digest)

    def _resume(self, report: LoadReport) -> None:
        request = self.loading.pop(report.request_id)  # KeyError: reported twice, or never loading
        loaded = report.num_loaded_tokens // LAYOUT.block_size
        assert 0 <= loaded <= request.num_external
        assert sum(report.tokens_by_tier.values()) == report.num_loaded_tokens
        for i in range(request.num_local, request.num_local + loaded):
            wanted = page_of(request.block_hashes[i])
            assert (self.pool[request.block_ids[i]] == wanted).all(), "wrong bytes"
        request.load_failed = loaded < request.num_external
        if request.aborted:
            self._release(request, keep=False)
        else:
            self._start(request)

    def _release(self, request: FakeRequest, keep: bool) -> None:
        """Tail first, with the digests of what was computed; a digest is held by one block only."""
        held = set(self.free.values())
        pairs = list(zip(request.block_ids, request.block_hashes, strict=True))
        for block_id, digest in reversed(pairs):
            self.free[block_id] = digest if keep and digest not in held else None

    def wait(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not self.scheduler.has_pending_work():
            assert self.woken.wait(deadline - time.monotonic()), "the engine sleeps for ever"
            self.woken.clear()

    def drain(self) -> None:
        while self.waiting or self.running or self.loading:
            if not self.step():
                self.wait()

    def check_nothing_is_held(self) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while self.hierarchy._is_used() and time.monotonic() < deadline:
            self.woken.wait(0.01)
            self.hierarchy.poll()
        known = self.slab.keys()
        assert self.slab.num_slots - self.slab.free_slots() == len(known), "a slot is reserved"
        assert sorted(self.slab.coldest(len(known))) == sorted(known), "a slot is pinned"
        stats = self.scheduler.stats()
        assert (stats["loads_in_flight"], stats["stores_in_flight"]) == (0, 0)

    def shut_down(self) -> None:
        """As an engine does it: what is in the pool goes to the tiers."""
        resident = [EvictedBlock(i, digest + b"\0\0") for i, digest in self.free.items() if digest]
        self.worker.start_step(self.scheduler.build_meta(resident))
        self.worker.wait_before_forward()
        self.scheduler.update_from_worker(self.worker.poll())
        self.check_nothing_is_held()
        self.worker.shutdown()
        self.fault_rate = 0.0
        self.scheduler.shutdown(WAIT_SECONDS)


def random_request(rng: random.Random, number: int, documents: list[list[bytes]]) -> FakeRequest:
    """A leading part of a shared document, mostly with a block of its own at the end."""
    document = rng.choice(documents)
    hashes = document[: rng.randint(1, len(document))]
    if rng.random() < 0.7:
        hashes = [*hashes, hashlib.sha256(b"own %d" % number).digest()]
    return FakeRequest(f"r{number}", hashes)


def run(seed: int) -> Counter[str]:
    """One short life of an engine; what was loaded, by tier, and what failed, by reason."""
    rng = random.Random(seed)
    engine = FakeEngine(rng)
    longest = engine.num_blocks - 1
    documents = [[rng.randbytes(32) for _ in range(rng.randint(1, longest))] for _ in range(3)]
    for number in range(STEPS):
        if rng.random() < 0.6:
            engine.waiting.append(random_request(rng, number, documents))
        if engine.loading and rng.random() < 0.1:
            rng.choice(list(engine.loading.values())).aborted = True
        if rng.random() < 0.02:
            engine.drain()
            engine.scheduler.reset()
        if not engine.step() and rng.random() < 0.5:
            time.sleep(0.001)
    engine.drain()
    stats = engine.scheduler.stats()
    engine.shut_down()
    return Counter(stats["tokens_loaded"]) + Counter(stats["failures"])


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def test_never_a_wrong_byte_and_nothing_held_in_the_end(scale: str, seed: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(RUNS[scale]):
        try:
            seen += run(seed + number)
        except Exception as error:
            raise AssertionError(f"run({seed + number}) failed") from error
    # The runs are worth something only if they load from every tier, and fail in every way.
    assert set(seen) == {"cpu", "memory", "partial", "unavailable", "load_copy", "store_copy"}
    assert seen["memory"] > RUNS[scale]
