# SPDX-License-Identifier: Apache-2.0
"""Writes that hang: the breaker hears of it, nothing piles up, and it ends with the fault."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import pytest

from stratakv.tiers.hierarchy.breaker import MAX_PROBES
from stratakv.tiers.hierarchy.guarded_store import GuardedStore, Traffic
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.hierarchy.writes import LATE_SHARE, STALL_SECONDS, Writes
from stratakv.tiers.mailbox import Mailbox
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.fault_plan import FaultPlan, parse_faults
from stratakv.tiers.testing.faulty_store import FaultyStore
from stratakv.tiers.testing.memory_store import MemoryStore

from ..rig import LAYOUT, WAIT_SECONDS, HeldStore, Rig, keys, with_rig

WRITE_SECONDS = 0.2
SLOTS = 48


class Drill:
    """A hierarchy over a FaultyStore, polled when it asks to be."""

    def __init__(self, faults: str) -> None:
        self.slab = CpuSlab(LAYOUT, SLOTS * LAYOUT.slot_bytes, populate_threads=1)
        inner = MemoryStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="ssd")
        self.store = FaultyStore(inner, parse_faults(faults))
        self.woken = self.answered = 0
        self.hierarchy = Hierarchy(
            self.slab,
            [self.store],
            wakeup=self._wake,
            options=HierarchyOptions(write_seconds=WRITE_SECONDS),
        )

    def _wake(self) -> None:
        self.woken += 1

    def put(self, *numbers: int) -> None:
        ticket = self.hierarchy.begin_store(keys(*numbers))
        self.hierarchy.end_store(ticket, ok=True)
        self.hierarchy.poll()

    @property
    def traffic(self) -> Traffic:
        return self.hierarchy.traffic()["ssd"]

    def wait_for(self, reached: Callable[[], bool], seconds: float) -> None:
        """Wait like an engine that sleeps: nothing is polled that did not ask for it."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, "not within the time"
            time.sleep(0.005)
            if self.woken > self.answered:
                self.answered = self.woken  # before the poll: what comes during it is one more
                self.hierarchy.poll()


class NoisyMailbox(Mailbox):
    """Takes in what is delivered at once, and notes the alarms that are set."""

    def __init__(self) -> None:
        super().__init__(lambda: None)
        self.alarms: list[float] = []

    def deliver(self, completion: Callable[[], None]) -> None:
        completion()

    def wake_at(self, moment: float) -> None:
        self.alarms.append(moment)


@pytest.fixture
def drill() -> Iterator[Drill]:
    drill = Drill("store:hang=1")
    yield drill
    assert drill.hierarchy.close(WAIT_SECONDS)  # what hangs ends with its store


