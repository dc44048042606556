# SPDX-License-Identifier: Apache-2.0
"""The hierarchy as one place where blocks are kept: stores, look-ups, loads, faults, the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierBusy, TierClosed
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.prefix_lookup import FIRST_BLOCKS, Prefix
from stratakv.tiers.slab.cpu_slab import CpuSlab

from ..rig import LAYOUT, WAIT_SECONDS, Rig, keys, with_rig


def test_a_stored_block_is_found_and_loaded(rig: Rig) -> None:
    rig.put(1, 2, 3)
    assert rig.hierarchy.find_prefix(keys(1, 2, 9, 3)) == Prefix(["cpu", "cpu"], False)
    assert rig.get(1, 2, 3) == [0, 1, 2]


def test_a_block_that_is_in_the_slab_is_not_stored_again(rig: Rig) -> None:
    rig.put(1, 2)
    ticket = rig.hierarchy.begin_store(keys(1, 3, 2, 3))
    assert ticket.keys == keys(3)
    rig.hierarchy.end_store(ticket, ok=True)


def test_a_failed_store_leaves_nothing(rig: Rig) -> None:
    rig.hierarchy.end_store(rig.hierarchy.begin_store(keys(1)), ok=False)
    assert rig.tiers(1) == []
    assert rig.slab.free_slots() == rig.slab.num_slots


def test_slab_and_store_are_read_as_one(rig: Rig) -> None:
    rig.put(1, 3)
    rig.put_below(2, 4)
    assert rig.tiers(1, 2, 3, 4, 5) == ["cpu", "ssd", "cpu", "ssd"]
    ticket = rig.hierarchy.begin_load(keys(1, 2, 3, 4))
    assert ticket.tiers == ["cpu", "ssd", "cpu", "ssd"]
    assert rig.finish(ticket) == [0, 1, 2, 3]
    assert rig.store.batches == [("load", 2)]  # one batch
    assert rig.tiers(1, 2, 3, 4) == ["cpu"] * 4


def test_two_loads_share_one_read(rig: Rig) -> None:
    rig.put_below(1, 2, 3)
    rig.store.hold_loads = True
    first = rig.hierarchy.begin_load(keys(1, 2))
    second = rig.hierarchy.begin_load(keys(1, 2, 3))
    third = rig.hierarchy.begin_load(keys(1))
    assert first.waiting
    assert second.tiers == ["ssd"] * 3
    assert rig.store.batches == [("load", 2), ("load", 1)]
    assert rig.traffic().active_promotions == 2
    rig.hierarchy.end_load(third)  # whoever leaves early takes nothing with him
    rig.store.release()
    assert rig.finish(first) == [0, 1]
    assert rig.finish(second) == [0, 1, 2]
    traffic = rig.traffic()
    assert (traffic.active_promotions, traffic.promotion_failures) == (0, 0)
    assert sum(traffic.promotion_seconds.counts) == 2
    assert 0 < traffic.promotion_seconds.total < WAIT_SECONDS


def test_blocks_being_read_may_be_joined_and_blocks_being_stored_are_pending(rig: Rig) -> None:
    rig.put_below(1)
    rig.put(5)
    rig.store.hold_loads = True
    reading = rig.hierarchy.begin_load(keys(1))
    storing = rig.hierarchy.begin_store(keys(2))
    assert rig.hierarchy.find_prefix(keys(1)) == Prefix(["ssd"], False)
    assert rig.hierarchy.find_prefix(keys(5, 2)) == Prefix(["cpu"], True)
    assert rig.finish(rig.hierarchy.begin_load(keys(5, 2, 1))) == [0]  # as far as it is known
    rig.hierarchy.end_store(storing, ok=False)
    rig.store.release()
    assert rig.finish(reading) == [0]
    assert rig.hierarchy.find_prefix(keys(1)) == Prefix(["cpu"], False)


def test_a_block_that_is_forgotten_while_it_is_read_is_not_joined(rig: Rig) -> None:
    """The bytes that were read may be wrong. The store has the right ones meanwhile."""
    rig.put_below(1, 2)
    rig.store.hold_loads = True
    reading = rig.hierarchy.begin_load(keys(1, 2))
    rig.hierarchy.forget_blocks(keys(2))
    rig.put_below(2)
    joining = rig.hierarchy.begin_load(keys(1, 2))
    assert joining.begun == 1 and joining.tiers[:1] == ["ssd"]
    rig.store.release()
    rig.finish(reading)
    assert rig.finish(joining) == [0]


@with_rig(read_seconds=0.05)
def test_a_late_read_fails_and_cannot_touch_a_slot_of_others(rig: Rig) -> None:
    rig.put_below(1, 2)
    rig.put(3)
    rig.store.hold_loads = True
    began = time.monotonic()
    ticket = rig.hierarchy.begin_load(keys(3, 1, 2))
    assert rig.finish(ticket) == [0]
    assert time.monotonic() - began < WAIT_SECONDS
    assert rig.errors() == {"late": 1}
    # Nobody waits for it any more, and nobody joins it.
    assert rig.hierarchy.find_prefix(keys(1)) == Prefix([], False)
    assert rig.get(1) == []
    # Its slots stay reserved however much room is needed.
    rig.put(*range(10, 40))
    assert rig.slab.lookup(keys(1, 2)) == [Answer.PENDING] * 2
    rig.store.release()
    rig.hierarchy.poll()
    assert rig.get(1, 2) == [0, 1]  # what it brought is good for the next one
    traffic = rig.traffic()
    assert traffic.promotion_failures == 1
    assert sum(traffic.promotion_seconds.counts) == 1  # how late it was
    assert traffic.promotion_seconds.total >= 0.05


def _raise(error: Exception) -> Callable[[str, Sequence[bytes]], None]:
    def fault(op: str, _keys: Sequence[bytes]) -> None:
        if op == "load":
            raise error

    return fault


@pytest.mark.parametrize("error", [TierBusy("full"), TierClosed("gone"), OSError("odd")])
@pytest.mark.parametrize("late", [False, True])
def test_any_fault_of_a_load_is_a_counted_miss(rig: Rig, error: Exception, late: bool) -> None:
    rig.put(1)
    rig.put_below(2)
    rig.store.fault = _raise(error)
    rig.store.hold_loads = late  # raised by the call, or brought by the future
    ticket = rig.hierarchy.begin_load(keys(1, 2))
    rig.store.release()
    assert rig.finish(ticket) == [0]
    assert rig.errors() == {type(error).__name__: 1}
    traffic = rig.traffic()
    assert (traffic.promotion_failures, traffic.active_promotions) == (1, 0)
    assert sum(traffic.promotion_seconds.counts) == 0
    assert rig.slab.lookup(keys(2)) == [Answer.MISS]
    rig.store.fault = None
    rig.store.hold_loads = False


def test_a_block_that_vanished_is_a_miss(rig: Rig) -> None:
    rig.put_below(1, 2, 3)
    rig.store.hold_loads = True
    ticket = rig.hierarchy.begin_load(keys(1, 2, 3))
    rig.store.drop(keys(2))
    rig.store.release()
    assert rig.finish(ticket) == [0, 2]
    assert rig.tiers(1, 2) == ["cpu"]


def test_a_look_up_that_fails_is_a_miss(rig: Rig) -> None:
    rig.put(1)
    rig.put_below(2)

    def broken(_op: str, _keys: Sequence[bytes]) -> None:
        raise RuntimeError("a bug in a store")

    rig.store.fault = broken
    assert rig.hierarchy.find_prefix(keys(1, 2)) == Prefix(["cpu"], False)
    assert rig.get(1, 2) == [0]
    assert rig.errors()["RuntimeError"] == 2
    rig.store.fault = None


def test_a_store_without_figures_has_its_last_ones(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is asked for blocks as before."""
    name, before = rig.store.name, rig.hierarchy.stats()
    for broken in (lambda: None, lambda: 1 / 0):
        monkeypatch.setattr(rig.store, "stats", broken)
        now = rig.hierarchy.stats()
        assert now["cpu"] == before["cpu"]
        assert now[name].capacity_bytes == before[name].capacity_bytes > 0
    assert now[name].errors == {"TypeError": 1, "ZeroDivisionError": 1}
    assert rig.hierarchy.traffic()[name].breaker == "closed"


