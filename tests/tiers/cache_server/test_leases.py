# SPDX-License-Identifier: Apache-2.0
"""Leases hold slots as pins do, and give them back when their time is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.cache_server import leases
from stratakv.tiers.cache_server.leases import MAX_SECONDS, Leases
from stratakv.tiers.cpu import CpuSlab
from stratakv.tiers.errors import InvalidBlock, TierBusy

from ..blocks import SMALL, make_keys


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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


def test_a_leased_slot_is_not_evicted_until_the_lease_ends(slab: CpuSlab, clock: Clock) -> None:
    leased, other, new = make_keys(8)[:2], make_keys(8)[2:], make_keys(8, "new")
    held = Leases(slab, clock)
    fill(slab, leased + other)
    lease = held.grant(leased, 10.0)
    assert lease.slots == [0, 1]
    assert slab.reserve(new).count(None) == 2
    assert slab.lookup(leased) == [Answer.HIT] * 2
    clock.now += 9.9
    assert held.expire() == 0 and held.holds(lease.number)
    clock.now += 0.2
    assert not held.holds(lease.number)
    assert held.expire() == 1 and len(held) == 0
    slab.reserve(new[6:])
    assert slab.lookup(leased) == [Answer.MISS] * 2


def test_a_lease_covers_the_leading_keys_only(slab: CpuSlab, clock: Clock) -> None:
    keys = make_keys(4)
    fill(slab, [keys[0], keys[1], keys[3]])
    lease = Leases(slab, clock).grant(keys, 1.0)
    assert lease.keys == keys[:2]
    assert slab.stats().pinned_blocks == 2


def test_a_renewed_lease_runs_on_and_a_released_one_ends_once(slab: CpuSlab, clock: Clock) -> None:
    keys = make_keys(2)
    fill(slab, keys)
    held = Leases(slab, clock)
    lease = held.grant(keys, 5.0)
    clock.now += 4.0
    assert held.renew(lease.number, 5.0)
    clock.now += 4.0
    assert held.expire() == 0
    assert held.next_deadline() == lease.deadline
    assert held.release(lease.number)
    assert not held.release(lease.number)
    assert not held.renew(lease.number, 5.0)
    assert slab.stats().pinned_blocks == 0
    clock.now += 100.0
    assert held.expire() == 0
    assert held.next_deadline() is None


@pytest.mark.parametrize("seconds", [0.0, -1.0, MAX_SECONDS + 1, float("nan"), float("inf")])
def test_a_duration_out_of_range_is_refused(slab: CpuSlab, clock: Clock, seconds: float) -> None:
    with pytest.raises(InvalidBlock, match="a lease runs for"):
        Leases(slab, clock).grant(make_keys(1), seconds)


def test_leases_are_bounded(slab: CpuSlab, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "MAX_LEASES", 2)
    held = Leases(slab, clock)
    fill(slab, make_keys(1))
    for _ in range(2):
        held.grant(make_keys(1), 1.0)
    with pytest.raises(TierBusy):
        held.grant(make_keys(1), 1.0)
    clock.now += 2.0
    held.grant(make_keys(1), 1.0)
