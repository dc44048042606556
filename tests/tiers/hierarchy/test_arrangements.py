# SPDX-License-Identifier: Apache-2.0
"""How the hierarchy is arranged: inclusive or exclusive, with or without an admission filter."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from stratakv.tiers.admission import AdmissionFilter
from stratakv.tiers.base import Answer
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.policies.lru import LruPolicy
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.testing.memory_store import MemoryStore

from ..rig import LAYOUT, Rig, key, keys, with_rig


class Refusing(AdmissionFilter):
    """Refuses every block until its second asking, and notes what it is told."""

    learns = True

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.chains: list[list[bytes]] = []
        self.num_promoted = 0

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self.chains.append(list(chain))

    def promoted(self, count: int) -> None:
        self.num_promoted += count

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        verdicts = [key in self.seen for key in keys]
        self.seen += keys
        return verdicts


class Watching(LruPolicy):
    """Notes the prompts it is told of."""

    learns = True

    def __init__(self) -> None:
        super().__init__()
        self.chains: list[list[bytes]] = []

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self.chains.append(list(chain))


@with_rig(num_slots=16)
def test_inclusive_a_block_promoted_stays_below(rig: Rig) -> None:
    rig.put_below(1, 2)
    assert rig.get(1, 2) == [0, 1]
    assert rig.store.stats().blocks == 2


@with_rig(num_slots=16, inclusive=False)
def test_exclusive_a_block_promoted_leaves_the_store_and_comes_back(rig: Rig) -> None:
    rig.put_below(1, 2)
    assert rig.get(1, 2) == [0, 1]
    assert rig.store.stats().blocks == 0
    for number in range(10, 26):  # needs every slot
        rig.put(number)
    assert rig.tiers(1, 2) == ["ssd", "ssd"]
    assert rig.get(1, 2) == [0, 1]


@with_rig(num_slots=16, inclusive=False)
def test_exclusive_a_store_that_cannot_drop_costs_only_room(rig: Rig) -> None:
    rig.put_below(1)

    def broken(op: str, _keys: Sequence[bytes]) -> None:
        if op == "drop":
            raise OSError("the index is read-only")

    rig.store.fault = broken
    assert rig.get(1) == [0]
    assert rig.errors() == {"OSError": 1}
    rig.store.fault = None


@pytest.mark.parametrize("rig", [{"num_slots": 16, "admission": Refusing()}], indirect=True)
def test_what_the_filter_refuses_is_not_written_until_it_was_used_again(rig: Rig) -> None:
    rig.put(*range(1, 15))
    assert rig.store.written == []
    assert rig.traffic().unadmitted_blocks > 0
    refused = rig.traffic().unadmitted_blocks
    assert rig.get(1, 2) == [0, 1]  # used again: asked again
    rig.hierarchy.poll()
    assert set(rig.store.written) == set(keys(1, 2))
    assert rig.traffic().unadmitted_blocks == refused
    rig.put(*range(20, 36))
    assert rig.tiers(1, 2) == ["ssd", "ssd"]
    assert rig.tiers(3) == []
    assert rig.traffic().lost_blocks == 0, "a refused block is not a lost one"


@pytest.mark.parametrize("rig", [{"num_slots": 8, "admission": Refusing()}], indirect=True)
def test_refused_blocks_that_were_evicted_are_forgotten(rig: Rig) -> None:
    for number in range(200):
        rig.put(number)
    assert len(rig.hierarchy._write_backs._all[0]._refused) <= 2 * rig.slab.num_slots + 1


@pytest.mark.parametrize("rig", [{"num_slots": 16, "admission": Refusing()}], indirect=True)
def test_at_the_end_everything_is_written_whatever_the_filter_says(rig: Rig) -> None:
    rig.put(1, 2, 3)
    assert rig.hierarchy.flush(1.0)
    assert set(rig.store.written) == set(keys(1, 2, 3))


def test_policy_and_filter_are_told_of_prompts() -> None:
    policy, admission = Watching(), Refusing()
    rig, plain = Rig(8, policy=policy, admission=admission), Rig(8)
    rig.hierarchy.announce_prompt(keys(1, 2, 3))
    assert policy.chains == admission.chains == [[key(1), key(2), key(3)]]
    assert rig.hierarchy.learns and not plain.hierarchy.learns
    assert rig.hierarchy.close(1.0) and plain.hierarchy.close(1.0)


class Learning(MemoryStore):
    """A store that is told of prompts and, if a test says so, fails at it."""

    learns = True
    fails = False

    def __init__(self) -> None:
        super().__init__(LAYOUT, 100 * LAYOUT.page_bytes, name="learning")
        self.chains: list[list[bytes]] = []

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        if self.fails:
            raise OSError("nobody foresaw this")
        self.chains.append(list(chain))


def test_a_store_that_learns_is_told_of_prompts_and_its_faults_are_counted() -> None:
    other, store = MemoryStore(LAYOUT, 10**6, name="other"), Learning()
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
    hierarchy = Hierarchy(slab, [other, store], wakeup=lambda: None)
    assert hierarchy.learns, "for a store, though the slab evicts by plain LRU"
    hierarchy.announce_prompt(keys(1, 2, 3))
    store.fails = True
    hierarchy.announce_prompt(keys(4))
    assert store.chains == [keys(1, 2, 3)]
    assert hierarchy.stats()["learning"].errors == {"OSError": 1}
    store.learns = False
    assert not hierarchy.learns
    hierarchy.announce_prompt(keys(5))
    assert hierarchy.stats()["learning"].errors == {"OSError": 1}
    assert hierarchy.close(1.0)


def test_the_filter_is_told_how_many_blocks_were_promoted() -> None:
    admission = Refusing()
    rig = Rig(16, admission=admission)
    rig.put_below(1, 2, 3)
    assert rig.get(1, 2)[:2] == [0, 1]
    assert admission.num_promoted == 2
    assert rig.get(1, 2) == [0, 1]
    assert admission.num_promoted == 2, "the slab has them"
    assert rig.hierarchy.close(1.0)


def test_a_shared_store_gets_every_block_at_once_and_the_other_one_in_need() -> None:
    own = MemoryStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="own")
    shared = MemoryStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="shared")
    shared.is_shared = True
    slab = CpuSlab(LAYOUT, 16 * LAYOUT.slot_bytes, populate_threads=1)
    admission = Refusing()
    hierarchy = Hierarchy(
        slab, [own, shared], wakeup=lambda: None, options=HierarchyOptions(admission=admission)
    )
    ticket = hierarchy.begin_store(keys(1, 2))
    hierarchy.end_store(ticket, ok=True)
    hierarchy.poll()
    assert own.lookup(keys(1, 2)) == [Answer.MISS] * 2
    assert shared.lookup(keys(1, 2)) == [Answer.HIT] * 2
    hierarchy.poll()  # takes the completions in, which give the slots back
    slab.forget(slab.keys())
    assert hierarchy.find_prefix(keys(1, 2)).tiers == ["shared", "shared"]
    hierarchy.end_load(hierarchy.begin_load(keys(1, 2)))
    hierarchy.poll()
    assert slab.lookup(keys(1, 2)) == [Answer.HIT] * 2
    assert admission.num_promoted == 0, "it has no filter"
    assert hierarchy.flush(1.0)
    assert hierarchy.close(1.0)


@with_rig(num_slots=16)
def test_the_last_copy_of_a_block_counts_as_used_when_the_slab_gives_it_up(rig: Rig) -> None:
    rig.put(1, 2)
    for number in range(10, 21):  # writes them down
        rig.put(number)
    rig.put_below(50)
    store = rig.store
    assert store.lookup(keys(1, 2)) == [Answer.HIT] * 2
    order = store._policy.victims(100, lambda _key: True)
    assert order.index(key(1)) < order.index(key(50))
    for number in range(21, 31):  # takes their slots
        rig.put(number)
    assert rig.slab.lookup(keys(1, 2)) == [Answer.MISS] * 2
    order = store._policy.victims(100, lambda _key: True)
    assert order.index(key(50)) < order.index(key(2)) < order.index(key(1))
