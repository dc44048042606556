# SPDX-License-Identifier: Apache-2.0
"""The Nth call to a store fails, for every N and in every way, under a whole engine.

Once only, or from the Nth call on until the breaker opens. Whatever the call and the way: answers
are right, no request fails, nothing hangs, nothing stays behind, and soon after the store works
again it is asked again. All of it runs in virtual time, so that no deadline is missed but those
which are to be missed. An SSD store reads and writes really, however long that takes: its answers
are waited for, and then they came at once.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import pytest

from stratakv.connector.connector_context import ConnectorContext
from stratakv.connector.copy_signal import CopySignal
from stratakv.connector.costs.economics import Choice
from stratakv.connector.offload_scheduler import OffloadScheduler
from stratakv.connector.offload_worker import OffloadWorker
from stratakv.connector.parts import Parts
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.scheduler.scheduler import RETRY_SECONDS
from stratakv.tiers.base import Answer, Stored, StoreTier
from stratakv.tiers.hierarchy.breaker import BreakerState
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.tag import Proof, Proofs
from stratakv.tiers.testing.fault_plan import FaultPlan, parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore
from stratakv.tiers.testing.memory_store import MemoryStore

from .engine.scheduler.conftest import SIZE, reference
from .random_life import SSD_BASE_BYTES
from .simulation.clock import VirtualClock, VirtualEvent, virtual_time
from .simulation.device import SimDevice
from .simulation.small_slab import small_slab
from .simulation.tiny_engine import (
    LAYOUT,
    EngineParts,
    Slots,
    TinyEngine,
    check_nothing_left,
    is_busy,
)
from .stepping import Driver, noted

LARGEST_N = 200
# In CI each of the first calls, then every fourth. A store takes a while to be opened.
CI_N, CI_SSD_N = (*range(1, 10), *range(10, 41, 8)), range(1, 41, 16)
FAULTS = ["lookup:error=1", "drop:error=1"] + [
    f"{call}:{way}" for call in ("load", "store")
    for way in ("error=1", "busy=1", "partial=1", "delay=0.2", "hang=1")
]  # fmt: skip
# Those that a store shows only when it is broken.
BREAKING = {
    f"{call}:{way}" for call in ("load", "store") for way in ("error=1", "delay=0.2", "hang=1")
} | {"lookup:error=1"}
# Less than the delay, which therefore is a missed deadline.
READ_SECONDS = WRITE_SECONDS = 0.03
RECOVERY_SECONDS = 2.0
SETTLE_SECONDS = 0.02
# A breaker opens after five failures, or three late answers.
MANY = 12
DOCUMENTS, DOCUMENT_TOKENS = 4, 36
# Virtual: for one prompt, and for all that an engine is asked.
ASK_SECONDS, LIFE_SECONDS = 60.0, 3600.0
# What a disk may take, in real time.
DISK_SECONDS = 60.0


class NthFaultyStore(FaultyStore):
    """`fault` befalls the calls `first` to `first + count - 1` of the kind that it is for."""

    def __init__(self, inner: StoreTier, fault: str, first: int, count: int) -> None:
        super().__init__(inner, FaultPlan())
        self._fault = parse_faults(fault)
        self._call = self._fault.rules[0].call
        self.befallen = range(first, first + count)
        self.calls = 0

    def heal(self) -> None:
        """No more faults."""
        self.befallen = range(0)
        self.plan = FaultPlan()

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        self._arm("lookup")
        return super().lookup(keys)

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        self._arm("load")
        return super().load(keys, buffers)

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        self._arm("store")
        return super().store(keys, buffers, proofs)

    def drop(self, keys: Sequence[bytes]) -> int:
        self._arm("drop")
        return super().drop(keys)

    def _arm(self, call: str) -> None:
        if call == self._call:
            self.calls += 1
            self.plan = self._fault if self.calls in self.befallen else FaultPlan()


class WaitedFor(SsdStore):
    """An SSD store whose answers are there when a call returns, with threads, files and all."""

    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        future = super().load(keys, buffers)
        wait([future], DISK_SECONDS)
        return future

    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        future = super().store(keys, buffers, proofs)
        wait([future], DISK_SECONDS)
        return future


class Sweep:
    """One engine over one store, asked one prompt after the other."""

    def __init__(self, store: NthFaultyStore, clock: VirtualClock) -> None:
        self.store = store
        self.clock = clock
        self._woken = VirtualEvent(clock)
        slots = Slots(1 + 2 * DOCUMENT_TOKENS // SIZE)
        slab = small_slab(LAYOUT, 2 * DOCUMENT_TOKENS // SIZE)
        signal = CopySignal()
        signal.set_wakeup(self._woken.set)
        self.hierarchy = Hierarchy(
            slab,
            [store],
            wakeup=signal.wake,
            options=HierarchyOptions(
                watermark=1.0,
                read_seconds=READ_SECONDS,
                write_seconds=WRITE_SECONDS,
                inclusive=False,
            ),
        )
        device = SimDevice(clock, random.Random(0), 0.0)
        device.register_slab(slab)
        worker = OffloadWorker(device, signal.note_ended)
        worker.register_pool(slots.pool)  # type: ignore[arg-type]
        self._side = OffloadScheduler(
            ConnectorContext(self.hierarchy, Parts(SIZE), signal, choice=Choice.LOAD)
        )
        self.engine = TinyEngine(
            EngineParts(self._side, worker),
            slots,
            SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=4),
            max_model_len=64,
            pass_time=lambda: clock.advance(0.0002),
        )
        self._driver = Driver(
            self.engine.scheduler,
            lambda: self.engine.step() and None,
            self._woken,
            monotonic=clock.monotonic,
            seconds=LIFE_SECONDS,
            longest_sleep=RETRY_SECONDS,
            grace_seconds=0.0,
        )
        rng = random.Random(5)
        self._documents = [
            [rng.randint(1, 49) for _ in range(DOCUMENT_TOKENS)] for _ in range(DOCUMENTS)
        ]
        self._num_asked = 0

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def breaker(self) -> BreakerState:
        """That of the store's two that is not closed, if one is."""
        [store] = self.hierarchy._stores
        states = store.breaker.state, store.write_breaker.state
        return next((state for state in states if state is not BreakerState.CLOSED), states[0])

    def ask(self, count: int = 1) -> None:
        """Some prompts at once, and their answers."""
        scheduler = self.engine.scheduler
        asked = {}
        for _ in range(count):
            name = f"r{self._num_asked}"
            text = self._documents[self._num_asked % DOCUMENTS] + [1 + self._num_asked % 40]
            self._num_asked += 1
            self.engine.add(name, text, max_tokens=2)
            asked[name] = reference(text, 2)
        self._driver.run(lambda: not scheduler.requests, ASK_SECONDS)
        for name, expected in asked.items():
            assert self.engine.finish_reason(name) in ("length", "stop")
            assert self.engine.said(name) == expected
        # Without it blocks would be gone before they are written.
        soon = self.now + SETTLE_SECONDS
        self._driver.run(lambda: self.now > soon or not is_busy(self.engine), ASK_SECONDS)

    def calm_down(self) -> None:
        """Let what is under way end, and look for what is left."""
        self._driver.calm_down(lambda: is_busy(self.engine))
        check_nothing_left(self.engine)

    def close(self) -> None:
        self.engine.parts.worker.shutdown()
        self._side.shutdown(0.0)

    def sleep(self, seconds: float) -> None:
        self._woken.wait(seconds)
        self._woken.clear()


