# SPDX-License-Identifier: Apache-2.0
"""Writing down to the store below: when, what, in which order, and what a slow store costs."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from stratakv.tiers.admission import AdmissionFilter, AdmitAll
from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierBusy
from stratakv.tiers.hierarchy.guarded_store import DAMAGED
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.write_back import BATCHES_IN_FLIGHT
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.tag import Proof, payload_digest
from stratakv.tiers.testing.memory_store import MemoryStore

from ..rig import LAYOUT, WAIT_SECONDS, Rig, content, key, keys, with_rig


def test_eviction_loses_nothing_where_the_disk_keeps_up(rig: Rig) -> None:
    for number in range(0, 100, 2):
        rig.put(number, number + 1)
    assert rig.hierarchy.stats()["cpu"].dropped_stores == 0
    for number in range(100):
        assert rig.get(number) == [0]


def test_nothing_is_written_while_the_slab_has_room(rig: Rig) -> None:
    rig.put(*range(12))
    assert rig.store.batches == []
    rig.put(12)
    assert rig.store.batches
    # The longest unused first: of blocks stored together that is the tail.
    assert rig.store.written[0] == key(11)


def test_a_used_block_is_written_later(rig: Rig) -> None:
    rig.put(*range(12))
    rig.get(11)
    rig.put(12)
    assert rig.store.written[0] == key(10)


def test_a_block_forgotten_while_it_is_written_goes_when_it_arrives(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put(*range(13))
    gone, stays = rig.store.written[:2]
    rig.hierarchy.forget_blocks([gone])
    rig.store.hold_stores = False
    rig.store.release()
    rig.hierarchy.poll()
    assert rig.store.lookup([gone, stays]) == [Answer.MISS, Answer.HIT]


def test_blocks_go_down_with_their_proofs_and_damaged_ones_are_forgotten(rig: Rig) -> None:
    """One slot changes after its block came. Nobody is served it, from the slab either."""
    names = keys(*range(13))
    proofs = [Proof(name[:16], payload_digest(content(name))) for name in names]
    ticket = rig.hierarchy.begin_store(names)
    for name, slot in zip(ticket.keys, ticket.slots, strict=True):
        rig.slab.buffer(slot)[: LAYOUT.page_bytes] = content(name)
    rig.slab.buffer(ticket.slots[-1])[7] ^= 1
    rig.hierarchy.end_store(ticket, ok=True, proofs=proofs)
    for _ in range(2):
        rig.hierarchy.poll()
    assert key(12) in rig.store.written and rig.tiers(12) == []
    assert rig.errors() == {DAMAGED: 1}
    below = rig.store.written[1]
    buffer = memoryview(bytearray(LAYOUT.slot_bytes))
    assert rig.store.load([below], [buffer]).result(0) == [proofs[names.index(below)]]


def test_a_slow_disk_delays_nobody_and_the_loss_is_counted(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put_below(200)
    for number in range(60):
        rig.put(number)
    assert rig.get(59) == [0]
    assert rig.get(200) == [0]
    kept = [number for number in range(60) if rig.tiers(number)]
    # At most three eighths of the slab are held by batches that do not end.
    assert len(kept) >= rig.slab.num_slots - 1
    lost = rig.hierarchy.stats()["cpu"].dropped_stores
    assert lost == 60 - len(kept)
    traffic = rig.traffic()
    assert (traffic.lost_blocks, traffic.active_cascades) == (lost, BATCHES_IN_FLIGHT)
    assert 1 <= traffic.lost_stores <= lost
    rig.store.hold_stores = False
    rig.store.release()
    rig.hierarchy.poll()
    assert (rig.traffic().cascade_failures, rig.traffic().active_promotions) == (0, 0)


@with_rig(keeps_unwritten=True, watermark=1.0)
def test_promotions_do_not_evict_what_is_still_to_be_written(rig: Rig) -> None:
    """Chunks below LMCache, told to be kept, were lost to loads that came before their write."""
    rig.store.hold_stores = True
    rig.put_below(*range(100, 112))
    rig.put(*range(8))
    assert rig.hierarchy.num_unwritten == 8
    for first in range(100, 112, 4):  # the last four take slots of earlier ones
        assert rig.get(*range(first, first + 4)) == [0, 1, 2, 3]
    assert rig.tiers(*range(8)) == ["cpu"] * 8
    assert (rig.traffic().lost_blocks, rig.traffic().promotion_allocation_failures) == (0, 0)
    rig.store.hold_stores = False


@with_rig(keeps_unwritten=True, watermark=1.0)
def test_where_all_is_still_to_be_written_what_comes_goes_without(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put_below(100)
    rig.put(*range(16))
    assert rig.get(100) == []
    assert rig.hierarchy.begin_store(keys(16)).num_refused == 1
    assert rig.tiers(*range(16)) == ["cpu"] * 16
    rig.store.hold_stores = False
    rig.store.release()
    rig.hierarchy.poll()
    assert rig.get(100) == [0]


def test_a_busy_store_is_asked_again(rig: Rig) -> None:
    def busy(op: str, _keys: Sequence[bytes]) -> None:
        if op == "store":
            raise TierBusy("full")

    rig.store.fault = busy
    rig.put(*range(14))
    assert rig.errors()["TierBusy"] > 0
    assert rig.traffic().cascade_failures == 0
    rig.store.fault = None
    rig.hierarchy.poll()
    assert rig.store.lookup(keys(13)) == [Answer.HIT]


def test_a_store_that_breaks_while_writing_costs_only_its_copy(rig: Rig) -> None:
    def broken(op: str, _keys: Sequence[bytes]) -> None:
        if op == "store":
            raise OSError("the disk is gone")

    rig.store.fault = broken
    rig.put(*range(14))
    assert rig.errors()["OSError"] > 0
    assert rig.traffic().cascade_failures > 0
    assert rig.get(*range(14)) == list(range(14))
    rig.store.fault = None


def test_a_flush_writes_all_that_the_store_lacks(rig: Rig) -> None:
    rig.put_below(2)
    rig.put(1, 2, 3)
    assert rig.hierarchy.flush(WAIT_SECONDS)
    assert sorted(rig.store.written) == keys(1, 3)
    assert rig.store.lookup(keys(1, 2, 3)) == [Answer.HIT] * 3


def test_a_flush_into_a_hung_store_ends_in_time(rig: Rig) -> None:
    rig.put(1, 2, 3)
    rig.store.hold_stores = True
    began = time.monotonic()
    assert not rig.hierarchy.flush(0.1)
    assert 0.1 <= time.monotonic() - began < WAIT_SECONDS
    rig.store.hold_stores = False


def test_a_flush_into_a_small_store_keeps_the_most_recently_used() -> None:
    slab = CpuSlab(LAYOUT, 16 * LAYOUT.slot_bytes, populate_threads=1)
    unit = LAYOUT.slot_bytes + 4096
    store = MemoryStore(LAYOUT, 4 * unit)
    hierarchy = Hierarchy(slab, [store], wakeup=lambda: None)
    for number in range(8):
        hierarchy.end_store(hierarchy.begin_store(keys(number)), ok=True)
    assert hierarchy.flush(WAIT_SECONDS)
    assert store.lookup(keys(*range(8))) == [Answer.MISS] * 4 + [Answer.HIT] * 4
    assert hierarchy.close(WAIT_SECONDS)


def test_a_flush_does_not_write_down_what_was_forgotten(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put(*range(13))
    written = list(rig.store.written)
    rig.hierarchy.clear()
    first_batch = rig.store.held[0]
    rig.store.held.remove(first_batch)
    first_batch()
    assert not rig.hierarchy.flush(0.02)  # the others are still being written, and pinned
    rig.store.release()
    assert rig.hierarchy.flush(WAIT_SECONDS)
    assert rig.store.written == written
    assert rig.store.stats().blocks == 0
    rig.store.hold_stores = False


def _full_rig(admission: AdmissionFilter | None = None) -> Rig:
    """64 slots, each with a block that the store has; batches of 8."""
    rig = Rig(64, admission=AdmitAll() if admission is None else admission)
    for number in range(64):
        rig.put(number)
    assert sorted(rig.store.written) == keys(*range(64))
    return rig


def test_of_more_than_a_few_slots_a_batch_is_a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratakv.tiers.hierarchy.write_back.FEW_SLOTS", 64)
    rig = Rig(64)
    rig.store.hold_stores = True
    for number in range(64):
        rig.put(number)
    # Three eighths at the most are held by what is being written.
    assert rig.store.batches == [("store", 16), ("store", 8)]
    rig.store.hold_stores = False
    rig.store.release()
    rig.hierarchy.poll()
    assert rig.hierarchy.close(WAIT_SECONDS)


def test_a_batch_waits_to_be_full() -> None:
    rig = _full_rig()
    for number in range(64, 71):
        rig.put(number)
    assert len(rig.store.written) == 64
    rig.put(71)
    assert rig.store.batches[-1] == ("store", 8)
    assert rig.store.written[64:] == keys(*range(64, 72))
    assert rig.hierarchy.close(WAIT_SECONDS)


class _EveryFourth(AdmissionFilter):
    """Of block 64 and those that follow."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        self.asked += keys
        numbers = [int.from_bytes(key[:32], "big") for key in keys]
        return [number < 64 or number % 4 == 0 for number in numbers]


