# SPDX-License-Identifier: Apache-2.0
"""The hierarchy over a real slab, with a store in memory that fails, hangs and refuses as told.

Every test ends with `check_idle`: no slot reserved, none pinned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.block import BlockLayout, pack_key
from stratakv.tiers.cpu import CpuSlab
from stratakv.tiers.errors import TierBusy, TierClosed
from stratakv.tiers.hierarchy import Hierarchy
from stratakv.tiers.memory import MemoryStore
from stratakv.tiers.read_up import LoadTicket
from stratakv.tiers.traffic import Traffic

LAYOUT = BlockLayout(1, 4, 1, 8, "float32")
WAIT_SECONDS = 10.0


def key(number: int) -> bytes:
    return pack_key(number.to_bytes(32, "big"))


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def content(of: bytes) -> bytes:
    return (of * 7)[: LAYOUT.page_bytes]


class HeldStore(MemoryStore):
    """A store whose loads and stores end when the test says so."""

    def __init__(self, num_blocks: int = 1000) -> None:
        super().__init__(LAYOUT, num_blocks * LAYOUT.page_bytes, name="ssd")
        self.hold_loads = False
        self.hold_stores = False
        self.batches: list[tuple[str, int]] = []
        self.written: list[bytes] = []
        self.held: list[Callable[[], None]] = []

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[Answer]]:
        self.batches.append(("load", len(keys)))
        if not self.hold_loads:
            return super().load(keys, buffers)
        return self._hold(lambda: super(HeldStore, self).load(keys, buffers))

    def store(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Future[list[bool]]:
        self.written += keys
        self.batches.append(("store", len(keys)))
        if not self.hold_stores:
            return super().store(keys, buffers)
        return self._hold(lambda: super(HeldStore, self).store(keys, buffers))

    def release(self) -> None:
        held, self.held = self.held, []
        threads = [threading.Thread(target=end) for end in held]  # as a real store would
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_SECONDS)

    def _hold(self, work: Callable[[], Future]) -> Future:
        future: Future = Future()

        def end() -> None:
            try:
                future.set_result(work().result(0))
            except Exception as error:
                future.set_exception(error)

        self.held.append(end)
        return future


class Rig:
    """A hierarchy, its parts, and the wake-ups it gave."""

    def __init__(self, num_slots: int, **options: float) -> None:
        self.slab = CpuSlab(LAYOUT, num_slots * LAYOUT.slot_bytes, populate_threads=1)
        self.store = HeldStore()
        self.woken = threading.Event()
        self.hierarchy = Hierarchy(self.slab, [self.store], wakeup=self.woken.set, **options)

    def put(self, *numbers: int) -> None:
        """Blocks leave a pool."""
        ticket = self.hierarchy.begin_store(keys(*numbers))
        for name, slot in zip(ticket.keys, ticket.slots, strict=True):
            self.slab.buffer(slot)[: LAYOUT.page_bytes] = content(name)
        self.hierarchy.end_store(ticket, ok=True)
        self.hierarchy.poll()

    def put_below(self, *numbers: int) -> None:
        """Blocks that only the store has."""
        names = keys(*numbers)
        buffers = [memoryview(bytearray(content(name))) for name in names]
        assert MemoryStore.store(self.store, names, buffers).result(0) == [True] * len(names)

    def finish(self, ticket: LoadTicket) -> list[int]:
        """Wait for a load, check what it brought, end it; the indices that are there."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not ticket.done():
            assert self.woken.wait(deadline - time.monotonic()), "no wake-up came"
            self.woken.clear()
            self.hierarchy.poll()
        there = [i for i, slot in enumerate(ticket.slots) if slot is not None]
        for i in there:
            buffer = self.slab.buffer(ticket.slots[i])
            assert bytes(buffer[: LAYOUT.page_bytes]) == content(ticket.keys[i])
        self.hierarchy.end_load(ticket)
        return there

    def get(self, *numbers: int) -> list[int]:
        ticket = self.hierarchy.begin_load(keys(*numbers))
        self.hierarchy.poll()
        return self.finish(ticket)

    def tiers(self, *numbers: int) -> list[str]:
        return self.hierarchy.find(keys(*numbers)).tiers

    def errors(self) -> dict[str, int]:
        return self.hierarchy.stats()["ssd"].errors

    def traffic(self) -> Traffic:
        return self.hierarchy.traffic()["ssd"]

    def check_idle(self) -> None:
        self.hierarchy.poll()
        known = self.slab.keys()
        assert self.slab.num_slots - self.slab.free_slots() == len(known), "a slot is reserved"
        assert self.slab.coldest(self.slab.num_slots) == known, "a slot is pinned"


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    options = dict(getattr(request, "param", {}))
    rig = Rig(options.pop("num_slots", 16), **options)
    yield rig
    rig.store.release()
    assert rig.hierarchy.flush(WAIT_SECONDS)
    rig.check_idle()
    assert rig.hierarchy.close(WAIT_SECONDS)