def run(store: NthFaultyStore, clock: VirtualClock, fault: str) -> None:
    """One engine until its fault is over, and some way beyond."""
    sweep = Sweep(store, clock)
    first, count = store.befallen[0], len(store.befallen)
    try:
        for _ in range(50 + 3 * first):
            if store.calls >= first + count or sweep.breaker is not BreakerState.CLOSED:
                break
            sweep.ask()
        assert store.calls >= first, "the call that was to fail was not made"
        if fault in BREAKING and count == MANY:
            assert sweep.breaker is not BreakerState.CLOSED, "a broken store is asked as ever"
        store.heal()
        healed = sweep.now
        while sweep.breaker is not BreakerState.CLOSED:
            assert sweep.now - healed <= RECOVERY_SECONDS, "the breaker stays open"
            sweep.sleep(0.02)
            sweep.ask()
        sweep.ask(2 * DOCUMENTS)
        if "hang" in fault:
            store.close(5.0)  # what hangs keeps its slots until then, as it must
        sweep.calm_down()
    finally:
        sweep.close()


def sweep_memory(fault: str, first: int, count: int) -> None:
    clock = VirtualClock()
    with virtual_time(clock, random.Random(first)):
        inner = MemoryStore(LAYOUT, 500 * LAYOUT.page_bytes)
        run(NthFaultyStore(inner, fault, first, count), clock, fault)


def sweep_ssd(fault: str, first: int, count: int, path: Path) -> None:
    capacity = SSD_BASE_BYTES + 200 * (LAYOUT.slot_bytes + 4096)
    clock = VirtualClock()
    with virtual_time(clock, random.Random(first), but_for="stratakv.tiers.ssd."):
        inner = WaitedFor(path, LAYOUT, capacity, namespace=b"sweep", durability="async")
        run(NthFaultyStore(inner, fault, first, count), clock, fault)


def sweep_all(fault: str, ns: Sequence[int], sweep: Callable[[str, int, int], None]) -> None:
    """Each N once, and every sixteenth also from there on."""
    for first in ns:
        for count in (1, MANY) if first % 16 == 1 else (1,):
            with noted(f"{fault} for {count} calls from number {first} on"):
                sweep(fault, first, count)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize("fault", FAULTS)
def test_every_nth_call_in_memory(fault: str, scale: str) -> None:
    sweep_all(fault, range(1, LARGEST_N + 1) if scale == "long" else CI_N, sweep_memory)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_nth_call_over_an_ssd(fault: str, scale: str, tmp_path: Path) -> None:
    def sweep(fault: str, first: int, count: int) -> None:
        sweep_ssd(fault, first, count, tmp_path / f"{first}-{count}")

    sweep_all(fault, range(1, LARGEST_N + 1) if scale == "long" else CI_SSD_N, sweep)