def test_what_a_filter_leaves_of_a_batch_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratakv.tiers.hierarchy.write_back.FILL_SECONDS", 1e3)
    admission = _EveryFourth()
    rig = _full_rig(admission)
    for number in range(64, 92):
        rig.put(number)
    assert rig.traffic().unadmitted_blocks > 8
    assert len(rig.store.written) == 64
    rig.put(92)
    assert rig.store.batches[-1] == ("store", 8)
    assert rig.store.written[64:] == keys(*range(64, 96, 4))
    assert admission.asked[64:] == keys(*range(64, 93))  # once about each
    assert rig.traffic().lost_blocks == 0
    assert rig.hierarchy.close(WAIT_SECONDS)


def test_what_a_filter_leaves_of_a_batch_goes_after_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stratakv.tiers.hierarchy.write_back.FILL_SECONDS", 0.05)
    rig = _full_rig(_EveryFourth())
    rig.woken.clear()
    rig.put(*range(64, 72))
    while rig.store.written[64:] != keys(68, 64):
        assert rig.woken.wait(WAIT_SECONDS), "no wake-up came"
        rig.woken.clear()
        rig.hierarchy.poll()
    assert rig.hierarchy.close(WAIT_SECONDS)


def test_a_batch_that_nothing_fills_goes_after_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratakv.tiers.hierarchy.write_back.FILL_SECONDS", 0.05)
    rig = _full_rig()
    rig.woken.clear()
    rig.put(64)
    while rig.store.written[64:] != keys(64):
        assert rig.woken.wait(WAIT_SECONDS), "no wake-up came"  # an earlier one may come first
        rig.woken.clear()
        rig.hierarchy.poll()
    assert rig.hierarchy.close(WAIT_SECONDS)


