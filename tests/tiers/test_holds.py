# SPDX-License-Identifier: Apache-2.0
"""Holds: what is held is not evicted before its time, and is held no longer."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.holds import Hold, Holds
from stratakv.tiers.policies.known_policies import POLICIES, policy_factory
from stratakv.tiers.slab import cpu_slab as cpu_module
from stratakv.tiers.slab.cpu_slab import HELD_SHARE, CpuSlab
from stratakv.tiers.ssd.index import slot_index as index_module
from stratakv.tiers.ssd.index.slot_index import Entry, SlotIndex

from ..clock import Clock
from .blocks import SMALL, make_keys


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (cpu_module, index_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def slab(clock: Clock) -> Iterator[CpuSlab]:
    made = CpuSlab(SMALL, 20 * SMALL.slot_bytes, populate_threads=1)
    yield made
    made.close()


def fill(slab: CpuSlab, keys: list[bytes]) -> list[int | None]:
    slots = slab.reserve(keys)
    taken = [key for key, slot in zip(keys, slots, strict=True) if slot is not None]
    slab.commit(taken, [True] * len(taken))
    return slots


@pytest.mark.parametrize("seed", range(20))
def test_keys_are_held_as_long_as_some_hold_says(seed: int) -> None:
    rng = random.Random(seed)
    holds, live, now = Holds(12), list[tuple[Hold, float]](), 0.0
    keys = make_keys(30)
    for _ in range(300):
        action = rng.random()
        if action < 0.4:
            wanted = rng.sample(keys, rng.randrange(8))
            until = now + rng.choice([-1.0, 0.0, 1.0, 5.0])
            before = {key for hold, _ in live for key in hold.keys}
            hold = holds.create_hold(wanted, until, now)
            assert list(hold.keys) == wanted[: len(hold.keys)]
            if len(hold.keys) < len(wanted):
                assert wanted[len(hold.keys)] not in before
                assert len(before.union(hold.keys)) == 12
            live.append((hold, until))
        elif action < 0.7 and live:
            holds.end_hold(rng.choice(live)[0])
        else:
            now += rng.random()
            holds.expire(now)
        live = [(hold, until) for hold, until in live if not hold.is_over]
        assert all(until > now for _, until in live)
        held = {key for hold, _ in live for key in hold.keys}
        assert {key for key in keys if key in holds.times} == held
        assert len(holds.times) == len(held) <= 12
        assert len(holds._ends) <= 2 * len(live) + 70
    holds.clear()
    assert not holds.times and all(hold.is_over for hold, _ in live)


def test_the_slab_evicts_others_until_the_time_is_over(slab: CpuSlab, clock: Clock) -> None:
    mine, others = make_keys(4), make_keys(100)[4:]
    fill(slab, mine[:3])
    slab.hold(mine, 10.0)  # the fourth is still on its way in
    fill(slab, mine[3:])
    for start in range(0, 90, 15):
        fill(slab, others[start : start + 15])
    assert slab.lookup(mine) == [Answer.HIT] * 4
    clock.now += 10.0
    fill(slab, others[:20])
    assert slab.lookup(mine) == [Answer.MISS] * 4


def test_no_more_than_a_share_of_the_slab_is_held(slab: CpuSlab) -> None:
    keys = make_keys(60)
    fill(slab, keys[:20])
    hold = slab.hold(keys[:20], 10.0)
    assert list(hold.keys) == keys[: int(HELD_SHARE * 20)]
    assert None not in fill(slab, keys[20:32]), "the rest is for others"
    assert slab.lookup(keys[:8]) == [Answer.HIT] * 8
    assert fill(slab, keys[40:60]).count(None) == 8
    slab.release(hold)
    slab.release(hold)
    assert None not in fill(slab, keys[20:40])


def test_what_is_forgotten_is_held_no_longer(slab: CpuSlab) -> None:
    keys = make_keys(40)
    fill(slab, keys[:20])
    slab.hold(keys[:8], 10.0)
    slab.forget(keys[:1])
    assert slab.free_slots() == 1
    slab.clear()
    assert None not in fill(slab, keys[20:40])


@pytest.mark.parametrize("policy", [None, *POLICIES])
def test_the_disk_evicts_others_until_the_time_is_over(policy: str | None, clock: Clock) -> None:
    index = SlotIndex(10)
    if policy is not None:
        index.choose_by(policy_factory(policy)(10))
    keys = make_keys(10)
    index.publish([Entry(key, slot, 1) for key, slot in zip(keys, index.allocate(10), strict=True)])
    assert index.retain_keys([*keys[:3], b"?" * 32, keys[5]], clock.now + 5.0, clock.now) == 3
    victims = {index._keys[slot] for slot in index._victims(10)}
    assert victims == set(keys[3:])
    assert index.retain_keys(keys, clock.now + 5.0, clock.now) == 5, "half of the slots"
    clock.now += 5.0
    assert len(index._victims(10)) == 10
