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
from stratakv.tiers.cache_server.tenant_store import Room
from stratakv.tiers.contract import filled_buffers, make_keys, payload_of
from stratakv.tiers.cpu import CpuSlab
from stratakv.tiers.errors import InvalidBlock, TierClosed
from stratakv.tiers.memory import MemoryStore
from stratakv.tiers.ssd.store import SsdStore
from stratakv.tiers.tag import Proof
from stratakv.tiers.wire.frames import State

from .rig import LAYOUT, SECRET, WAIT_SECONDS, proof_of

SLOTS = 16
HIT, MISS, KEPT = State.HIT, State.MISS, State.KEPT


def soon(seconds: float = WAIT_SECONDS) -> float:
    return time.monotonic() + seconds


def make_room(stores: Sequence[MemoryStore | SsdStore] = ()) -> Room:
    return Room(CpuSlab(LAYOUT, SLOTS * LAYOUT.slot_bytes), stores, KeySalt(SECRET, "ann"))


@pytest.fixture
def room() -> Iterator[Room]:
    """In memory only; in the end nothing is held."""
    room = make_room()
    yield room
    stats = room.stats()["cpu"]
    assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)
    assert room.close(WAIT_SECONDS)


def store(room: Room, keys: Sequence[bytes], salt: bytes = b"") -> list[State]:
    """Blocks whose bytes are `payload_of(key + salt)`."""
    intake = room.begin_store(keys)
    proofs: list[Proof | None] = []
    for key, slot in zip(keys, intake.slots, strict=True):
        if slot is None:
            proofs.append(None)
            continue
        buffer = room.buffer(slot)
        buffer[:] = payload_of(key + salt, LAYOUT)
        proofs.append(proof_of(key, buffer))
    return room.end_store(intake, proofs)


def load(room: Room, keys: Sequence[bytes]) -> list[bytes | None]:
    loan = room.begin_load(keys)
    try:
        room.wait(loan, soon())
        return [None if slot is None else bytes(room.buffer(slot)) for slot in loan.slots]
    finally:
        room.end_load(loan)


def wait_until(what: object) -> None:
    deadline = soon()
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_lease_holds_its_blocks_against_everything(room: Room) -> None:
    held = make_keys(4, "held")
    assert store(room, held) == [KEPT] * 4
    lease = room.pin([*held, *make_keys(1, "unknown")], 60.0, soon())
    assert lease.keys == KeySalt(SECRET, "ann").stored(held)
    assert room.num_leases == 1
    for number in range(5):
        store(room, make_keys(SLOTS, str(number)))
    assert room.lookup(held) == [HIT] * 4
    assert room.drop(held) == 0
    assert room.lookup(held) == [HIT] * 4
    assert load(room, held) == [payload_of(key, LAYOUT) for key in held]
    assert room.unpin(lease.number)
    assert not room.unpin(lease.number)
    assert room.drop(held) == 4


def test_a_lease_ends_by_itself_though_nobody_calls(room: Room) -> None:
    keys = make_keys(4)
    store(room, keys)
    began = time.monotonic()
    lease = room.pin(keys, 0.2, soon())
    assert room.stats()["cpu"].pinned_blocks == 4
    wait_until(lambda: not room.num_leases)
    assert 0.19 <= time.monotonic() - began < 5.0
    assert room.stats()["cpu"].pinned_blocks == 0
    assert not room.unpin(lease.number)


def test_a_short_lease_ends_before_a_long_one_that_came_first(room: Room) -> None:
    keys = make_keys(2)
    store(room, keys)
    long = room.pin(keys[:1], 60.0, soon())
    room.pin(keys[1:], 0.1, soon())
    wait_until(lambda: room.num_leases == 1)
    assert room.unpin(long.number)


def test_a_lease_of_nothing_and_one_that_cannot_be(room: Room) -> None:
    lease = room.pin(make_keys(3), 1.0, soon())
    assert lease.keys == []
    room.unpin(lease.number)
    for seconds in (0.0, -1.0, 10_000.0):
        with pytest.raises(InvalidBlock):
            room.pin(make_keys(1), seconds, soon())


def test_what_was_touched_stays_longest(room: Room) -> None:
    keys = make_keys(SLOTS)
    store(room, keys)
    room.touch(keys[:4])
    store(room, make_keys(8, "new"))
    assert room.lookup(keys[:4]) == [HIT] * 4
    room.touch(make_keys(3, "unknown"))


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


def test_listeners_hear_of_what_happens_and_of_nothing_else(room: Room) -> None:
    keys = make_keys(4)
    listener = Listening()
    room.subscribe(listener)
    store(room, keys[:3])
    store(room, keys[:3])  # they are here already
    intake = room.begin_store(keys[3:])
    room.end_store(intake, [None])  # they never came
    assert room.drop([keys[0], keys[0], keys[3]]) == 1
    room.clear()
    told = [(what, of) for what, of in listener.told if of or what == "cleared"]
    assert told[0] == ("stored", keys[:3])
    assert set(told[1][1]) == {keys[0]} and told[1][0] == "removed"
    assert told[2:] == [("cleared", [])]
    room.unsubscribe(listener)
    store(room, keys)
    assert listener.told[-1] == ("cleared", [])


