# SPDX-License-Identifier: Apache-2.0
"""A room under many hands: what it keeps, what it lets go, and what it never does."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest

from stratakv.tiers.cache_server.key_salt import KeySalt
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.contract import filled_buffers, make_keys, payload_of
from stratakv.tiers.errors import InvalidBlock, TierClosed
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.tag import Proof
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.status import TooMuch

from .rig import LAYOUT, SECRET, WAIT_SECONDS, proof_of

SLOTS = 16
HIT, MISS, KEPT = State.HIT, State.MISS, State.KEPT


def soon(seconds: float = WAIT_SECONDS) -> float:
    return time.monotonic() + seconds


def make_room(stores: Sequence[MemoryStore | SsdStore] = ()) -> TenantStore:
    return TenantStore(CpuSlab(LAYOUT, SLOTS * LAYOUT.slot_bytes), stores, KeySalt(SECRET, "ann"))


@pytest.fixture
def tenant_store() -> Iterator[TenantStore]:
    """In memory only; in the end nothing is held."""
    tenant_store = make_room()
    yield tenant_store
    stats = tenant_store.stats()["cpu"]
    assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)
    assert tenant_store.close(WAIT_SECONDS)


def store(tenant_store: TenantStore, keys: Sequence[bytes], salt: bytes = b"") -> list[State]:
    """Blocks whose bytes are `payload_of(key + salt)`."""
    write_lease = tenant_store.begin_store(keys)
    proofs: list[Proof | None] = []
    for key, slot in zip(keys, write_lease.slots, strict=True):
        if slot is None:
            proofs.append(None)
            continue
        buffer = tenant_store.buffer(slot)
        buffer[:] = payload_of(key + salt, LAYOUT)
        proofs.append(proof_of(key, buffer))
    return tenant_store.end_store(write_lease, proofs)


def load(tenant_store: TenantStore, keys: Sequence[bytes]) -> list[bytes | None]:
    read_lease = tenant_store.begin_load(keys)
    try:
        tenant_store.wait_loaded(read_lease, soon())
        return [
            None if slot is None else bytes(tenant_store.buffer(slot)) for slot in read_lease.slots
        ]
    finally:
        tenant_store.end_load(read_lease)


def wait_until(what: object) -> None:
    deadline = soon()
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_lease_holds_its_blocks_against_everything(tenant_store: TenantStore) -> None:
    held = make_keys(4, "held")
    assert store(tenant_store, held) == [KEPT] * 4
    lease = tenant_store.pin([*held, *make_keys(1, "unknown")], 60.0, soon())
    assert lease.held == KeySalt(SECRET, "ann").salt_keys(held)
    assert tenant_store.num_leases == 1
    for number in range(5):
        store(tenant_store, make_keys(SLOTS, str(number)))
    assert tenant_store.lookup(held) == [HIT] * 4
    assert tenant_store.drop(held) == 0
    assert tenant_store.lookup(held) == [HIT] * 4
    assert load(tenant_store, held) == [payload_of(key, LAYOUT) for key in held]
    assert tenant_store.unpin(lease.number)
    assert not tenant_store.unpin(lease.number)
    assert tenant_store.drop(held) == 4


def test_a_lease_ends_by_itself_though_nobody_calls(tenant_store: TenantStore) -> None:
    keys = make_keys(4)
    store(tenant_store, keys)
    began = time.monotonic()
    lease = tenant_store.pin(keys, 0.2, soon())
    assert tenant_store.stats()["cpu"].pinned_blocks == 4
    wait_until(lambda: not tenant_store.num_leases)
    assert 0.19 <= time.monotonic() - began < WAIT_SECONDS / 2
    assert tenant_store.stats()["cpu"].pinned_blocks == 0
    assert not tenant_store.unpin(lease.number)


def test_a_short_lease_ends_before_a_long_one_that_came_first(tenant_store: TenantStore) -> None:
    keys = make_keys(2)
    store(tenant_store, keys)
    long = tenant_store.pin(keys[:1], 60.0, soon())
    tenant_store.pin(keys[1:], 0.1, soon())
    wait_until(lambda: tenant_store.num_leases == 1)
    assert tenant_store.unpin(long.number)


def test_a_lease_of_nothing_and_one_that_cannot_be(tenant_store: TenantStore) -> None:
    lease = tenant_store.pin(make_keys(3), 1.0, soon())
    assert lease.held == [] and not tenant_store.num_leases
    assert not tenant_store.unpin(lease.number)
    for seconds in (0.0, -1.0, 10_000.0):
        with pytest.raises(InvalidBlock):
            tenant_store.pin(make_keys(1), seconds, soon())


def test_what_was_touched_stays_longest(tenant_store: TenantStore) -> None:
    keys = make_keys(SLOTS)
    store(tenant_store, keys)
    tenant_store.touch(keys[:4])
    store(tenant_store, make_keys(8, "new"))
    assert tenant_store.lookup(keys[:4]) == [HIT] * 4
    tenant_store.touch(make_keys(3, "unknown"))


class Listening:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, list[bytes]]] = []

    def stored(self, keys: Sequence[bytes]) -> None:
        self.told.append(("stored", list(keys)))

    def removed(self, keys: Sequence[bytes]) -> None:
        self.told.append(("removed", list(keys)))

    def cleared(self) -> None:
        self.told.append(("cleared", []))


def test_listeners_hear_of_what_happens_and_of_nothing_else(tenant_store: TenantStore) -> None:
    keys = make_keys(4)
    listener = Listening()
    tenant_store.subscribe(listener)
    store(tenant_store, keys[:3])
    store(tenant_store, keys[:3])  # they are here already
    write_lease = tenant_store.begin_store(keys[3:])
    tenant_store.end_store(write_lease, [None])  # they never came
    assert tenant_store.drop([keys[0], keys[0], keys[3]]) == 1
    tenant_store.clear()
    told = [(what, of) for what, of in listener.told if of or what == "cleared"]
    assert told[0] == ("stored", keys[:3])
    assert set(told[1][1]) == {keys[0]} and told[1][0] == "removed"
    assert told[2:] == [("cleared", [])]
    tenant_store.unsubscribe(listener)
    store(tenant_store, keys)
    assert listener.told[-1] == ("cleared", [])


def test_what_arrives_after_a_clear_is_not_kept_and_not_told(tenant_store: TenantStore) -> None:
    """It was told as stored, and its sender heard that its bytes were corrupt."""
    keys = make_keys(2)
    listener = Listening()
    tenant_store.subscribe(listener)
    write_lease = tenant_store.begin_store(keys)
    tenant_store.clear()
    proofs = []
    for key, slot in zip(keys, write_lease.slots, strict=True):
        assert slot is not None
        tenant_store.buffer(slot)[:] = payload_of(key, LAYOUT)
        proofs.append(proof_of(key, tenant_store.buffer(slot)))
    assert tenant_store.end_store(write_lease, proofs) == [MISS] * 2
    assert tenant_store.lookup(keys) == [MISS] * 2
    assert tenant_store.corrupt_blocks == 0
    assert not [of for what, of in listener.told if what == "stored" and of]


def test_what_is_being_loaded_is_whole_while_others_clear_and_store(
    tenant_store: TenantStore,
) -> None:
    keys = make_keys(4)
    store(tenant_store, keys)
    read_lease = tenant_store.begin_load(keys)
    tenant_store.wait_loaded(read_lease, soon())
    tenant_store.clear()
    store(tenant_store, make_keys(SLOTS, "new"))
    for key, slot in zip(keys, read_lease.slots, strict=True):
        assert slot is not None and tenant_store.buffer(slot) == payload_of(key, LAYOUT)
    tenant_store.end_load(read_lease)
    tenant_store.end_load(read_lease)
    assert tenant_store.lookup(keys) == [MISS] * 4


def test_a_wait_has_an_end() -> None:
    class Hanging(MemoryStore):
        def load(self, keys, buffers):  # type: ignore[no-untyped-def]
            held.append(future := Future())
            return future

    held: list[object] = []
    store_below = Hanging(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    keys = make_keys(2)
    store_below.store(KeySalt(SECRET, "ann").salt_keys(keys), filled_buffers(keys, LAYOUT)).result(
        0
    )
    slow = make_room([store_below])
    assert slow.lookup(keys) == [HIT] * 2
    read_lease = slow.begin_load(keys)
    began = time.monotonic()
    slow.wait_loaded(read_lease, soon(0.2))
    assert 0.2 <= time.monotonic() - began < WAIT_SECONDS / 2
    assert read_lease.slots == [None, None]
    slow.end_load(read_lease)
    # Whoever waits when the tenant store is closed is woken.
    read_lease = slow.begin_load(keys)
    waiter = threading.Thread(target=slow.wait_loaded, args=(read_lease, soon()), daemon=True)
    waiter.start()
    slow.close(0.5)
    waiter.join(WAIT_SECONDS / 2)
    assert not waiter.is_alive()
    assert read_lease.slots == [None, None]


def test_a_closed_room_says_so(tenant_store: TenantStore) -> None:
    keys = make_keys(2)
    store(tenant_store, keys)
    read_lease, write_lease = (
        tenant_store.begin_load(keys),
        tenant_store.begin_store(make_keys(2, "n")),
    )
    lease = tenant_store.pin(keys, 60.0, soon())
    closing = make_room()
    assert closing.close(WAIT_SECONDS) and closing.close(0.0)
    for call in (
        lambda: closing.lookup(keys),
        lambda: closing.begin_load(keys),
        lambda: closing.begin_store(keys),
        lambda: closing.pin(keys, 1.0, soon()),
        lambda: closing.touch(keys),
        lambda: closing.drop(keys),
        closing.clear,
    ):
        with pytest.raises(TierClosed, match="the tenant store was closed"):
            call()
    assert not closing.unpin(1)
    tenant_store.end_load(read_lease)
    tenant_store.end_store(write_lease, [None, None])
    tenant_store.unpin(lease.number)


def test_a_room_is_written_down_when_it_closes(tmp_path: Path) -> None:
    def opened() -> TenantStore:
        return make_room([SsdStore(tmp_path, LAYOUT, 4 * 1024**2)])

    keys = make_keys(8)
    tenant_store = opened()
    assert store(tenant_store, keys) == [KEPT] * 8
    assert tenant_store.close(WAIT_SECONDS)
    again = opened()
    assert again.lookup(keys) == [HIT] * 8
    assert load(again, keys) == [payload_of(key, LAYOUT) for key in keys]
    lease = again.pin(keys, 60.0, soon())
    assert len(lease.held) == 8
    again.unpin(lease.number)
    assert again.close(WAIT_SECONDS)


HAMMER_SECONDS = (4.0, 120.0)  # in CI, and in a long run


@pytest.mark.parametrize("stores", [0, 1], ids=["memory", "with a store"])
def test_many_threads_and_what_a_dict_would_have(stores: int, scale: str, seed: int) -> None:
    """Each key has one content at a time: that of its newest version. A thread that deletes a key
    gives it the next version; whoever loads it may find a version that was current while it did so,
    or nothing."""
    below = [MemoryStore(LAYOUT, 64 * LAYOUT.page_bytes, name="ssd")] * stores
    tenant_store = make_room(below)
    keys = make_keys(40, "hammered")
    # Of each key the versions that may be found: changed only under its lock, by its writer.
    locks = [threading.Lock() for _ in keys]
    versions = [0] * len(keys)
    wrong: list[str] = []
    counts = {"hits": 0, "stored": 0, "deleted": 0, "leases": 0}
    end = time.monotonic() + HAMMER_SECONDS[scale == "long"] / 2

    def read(rng: random.Random) -> None:
        picked = rng.sample(range(len(keys)), 4)
        before = [versions[i] for i in picked]
        found = load(tenant_store, [keys[i] for i in picked])
        for i, oldest, block in zip(picked, before, found, strict=True):
            if block is None:
                continue
            counts["hits"] += 1
            possible = range(oldest, versions[i] + 1)
            salts = [b"%d" % version for version in possible]
            if block not in [payload_of(keys[i] + salt, LAYOUT) for salt in salts]:
                wrong.append(f"key {i}: not one of the versions {list(possible)}")

    def write(rng: random.Random) -> None:
        i = rng.randrange(len(keys))
        with locks[i]:
            (state,) = store(tenant_store, [keys[i]], b"%d" % versions[i])
            counts["stored"] += state is KEPT

    def delete(rng: random.Random) -> None:
        i = rng.randrange(len(keys))
        with locks[i]:
            tenant_store.drop([keys[i]])
            # While somebody reads it, it is not forgotten, and its version stays.
            if tenant_store.lookup([keys[i]]) == [MISS]:
                versions[i] += 1
                counts["deleted"] += 1

    def lease(rng: random.Random) -> None:
        try:
            held = tenant_store.pin(rng.sample(keys, 3), rng.choice((0.005, 5.0)), soon())
        except TooMuch:  # others hold half of the few slots
            return
        counts["leases"] += bool(held.held)
        if rng.random() < 0.5:
            time.sleep(0.002)
        tenant_store.unpin(held.number)

    def run(number: int) -> None:
        rng = random.Random(seed + number)
        work = (read, read, write, write, delete, lease)
        try:
            while time.monotonic() < end and not wrong:
                rng.choice(work)(rng)
                tenant_store.touch(rng.sample(keys, 2))
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(end - time.monotonic() + WAIT_SECONDS)
        assert not thread.is_alive(), "a call hangs"
    print(counts)
    assert not wrong, wrong[0]
    assert min(counts.values()) > 20
    wait_until(lambda: not tenant_store.num_leases)
    wait_until(lambda: not tenant_store.stats()["cpu"].pinned_blocks)
    assert tenant_store.stats()["cpu"].reserved_blocks == 0
    assert tenant_store.corrupt_blocks == 0
    assert tenant_store.close(WAIT_SECONDS)
