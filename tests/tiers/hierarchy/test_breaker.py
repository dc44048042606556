# SPDX-License-Identifier: Apache-2.0
"""The breaker: when it opens, what it lets pass, and how soon it closes again."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from stratakv.tiers.hierarchy.breaker import (
    FAILURES,
    LATE_ANSWERS,
    LONGEST_PAUSE_SECONDS,
    MAX_PROBES,
    PROBE_SECONDS,
    WINDOW_SECONDS,
    Breaker,
    BreakerState,
)

from ...clock import Clock
from ..rig import WAIT_SECONDS, Rig, key, with_rig


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock=clock, jitter=lambda: 1.0)


def test_it_opens_after_a_few_failures_in_a_second(breaker: Breaker, clock: Clock) -> None:
    for _ in range(FAILURES - 1):
        breaker.failed()
    assert breaker.allows
    breaker.failed()
    assert not breaker.allows
    assert breaker.state is BreakerState.OPEN
    assert breaker.times_opened == 1


def test_fewer_late_answers_open_it(breaker: Breaker) -> None:
    for _ in range(LATE_ANSWERS):
        assert breaker.allows
        breaker.was_late()
    assert not breaker.allows


def test_failures_that_are_far_apart_do_not(breaker: Breaker, clock: Clock) -> None:
    for _ in range(10 * FAILURES):
        breaker.failed()
        clock.now += WINDOW_SECONDS / (FAILURES - 2)
    assert breaker.allows


def test_late_answers_in_a_row_open_it_however_far_apart(breaker: Breaker, clock: Clock) -> None:
    """Few requests must not each pay the deadline of a store that hangs."""
    for _ in range(LATE_ANSWERS - 1):
        breaker.was_late()
        clock.now += 100.0
    breaker.succeeded()
    for _ in range(LATE_ANSWERS):
        assert breaker.allows
        breaker.was_late()
        clock.now += 100.0
    assert not breaker.allows


def test_a_call_that_hangs_opens_it_at_once(breaker: Breaker) -> None:
    breaker.hung()
    assert breaker.state is BreakerState.OPEN


def test_one_probe_at_a_time_and_its_answer_closes_it(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    assert breaker.probes_at is not None
    clock.now = breaker.probes_at - 0.001
    assert not breaker.probe_due
    clock.now = breaker.probes_at
    assert breaker.probe_due
    breaker.probe_began()
    assert not breaker.probe_due
    assert not breaker.allows, "a probe is nobody's request"
    assert breaker.state is BreakerState.PROBING
    breaker.probe_ended(answered=True)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allows and not breaker.probe_due


def test_a_probe_that_is_lost_is_followed_by_another_up_to_a_bound(
    breaker: Breaker, clock: Clock
) -> None:
    open_it(breaker)
    clock.now += 10.0
    for _ in range(MAX_PROBES):
        assert breaker.probe_due
        breaker.probe_began()
        clock.now += PROBE_SECONDS
    assert not breaker.probe_due and breaker.probes_at is None
    breaker.probe_ended(answered=False)
    clock.now += 2 * LONGEST_PAUSE_SECONDS
    assert breaker.probe_due, "one has ended, so there may be another"
    breaker.probe_ended(answered=True)
    assert breaker.allows
    for _ in range(MAX_PROBES - 2):  # the others end as they may
        breaker.probe_ended(answered=False)
    assert breaker.allows


def test_what_ends_late_has_it_probed_at_once(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    assert not breaker.probe_due
    breaker.answered_late()
    assert breaker.probe_due


def test_pauses_grow_to_a_bound_and_start_anew(breaker: Breaker, clock: Clock) -> None:
    open_it(breaker)
    pauses = []
    for _ in range(6):
        assert breaker.probes_at is not None
        pauses.append(breaker.probes_at - clock.now)
        clock.now = breaker.probes_at
        breaker.probe_began()
        breaker.probe_ended(answered=False)
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[1] and pauses[-1] == 1.25 * LONGEST_PAUSE_SECONDS
    assert pauses[-1] + PROBE_SECONDS < 2.0, "within 2 s a store that is back is asked again"
    clock.now += 10.0
    breaker.probe_began()
    breaker.probe_ended(answered=True)
    open_it(breaker)
    assert breaker.probes_at == clock.now + pauses[0]
    assert breaker.times_opened == 2


def open_it(breaker: Breaker) -> None:
    for _ in range(FAILURES):
        breaker.failed()


@with_rig(num_slots=16)
def test_a_broken_store_is_left_alone_and_found_again(rig: Rig) -> None:
    rig.put_below(*range(20))
    asked = []

    def broken(op: str, keys: Sequence[bytes]) -> None:
        asked.append(op)
        if op == "load":
            raise OSError("the cable is out")

    rig.store.fault = broken
    for number in range(10):
        assert rig.get(number) == []
    assert asked.count("load") == FAILURES
    assert rig.traffic().breaker == "open"
    assert rig.tiers(1) == [], "an open breaker offers nothing"
    rig.store.fault = None
    # Within two seconds, says tests/test_fault_sweep.py, whose time no other work takes away.
    deadline = time.monotonic() + WAIT_SECONDS
    while rig.get(11) != [0]:
        assert time.monotonic() < deadline, "not found again"
        time.sleep(0.01)
    assert rig.traffic().breaker == "closed"
    assert rig.traffic().breaker_opened == 1
    assert rig.tiers(12) == ["ssd"]


@pytest.mark.parametrize("rig", [{"num_slots": 16, "read_seconds": 0.5}], indirect=True)
def test_a_store_that_hangs_costs_a_few_deadlines_only(rig: Rig) -> None:
    rig.put_below(*range(20))
    rig.store.hold_loads = True
    began = time.monotonic()
    for number in range(20):
        assert rig.get(number) == []
    assert time.monotonic() - began < 20 * 0.5
    assert sum(op == "load" for op, _ in rig.store.batches) == LATE_ANSWERS
    rig.store.hold_loads = False
    rig.store.release()
    rig.hierarchy.poll()
    assert rig.slab.lookup([key(0)])[0].value == "hit", "what came late is kept for the next"


@with_rig(num_slots=16)
def test_a_broken_store_is_not_written_to(rig: Rig) -> None:
    def broken(op: str, keys: Sequence[bytes]) -> None:
        if op == "store":
            raise OSError("read-only file system")

    rig.store.fault = broken
    for number in range(100):
        rig.put(number)
    failed = sum(op == "store" for op, _ in rig.store.batches)
    assert FAILURES <= failed <= FAILURES + 2
    assert rig.traffic().lost_blocks > 50
    rig.store.fault = None


@with_rig(num_slots=16, read_seconds=0.02)
def test_nobody_pays_for_the_probes_of_a_store_that_hangs(rig: Rig) -> None:
    """And a probe takes no slot: those of a hung one would be missing for as long as it hangs."""
    rig.put_below(*range(20))
    rig.store.hold_loads = True
    for number in range(LATE_ANSWERS):
        assert rig.get(number) == []
    reserved = rig.slab.stats().reserved_blocks
    began = time.monotonic()
    while rig.traffic().breaker != "probing":
        assert time.monotonic() < began + 1.0, "no probe was made"
        assert rig.get(11) == [], "it is not asked for anybody"
        time.sleep(0.005)
    assert rig.slab.stats().reserved_blocks == reserved == LATE_ANSWERS
    rig.store.hold_loads = False
    rig.store.release()
    assert rig.get(11) == [] and rig.get(11) == [0], "the first poll takes the probe's answer in"
    assert rig.traffic().breaker == "closed"


@with_rig(num_slots=16)
def test_probing_needs_no_request(rig: Rig) -> None:
    """An engine that sleeps is woken to probe."""
    rig.put_below(1)

    def broken(op: str, _keys: Sequence[bytes]) -> None:
        raise OSError("the cable is out")

    rig.store.fault = broken
    for _ in range(FAILURES):
        rig.tiers(1)
    rig.hierarchy.poll()
    assert rig.traffic().breaker == "open"
    rig.store.fault = None
    deadline = time.monotonic() + 2.0
    while rig.traffic().breaker != "closed":
        assert rig.woken.wait(deadline - time.monotonic()), "nobody woke the engine"
        rig.woken.clear()
        rig.hierarchy.poll()
    assert rig.tiers(1) == ["ssd"]