def with_rig(**options: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rig", [options], indirect=True)


def test_a_stored_block_is_found_and_loaded(rig: Rig) -> None:
    rig.put(1, 2, 3)
    assert rig.hierarchy.find(keys(1, 2, 9, 3)) == (["cpu", "cpu"], False)
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


def test_a_slow_disk_delays_nobody_and_the_loss_is_counted(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put_below(200)
    for number in range(60):
        rig.put(number)
    assert rig.get(59) == [0]
    assert rig.get(200) == [0]
    kept = [number for number in range(60) if rig.tiers(number)]
    # At most a quarter of the slab is held by batches that do not end.
    assert len(kept) >= rig.slab.num_slots - 1
    lost = rig.hierarchy.stats()["cpu"].dropped_stores
    assert lost == 60 - len(kept)
    traffic = rig.traffic()
    assert (traffic.lost_blocks, traffic.active_cascades) == (lost, 2)
    assert 1 <= traffic.lost_stores <= lost
    rig.store.hold_stores = False
    rig.store.release()
    rig.hierarchy.poll()
    assert (rig.traffic().cascade_failures, rig.traffic().active_promotions) == (0, 0)


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
    assert not first.done()
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


def test_blocks_on_their_way_in_are_pending(rig: Rig) -> None:
    rig.put_below(1)
    rig.put(5)
    rig.store.hold_loads = True
    reading = rig.hierarchy.begin_load(keys(1))
    storing = rig.hierarchy.begin_store(keys(2))
    assert rig.hierarchy.find(keys(1)) == ([], True)
    assert rig.hierarchy.find(keys(5, 2)) == (["cpu"], True)
    assert rig.finish(rig.hierarchy.begin_load(keys(5, 2, 1))) == [0]  # as far as it is known
    rig.hierarchy.end_store(storing, ok=False)
    rig.store.release()
    assert rig.finish(reading) == [0]
    assert rig.hierarchy.find(keys(1)) == (["cpu"], False)


@with_rig(read_seconds=0.05)
def test_a_late_read_fails_and_cannot_touch_a_slot_of_others(rig: Rig) -> None:
    rig.put_below(1, 2)
    rig.put(3)
    rig.store.hold_loads = True
    began = time.monotonic()
    ticket = rig.hierarchy.begin_load(keys(3, 1, 2))
    assert rig.finish(ticket) == [0]
    assert time.monotonic() - began < 2.0
    assert rig.errors() == {"late": 1}
    # Nobody waits for it any more, and nobody joins it.
    assert rig.hierarchy.find(keys(1)) == ([], False)
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
    assert rig.hierarchy.find(keys(1, 2)) == (["cpu"], False)
    assert rig.get(1, 2) == [0]
    assert rig.errors()["RuntimeError"] == 2
    rig.store.fault = None


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
    assert 0.1 <= time.monotonic() - began < 2.0
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


def test_a_flush_does_not_write_down_what_was_forgotten(rig: Rig) -> None:
    rig.store.hold_stores = True
    rig.put(*range(13))
    written = list(rig.store.written)
    rig.hierarchy.clear()
    first_batch, _ = rig.store.held
    rig.store.held.remove(first_batch)
    first_batch()
    assert not rig.hierarchy.flush(0.02)  # the second batch is still being written, and pinned
    rig.store.release()
    assert rig.hierarchy.flush(WAIT_SECONDS)
    assert rig.store.written == written
    assert rig.store.stats().blocks == 0
    rig.store.hold_stores = False


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
    assert hierarchy.find(keys(7, 6, 0)) == (["cpu", "cpu"], False)
    assert set(hierarchy.stats()) == {"cpu"}
    assert hierarchy.flush(0.0)
    assert hierarchy.close(1.0)