def test_a_later_batch_goes_after_its_own_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm that is set was for an earlier batch, which filled up before."""
    monkeypatch.setattr("stratakv.tiers.hierarchy.write_back.FILL_SECONDS", 0.2)
    rig = _full_rig()
    rig.put(64)
    for number in range(65, 72):
        rig.put(number)
    assert rig.store.written[64:] == keys(*range(64, 72))
    time.sleep(0.1)
    rig.hierarchy.poll()
    rig.put(72)
    began = time.monotonic()
    while rig.store.written[72:] != keys(72):
        assert rig.woken.wait(WAIT_SECONDS), "no wake-up came"
        rig.woken.clear()
        rig.hierarchy.poll()
    assert 0.15 < time.monotonic() - began < WAIT_SECONDS
    assert rig.hierarchy.close(WAIT_SECONDS)


def test_a_block_that_goes_next_is_written_at_once() -> None:
    rig = _full_rig()
    rig.put(64)
    rig.get(*range(2, 64))
    rig.put(65)  # in the place of 1; the next to go is 64
    assert rig.store.written[64:] == keys(64, 65)
    rig.hierarchy.poll()
    rig.put(66)
    assert rig.tiers(64) == ["ssd"]
    assert rig.traffic().lost_blocks == 0
    assert rig.hierarchy.close(WAIT_SECONDS)


def test_the_slots_of_a_write_that_fails_later_are_given_back(rig: Rig) -> None:
    """The store takes the batch, and its future ends with an error."""

    def broken(op: str, _keys: Sequence[bytes]) -> None:
        if op == "store":
            raise OSError("the disk is gone")

    rig.store.hold_stores = True
    rig.put(*range(14))
    assert rig.slab.stats().pinned_blocks > 0
    rig.store.fault = broken
    rig.store.hold_stores = False
    rig.store.release()
    rig.hierarchy.poll()
    assert rig.errors()["OSError"] > 0
    assert rig.slab.stats().pinned_blocks == 0
    rig.put(*range(20, 34))  # all slots can be used again
    assert rig.get(*range(20, 34)) == list(range(14))
    rig.store.fault = None
