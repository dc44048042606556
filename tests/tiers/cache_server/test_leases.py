# SPDX-License-Identifier: Apache-2.0
"""Leases hold slots as pins do, and give them back when their time is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.cache_server import leases
from stratakv.tiers.cache_server.leases import MAX_SECONDS, Lease, Leases, PinnedBlocks
from stratakv.tiers.errors import InvalidBlock, TierBusy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.wire.status import TooMuch

from ...clock import Clock
from ..blocks import SMALL, make_keys


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slab() -> Iterator[CpuSlab]:
    slab = CpuSlab(SMALL, 8 * SMALL.slot_bytes, populate_threads=1)
    yield slab
    slab.close()


def fill(slab: CpuSlab, keys: list[bytes]) -> None:
    slab.reserve(keys)
    slab.commit(keys, [True] * len(keys))


class SlabLeases(Leases[list[bytes]]):
    """Leases on blocks of a slab, as a tenant store grants them."""

    def __init__(self, slab: CpuSlab, clock: Clock, most_each: int = 100) -> None:
        super().__init__(lambda lease: self.pins.unpin(lease.held), most_each, clock)
        self.pins = PinnedBlocks(slab)

    def lend(self, keys: Sequence[bytes], seconds: float, owner: str = "") -> Lease[list[bytes]]:
        lease = self.grant_lease([], seconds, owner)
        lease.held += self.pins.pin(keys)
        return lease

    def end(self, number: int, owner: str = "") -> bool:
        lease = self.find_lease(number, owner)
        if lease is not None:
            self.end_lease(lease)
            self.pins.unpin(lease.held)
        return lease is not None


def test_a_leased_slot_is_not_evicted_until_the_lease_ends(slab: CpuSlab, clock: Clock) -> None:
    leased, other, new = make_keys(8)[:2], make_keys(8)[2:], make_keys(8, "new")
    held = SlabLeases(slab, clock)
    fill(slab, leased + other)
    lease = held.lend(leased, 10.0)
    assert lease.held == leased and slab.stats().pinned_blocks == 2
    assert all(key in held.pins for key in leased)
    assert slab.reserve(new).count(None) == 2
    assert slab.lookup(leased) == [Answer.HIT] * 2
    clock.now += 9.9
    assert held.expire() == 0 and held.find_lease(lease.number) is lease
    clock.now += 0.2
    assert held.expire() == 1 and len(held) == 0
    assert held.find_lease(lease.number) is None and leased[0] not in held.pins
    slab.reserve(new[6:])
    assert slab.lookup(leased) == [Answer.MISS] * 2


def test_a_lease_covers_the_leading_keys_only(slab: CpuSlab, clock: Clock) -> None:
    keys = make_keys(4)
    fill(slab, [keys[0], keys[1], keys[3]])
    lease = SlabLeases(slab, clock).lend(keys, 1.0)
    assert lease.held == keys[:2]
    assert slab.stats().pinned_blocks == 2


def test_a_released_lease_ends_once(slab: CpuSlab, clock: Clock) -> None:
    keys = make_keys(2)
    fill(slab, keys)
    held = SlabLeases(slab, clock)
    lease = held.lend(keys, 5.0)
    clock.now += 4.0
    assert held.expire() == 0
    assert held.next_deadline() == lease.deadline
    assert held.end(lease.number)
    assert not held.end(lease.number)
    assert slab.stats().pinned_blocks == 0
    clock.now += 100.0
    assert held.expire() == 0
    assert held.next_deadline() is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_SECONDS + 1, float("nan"), float("inf")])
def test_a_duration_out_of_range_is_refused(slab: CpuSlab, clock: Clock, seconds: float) -> None:
    with pytest.raises(InvalidBlock, match="a lease runs for"):
        SlabLeases(slab, clock).lend(make_keys(1), seconds)


def test_leases_are_bounded(slab: CpuSlab, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 2)
    held = SlabLeases(slab, clock)
    fill(slab, make_keys(1))
    for _ in range(2):
        held.lend(make_keys(1), 1.0)
    with pytest.raises(TierBusy):
        held.lend(make_keys(1), 1.0)
    clock.now += 2.0
    held.lend(make_keys(1), 1.0)


def test_a_lease_past_its_time_is_not_found_though_nobody_has_swept(
    slab: CpuSlab, clock: Clock
) -> None:
    fill(slab, make_keys(1))
    held = SlabLeases(slab, clock)
    lease = held.lend(make_keys(1), 1.0)
    clock.now += 1.0
    assert not held.end(lease.number)
    assert slab.stats().pinned_blocks == 0 and len(held) == 0


def test_an_owner_has_so_many_leases_and_cannot_touch_those_of_others(
    slab: CpuSlab, clock: Clock
) -> None:
    fill(slab, make_keys(1))
    held = SlabLeases(slab, clock, most_each=2)
    first, _ = held.lend(make_keys(1), 1.0, "ann"), held.lend(make_keys(1), 5.0, "ann")
    with pytest.raises(TooMuch, match="2 leases of ann run already"):
        held.lend(make_keys(1), 1.0, "ann")
    other = held.lend(make_keys(1), 5.0, "bob")
    assert held.find_lease(other.number, "ann") is None and not held.end(other.number, "ann")
    clock.now += 2.0  # the first one's time is over
    assert not held.end(first.number, "ann")
    held.lend(make_keys(1), 1.0, "ann")
    assert held.end(other.number, "bob") and len(held) == 2


def test_a_block_in_two_leases_is_pinned_until_both_have_ended(slab: CpuSlab, clock: Clock) -> None:
    (key,) = make_keys(1)
    fill(slab, [key])
    held = SlabLeases(slab, clock)
    first, second = held.lend([key], 1.0), held.lend([key, key], 2.0)
    assert held.end(first.number)
    assert key in held.pins and slab.stats().pinned_blocks == 1
    assert held.end(second.number)
    assert key not in held.pins and slab.stats().pinned_blocks == 0


def test_leases_that_ended_early_leave_nothing_behind(clock: Clock) -> None:
    """A client that takes a lease and gives it back, again and again, grew the heap for an hour."""
    ended: list[int] = []
    held = Leases[int](lambda lease: ended.append(lease.held), clock=clock)
    kept = held.grant_lease(0, 100.0)
    for number in range(1, 1000):
        held.end_lease(held.grant_lease(number, 50.0 + number % 7))
    assert len(held._deadlines) < 100
    assert held.next_deadline() == kept.deadline and [*held] == [kept]
    clock.now += 100.0
    assert held.expire() == 1 and ended == [0]
    assert held.next_deadline() is None


def test_leases_end_in_the_order_of_their_deadlines(clock: Clock) -> None:
    ended: list[str] = []
    held = Leases[str](lambda lease: ended.append(lease.held), clock=clock)
    for name, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0), ("d", 4.0)):
        held.grant_lease(name, seconds)
    clock.now += 3.0
    assert held.expire() == 3 and ended == ["a", "b", "c"]
    assert [lease.held for lease in held] == ["d"]