@with_rig(num_slots=4)
def test_a_load_larger_than_the_slab_brings_what_fits(rig: Rig) -> None:
    rig.put(3)
    rig.put_below(1, 2, 4, 5, 6)
    ticket = rig.hierarchy.begin_load(keys(1, 2, 3, 4, 5, 6))
    assert rig.finish(ticket) == [0, 1, 2, 3]
    assert rig.traffic().promotion_allocation_failures == 1


@with_rig(num_slots=4)
def test_a_load_into_a_slab_that_is_all_pinned_brings_nothing(rig: Rig) -> None:
    rig.put(1, 2, 3, 4)
    rig.put_below(5)
    pinned = rig.hierarchy.begin_load(keys(1, 2, 3, 4))
    assert rig.get(5) == []
    assert rig.hierarchy.begin_store(keys(6)).keys == []
    rig.hierarchy.end_load(pinned)
    assert rig.get(5) == [0]


@with_rig(num_slots=4)
def test_short_of_room_the_tail_is_not_stored(rig: Rig) -> None:
    rig.put(1)
    pinned = rig.hierarchy.begin_load(keys(1))
    ticket = rig.hierarchy.begin_store(keys(10, 11, 12, 13, 14))
    assert (len(ticket.keys), ticket.num_refused) == (3, 2)
    rig.hierarchy.end_store(ticket, ok=True)
    assert rig.tiers(10, 11, 12, 13) == ["cpu"] * 3
    rig.hierarchy.end_load(pinned)