def test_what_arrives_after_a_clear_is_not_kept_and_not_told(room: Room) -> None:
    """It was told as stored, and its sender heard that its bytes were corrupt."""
    keys = make_keys(2)
    listener = Listening()
    room.subscribe(listener)
    intake = room.begin_store(keys)
    room.clear()
    proofs = []
    for key, slot in zip(keys, intake.slots, strict=True):
        assert slot is not None
        room.buffer(slot)[:] = payload_of(key, LAYOUT)
        proofs.append(proof_of(key, room.buffer(slot)))
    assert room.end_store(intake, proofs) == [MISS] * 2
    assert room.lookup(keys) == [MISS] * 2
    assert room.corrupt_blocks == 0
    assert not [of for what, of in listener.told if what == "stored" and of]


def test_what_is_being_loaded_is_whole_while_others_clear_and_store(room: Room) -> None:
    keys = make_keys(4)
    store(room, keys)
    loan = room.begin_load(keys)
    room.wait(loan, soon())
    room.clear()
    store(room, make_keys(SLOTS, "new"))
    for key, slot in zip(keys, loan.slots, strict=True):
        assert slot is not None and room.buffer(slot) == payload_of(key, LAYOUT)
    room.end_load(loan)
    room.end_load(loan)
    assert room.lookup(keys) == [MISS] * 4


def test_a_wait_has_an_end() -> None:
    class Hanging(MemoryStore):
        def load(self, keys, buffers):  # type: ignore[no-untyped-def]
            held.append(future := Future())
            return future

    held: list[object] = []
    store_below = Hanging(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd")
    keys = make_keys(2)
    store_below.store(KeySalt(SECRET, "ann").stored(keys), filled_buffers(keys, LAYOUT)).result(0)
    slow = make_room([store_below])
    assert slow.lookup(keys) == [HIT] * 2
    loan = slow.begin_load(keys)
    began = time.monotonic()
    slow.wait(loan, soon(0.2))
    assert 0.2 <= time.monotonic() - began < 5.0
    assert loan.slots == [None, None]
    slow.end_load(loan)
    # Whoever waits when the room is closed is woken.
    loan = slow.begin_load(keys)
    waiter = threading.Thread(target=slow.wait, args=(loan, soon()), daemon=True)
    waiter.start()
    slow.close(0.5)
    waiter.join(1.0)
    assert not waiter.is_alive()
    assert loan.slots == [None, None]


def test_a_closed_room_says_so(room: Room) -> None:
    keys = make_keys(2)
    store(room, keys)
    loan, intake = room.begin_load(keys), room.begin_store(make_keys(2, "n"))
    lease = room.pin(keys, 60.0, soon())
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
        with pytest.raises(TierClosed, match="the room was closed"):
            call()
    assert not closing.unpin(1)
    room.end_load(loan)
    room.end_store(intake, [None, None])
    room.unpin(lease.number)


def test_a_room_is_written_down_when_it_closes(tmp_path: Path) -> None:
    def opened() -> Room:
        return make_room([SsdStore(tmp_path, LAYOUT, 4 * 1024**2)])

    keys = make_keys(8)
    room = opened()
    assert store(room, keys) == [KEPT] * 8
    assert room.close(WAIT_SECONDS)
    again = opened()
    assert again.lookup(keys) == [HIT] * 8
    assert load(again, keys) == [payload_of(key, LAYOUT) for key in keys]
    lease = again.pin(keys, 60.0, soon())
    assert len(lease.slots) == 8
    again.unpin(lease.number)
    assert again.close(WAIT_SECONDS)


HAMMER_SECONDS = (4.0, 120.0)  # in CI, and in a long run


@pytest.mark.parametrize("stores", [0, 1], ids=["memory", "with a store"])
def test_many_threads_and_what_a_dict_would_have(stores: int, scale: str, seed: int) -> None:
    """Each key has one content at a time: that of its newest version. A thread that deletes a key
    gives it the next version; whoever loads it may find a version that was current while it did so,
    or nothing."""
    below = [MemoryStore(LAYOUT, 64 * LAYOUT.page_bytes, name="ssd")] * stores
    room = make_room(below)
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
        found = load(room, [keys[i] for i in picked])
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
            (state,) = store(room, [keys[i]], b"%d" % versions[i])
            counts["stored"] += state is KEPT

    def delete(rng: random.Random) -> None:
        i = rng.randrange(len(keys))
        with locks[i]:
            room.drop([keys[i]])
            # While somebody reads it, it is not forgotten, and its version stays.
            if room.lookup([keys[i]]) == [MISS]:
                versions[i] += 1
                counts["deleted"] += 1

    def lease(rng: random.Random) -> None:
        held = room.pin(rng.sample(keys, 3), rng.choice((0.005, 5.0)), soon())
        counts["leases"] += bool(held.keys)
        if rng.random() < 0.5:
            time.sleep(0.002)
        room.unpin(held.number)

    def run(number: int) -> None:
        rng = random.Random(seed + number)
        work = (read, read, write, write, delete, lease)
        try:
            while time.monotonic() < end and not wrong:
                rng.choice(work)(rng)
                room.touch(rng.sample(keys, 2))
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
    wait_until(lambda: not room.num_leases)
    wait_until(lambda: not room.stats()["cpu"].pinned_blocks)
    assert room.stats()["cpu"].reserved_blocks == 0
    assert room.corrupt_blocks == 0
    assert room.close(WAIT_SECONDS)