def test_the_breaker_opens_soon_after_the_deadline_and_wakes_whoever_sleeps(drill: Drill) -> None:
    drill.put(*range(40))
    assert drill.traffic.active_cascades == 3
    assert drill.traffic.write_breaker == "closed"
    drill.wait_for(lambda: drill.traffic.write_breaker == "open", WAIT_SECONDS)
    drill.wait_for(lambda: drill.hierarchy.stats()["ssd"].errors["late_write"] == 3, WAIT_SECONDS)
    assert drill.traffic.late_write_blocks == 3 * (SLOTS // 8)
    assert drill.traffic.breaker == "closed", "reads are another matter"


def test_one_alarm_stands_for_all_that_is_being_written() -> None:
    slab = CpuSlab(LAYOUT, 4 * LAYOUT.slot_bytes, populate_threads=1)
    store, mailbox = HeldStore(), NoisyMailbox()
    store.hold_stores = True
    options = HierarchyOptions(read_seconds=1.0, write_seconds=WRITE_SECONDS)
    guarded = GuardedStore(store, mailbox, options)
    writes, alarms, traffic = Writes(slab, guarded), mailbox.alarms, guarded.traffic
    for number in range(3):
        slots = slab.reserve(keys(number))
        slab.commit(keys(number), [True])
        slab.pin(keys(number))
        assert writes.start(keys(number), [slot for slot in slots if slot is not None])
        time.sleep(0.02)
    assert len(alarms) == 1
    for late in range(1, 4):
        time.sleep(max(0.0, alarms[-1] - time.monotonic()))
        writes.give_up_late()
        if late < 3 and traffic.late_write_blocks < 3:  # on a slow machine several are late at once
            assert alarms[-1] > time.monotonic() - WRITE_SECONDS
            assert len(alarms) == traffic.late_write_blocks + 1
    assert traffic.late_write_blocks == 3, "whoever goes by the alarms alone misses none"
    store.release()
    assert traffic.late_write_blocks == len(writes) == 0
    slab.close()


def test_blocks_of_a_hung_write_stay_pinned_and_their_number_is_bounded(drill: Drill) -> None:
    for number in range(300):
        drill.put(number)
        time.sleep(0.001)
    drill.wait_for(lambda: drill.traffic.active_cascades == 3 + MAX_PROBES // 2 - 1, 20.0)
    for number in range(300, 500):
        drill.put(number)
    pinned = drill.slab.stats().pinned_blocks
    assert drill.traffic.late_write_blocks <= pinned <= LATE_SHARE * SLOTS
    assert drill.traffic.lost_blocks > 300, "what could not be written was dropped and counted"
    assert drill.hierarchy.find_prefix(keys(499)).tiers == ["cpu"], "the slab goes on with the rest"


def test_it_is_written_to_again(drill: Drill) -> None:
    """Within two seconds, says tests/test_fault_sweep.py, whose time no other work takes away."""
    drill.put(*range(40))
    drill.wait_for(lambda: drill.traffic.write_breaker != "closed", WAIT_SECONDS)
    time.sleep(0.5)  # a probe is lost as well
    drill.hierarchy.poll()
    drill.store.plan = FaultPlan()
    drill.wait_for(lambda: drill.traffic.write_breaker == "closed", WAIT_SECONDS)
    before = drill.store.stats().stored_blocks
    drill.put(*range(100, 120))
    drill.wait_for(lambda: drill.store.stats().stored_blocks > before, WAIT_SECONDS)


@with_rig(num_slots=32, write_seconds=WRITE_SECONDS)
def test_a_write_that_ends_late_gives_its_slots_back_and_has_the_store_probed(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put(*range(30))
    time.sleep(2 * WRITE_SECONDS)
    rig.hierarchy.poll()
    assert rig.traffic().write_breaker != "closed"
    rig.store.hold_stores = False
    rig.store.release()
    deadline = time.monotonic() + 0.2  # less than a pause
    while rig.traffic().write_breaker != "closed":
        assert time.monotonic() < deadline
        rig.hierarchy.poll()
    assert rig.traffic().late_write_blocks == 0


def test_reads_go_on_where_writes_hang(drill: Drill) -> None:
    drill.store.plan = FaultPlan()
    drill.put(*range(40))
    drill.wait_for(lambda: drill.traffic.active_cascades == 0, 1.0)
    written = [n for n in range(40) if drill.store.lookup(keys(n))[0].value == "hit"]
    drill.store.plan = parse_faults("store:hang=1")
    for number in range(100, 200):
        drill.put(number)
    drill.wait_for(lambda: drill.traffic.write_breaker != "closed", 1.0)
    assert drill.hierarchy.find_prefix(keys(written[0])).tiers == ["ssd"]
    ticket = drill.hierarchy.begin_load(keys(written[0]))
    drill.wait_for(lambda: not ticket.waiting, 1.0)
    assert ticket.slots != [None]
    drill.hierarchy.end_load(ticket)


def test_a_flush_gives_up_a_store_that_takes_nothing(
    drill: Drill, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    drill.put(*range(20))
    began = time.monotonic()
    assert not drill.hierarchy.flush(60.0)
    assert time.monotonic() - began < 40.0, "not the whole minute"
    began = time.monotonic()
    assert not drill.hierarchy.flush(60.0)
    assert time.monotonic() - began < STALL_SECONDS, "its breaker is open by now"


def test_a_flush_writes_to_the_others_all_that_it_can() -> None:
    slab = CpuSlab(LAYOUT, SLOTS * LAYOUT.slot_bytes, populate_threads=1)
    hung, good = HeldStore(), MemoryStore(LAYOUT, 10**6, name="net")
    hung.hold_stores = True
    hierarchy = Hierarchy(
        slab,
        [hung, good],
        wakeup=lambda: None,
        options=HierarchyOptions(write_seconds=WRITE_SECONDS),
    )
    hierarchy.end_store(hierarchy.begin_store(keys(*range(40))), ok=True)
    assert not hierarchy.flush(60.0)
    assert good.stats().blocks == 40
    hung.release()
    assert hierarchy.close(WAIT_SECONDS)


def test_a_flush_that_a_store_refuses_says_so() -> None:
    slab = CpuSlab(LAYOUT, SLOTS * LAYOUT.slot_bytes, populate_threads=1)
    store = FaultyStore(
        MemoryStore(LAYOUT, 1000 * LAYOUT.page_bytes), parse_faults("store:error=1")
    )
    hierarchy = Hierarchy(slab, [store], wakeup=lambda: None)
    hierarchy.end_store(hierarchy.begin_store(keys(*range(40))), ok=True)
    began = time.monotonic()
    assert not hierarchy.flush(60.0)
    assert time.monotonic() - began < STALL_SECONDS
    assert hierarchy.close(WAIT_SECONDS)