def test_clear_forgets_everything_also_what_is_under_way(rig: Rig) -> None:
    rig.put(1, 2)
    rig.put_below(3, 4)
    pinned = rig.hierarchy.begin_load(keys(1))
    storing = rig.hierarchy.begin_store(keys(5))
    rig.store.hold_loads = rig.store.hold_stores = True
    reading = rig.hierarchy.begin_load(keys(3))
    rig.put(*range(10, 23))  # some are being written down now
    assert ("store", 2) in rig.store.batches
    rig.hierarchy.clear()
    assert all(rig.tiers(n) == [] for n in (1, 2, 3, 4, 5, *range(10, 23)))
    rig.store.release()
    rig.hierarchy.end_store(storing, ok=True)
    assert rig.finish(reading) == []
    rig.hierarchy.end_load(pinned)
    assert rig.slab.keys() == []
    assert rig.slab.free_slots() == rig.slab.num_slots
    assert rig.store.stats().blocks == 0
    rig.store.hold_loads = rig.store.hold_stores = False


def test_close_does_not_unmap_memory_that_a_hung_read_may_write_to() -> None:
    rig = Rig(4)
    rig.put_below(1)
    rig.store.hold_loads = True
    ticket = rig.hierarchy.begin_load(keys(1))
    assert not rig.hierarchy.close(0.05)
    buffer = rig.slab.buffer(0)  # still there
    assert buffer.nbytes == LAYOUT.slot_bytes
    del buffer
    rig.store.release()
    rig.hierarchy.end_load(ticket)


def test_close_is_idempotent_and_closes_every_part() -> None:
    rig = Rig(4)
    rig.put(1)
    assert rig.hierarchy.close(1.0)
    assert rig.hierarchy.close(1.0)
    with pytest.raises(TierClosed):
        rig.slab.memory()
    with pytest.raises(TierClosed):
        rig.store.lookup(keys(1))


def test_without_a_store_the_slab_is_all_there_is() -> None:
    slab = CpuSlab(LAYOUT, 4 * LAYOUT.slot_bytes, populate_threads=1)
    hierarchy = Hierarchy(slab, [], wakeup=lambda: None)
    for number in range(8):
        hierarchy.end_store(hierarchy.begin_store(keys(number)), ok=True)
    assert not hierarchy.poll()
    assert hierarchy.find_prefix(keys(7, 6, 0)) == Prefix(["cpu", "cpu"], False)
    assert set(hierarchy.stats()) == {"cpu"}
    assert hierarchy.flush(0.0)
    assert hierarchy.close(1.0)


def test_a_poll_costs_nothing_while_nothing_happens(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stratakv.tiers.hierarchy.hierarchy.POLL_SECONDS", 1000.0)
    rig.put(1, 2)
    asked: list[None] = []
    free_slots = rig.slab.free_slots
    monkeypatch.setattr(rig.slab, "free_slots", lambda: (asked.append(None), free_slots())[1])
    rig.put(3)
    assert asked
    asked.clear()
    assert not rig.hierarchy.poll() and not rig.hierarchy.poll()
    assert not asked
    rig.put_below(9)
    rig.store.hold_loads = True
    ticket = rig.hierarchy.begin_load(keys(9))
    rig.hierarchy.poll()
    rig.store.release()
    assert rig.hierarchy.poll() and not ticket.waiting
    assert rig.finish(ticket) == [0]


def test_a_look_up_of_what_is_nowhere_asks_for_few_blocks(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    lookup = rig.store.lookup
    monkeypatch.setattr(
        rig.store, "lookup", lambda keys: (asked.append(len(keys)), lookup(keys))[1]
    )
    assert rig.tiers(*range(1000)) == []
    assert sum(asked) == FIRST_BLOCKS
    rig.put_below(*range(900))
    assert len(rig.tiers(*range(1000))) == 900
    assert len(asked) < 10
