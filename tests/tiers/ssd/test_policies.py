# SPDX-License-Identifier: Apache-2.0
"""The SSD tier with an eviction policy: who is evicted, who never is, and what it costs to ask."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path

import pytest

from stratakv.tiers.base import Answer
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.policies.known_policies import DEFAULT_SSD_POLICY, POLICIES, policy_factory
from stratakv.tiers.ssd.folder import open_store as opening
from stratakv.tiers.ssd.index.index_file import Row
from stratakv.tiers.ssd.index.slot_index import Entry, SlotIndex
from stratakv.tiers.ssd.store import SsdStore

from ..blocks import ODD, SMALL, filled_buffers, make_keys
from ..store_contract import SECONDS, check_store, fetch, put
from .stores import Open, batch_of, store_keys

SLOTS = 24


def index_with(policy: str, num_slots: int = SLOTS, rows: list[Row] | None = None) -> SlotIndex:
    index = SlotIndex(num_slots, [batch_of(rows)] if rows else ())
    index.choose_by(policy_factory(policy)(num_slots))
    return index


class Owner:
    """What the writer and the readers do with an index, without a disk."""

    def __init__(self, index: SlotIndex) -> None:
        self.index = index
        self.generation = 0
        self.pinned: list[Entry] = []

    def take_in(self, keys: list[bytes]) -> list[bytes]:
        """Evict for new blocks and publish as many as fit, head first; the keys that went."""
        before = set(self.index.keys())
        self.index.make_room(len(keys))
        self.index.free_entries(self.index.take_leaving())
        entries = []
        for key, slot in zip(keys, self.index.allocate(len(keys)), strict=False):
            self.generation += 1
            entries.append(Entry(key, slot, self.generation))
        gone = before.difference(self.index.keys())
        self.index.publish(entries)
        return sorted(gone)

    def pin(self, keys: list[bytes]) -> None:
        self.pinned += [entry for entry in self.index.pin(keys) if entry is not None]

    def unpin(self, count: int) -> None:
        for entry in self.pinned[:count]:
            self.index.unpin(entry)
        del self.pinned[:count]


def live(owners: list[Owner], rng: random.Random, steps: int, *, told: bool) -> None:
    """The same random life for all of them; whatever one evicts, all of them do."""
    keys = make_keys(80)
    for now in range(steps):
        start = rng.randrange(len(keys) - 8)
        chain = keys[start : start + rng.randrange(1, 9)]
        used, unpinned, gone = rng.sample(keys, 3), rng.randrange(4), rng.sample(keys, 1)
        evicted = []
        for owner in owners:
            if told:
                owner.index.observe_chain(chain, float(now))
            held = [key for key in chain if key in owner.index]
            owner.pin(held)
            evicted.append(owner.take_in([key for key in chain if key not in owner.index]))
            busy = {entry.key for entry in owner.pinned}
            assert not busy.intersection(evicted[-1]), "it is being read"
            owner.unpin(unpinned + len(owner.pinned) // 3)
            owner.index.touch([key for key in used if key in owner.index])
            if now % 5 == 0:
                owner.index.forget_key(gone[0])
            policy = owner.index._policy
            assert policy is None or len(policy) == len(owner.index)
        assert evicted.count(evicted[0]) == len(owners)


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_being_read_is_never_a_victim(policy: str, told: bool, rng: random.Random) -> None:
    live([Owner(index_with(policy))], rng, 600, told=told)


def test_without_prompts_every_kind_of_lru_evicts_the_same(rng: random.Random) -> None:
    """The arrays, the policy of that name, and one that learns and is told of nothing."""
    indexes = [SlotIndex(SLOTS), index_with("lru"), index_with("adaptive")]
    live([Owner(index) for index in indexes], rng, 600, told=False)


def test_an_index_whose_every_block_is_read_makes_no_room() -> None:
    owner = Owner(index_with("adaptive", 4))
    keys = make_keys(5)
    owner.index.observe_chain(keys, 1.0)
    owner.take_in(keys[:4])
    owner.pin(keys[:4])
    assert owner.index.make_room(1) == 0
    owner.unpin(4)
    assert owner.take_in(keys[4:]) == keys[3:4], "the tail of the chain"


@pytest.mark.parametrize("policy", ["lru", "adaptive", "arc"])
def test_a_policy_begins_with_the_order_of_last_use(policy: str, rng: random.Random) -> None:
    keys = make_keys(SLOTS)
    uses = rng.sample(range(1, 1000), SLOTS)
    rows = [Row(i, key, i + 1, use) for i, (key, use) in enumerate(zip(keys, uses, strict=True))]
    index = index_with(policy, rows=rows)
    coldest_first = [key for _, key in sorted(zip(uses, keys, strict=True))]
    assert index.make_room(5) == 5
    assert [entry.key for entry in index.take_leaving()] == coldest_first[:5]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_contract_holds_with_every_policy(open_store: Open, policy: str) -> None:
    check_store(open_store(layout=ODD, policy=policy))


@pytest.mark.parametrize("policy", ["lru", "adaptive"])
def test_the_order_of_use_outlives_a_restart(open_store: Open, policy: str) -> None:
    store = open_store(slots=12, policy=policy)
    chains = [make_keys(4, name) for name in "abc"]
    for now, chain in enumerate(chains):
        store.observe(chain, float(now))
        assert all(put(store, chain))
    store.observe(chains[0], 3.0)
    fetch(store, chains[0])
    store.close(SECONDS)
    store = open_store(slots=12, policy=policy)
    assert all(put(store, make_keys(4, "d")))
    answers = [set(store.lookup(chain)) for chain in chains]
    assert answers == [{Answer.HIT}, {Answer.MISS}, {Answer.HIT}]


def chats_and_questions(store: SsdStore, seconds: int, rng: random.Random) -> int:
    """Eight chats that go on every 16 seconds or so, and one question a second that nobody asks
    again; how many blocks of them were found."""
    hits = 0
    for now in range(seconds):
        prompts = [make_keys(6, f"question {now}")]
        if (chat := rng.randrange(16)) < 8:
            turn = now // 16 % 16
            prompts.append(make_keys(4 + turn, f"chat {chat} {now // 400}"))
        for prompt in prompts:
            store.observe(prompt, float(now))
            answers = store.lookup(prompt)
            found = next((i for i, a in enumerate(answers) if a is not Answer.HIT), len(prompt))
            hits += found
            store.touch(prompt[:found])
            store.store(prompt[found:], filled_buffers(prompt[found:], SMALL)).result(SECONDS)
    return hits


def test_a_store_that_is_told_of_prompts_keeps_what_returns(
    open_store: Open, memory_path: Path, seed: int
) -> None:
    hits = {}
    for policy in ("lru", "adaptive"):
        store = open_store(slots=100, policy=policy, path=memory_path / policy)
        assert store.learns == (policy == "adaptive")
        hits[policy] = chats_and_questions(store, 800, random.Random(seed))
        assert store.stats().rejected == {} and store.stats().errors == {}
        assert len(store_keys(store)) <= 100
        store.close(SECONDS)
    assert hits["adaptive"] > 1.2 * hits["lru"]


def test_prompts_may_be_told_while_blocks_come_and_go(open_store: Open) -> None:
    store = open_store(slots=32, policy="adaptive", durability="async")
    chains = [make_keys(8, str(i)) for i in range(40)]
    ended = threading.Event()
    failures: list[Exception] = []

    def tell() -> None:
        now = 0
        try:
            while not ended.is_set():
                now += 1
                store.observe(chains[now % len(chains)], now / 100)
        except Exception as error:
            failures.append(error)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        for round_ in range(120):
            put(store, chains[round_ % len(chains)])
            fetch(store, chains[(7 * round_) % len(chains)])
            store.drop(chains[(3 * round_) % len(chains)][6:])
    finally:
        ended.set()
        teller.join(SECONDS)
    assert not failures
    stats = store.stats()
    assert stats.rejected == {} and stats.errors == {} and stats.evicted_blocks
    with store._state.lock:
        index = store._state.index
        assert index._policy is not None
        assert len(index._policy) == len(index) <= 32


def test_a_large_store_is_lru_and_says_so(
    open_store: Open,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(opening, "MOST_POLICY_SLOTS", 64)
    assert open_store(slots=64, policy="adaptive").learns
    assert not open_store(slots=65, policy="lru", path=tmp_path / "1").learns
    assert caplog.messages == []
    store = open_store(slots=65, policy="adaptive", path=tmp_path / "2")
    assert not store.learns
    assert [message[:54] for message in caplog.messages] == [
        "the SSD tier has 65 slots and evicts by least recent u"
    ]
    store.observe(make_keys(3), 1.0)
    assert all(put(store, make_keys(3)))


def test_a_policy_that_nobody_has_is_refused_and_leaves_nothing(
    open_store: Open, tmp_path: Path
) -> None:
    with pytest.raises(TierConfigError, match="no eviction policy 'adaptiv'"):
        open_store(policy="adaptiv")
    assert not (tmp_path / "ssd").exists()


def test_the_default_takes_no_memory_for_a_policy(open_store: Open) -> None:
    assert DEFAULT_SSD_POLICY == "lru"
    store = open_store()
    assert not store.learns and store._state.index._policy is None
