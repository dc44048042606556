# SPDX-License-Identifier: Apache-2.0
"""What a reader who wanted to break the mended tiers came upon."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stratakv.tiers.base import Answer, Stored
from stratakv.tiers.cache_server.key_salt import KeySalt
from stratakv.tiers.cache_server.tenant_store import FORGET_SECONDS, TenantStore
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.errors import TierDown
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import RemoteStore, open_remote
from stratakv.tiers.reopening_store import ReopeningStore
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.ssd.index.slot_index import Entry, SlotIndex
from stratakv.tiers.tag import Proof, Tagger
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.wire.frames import State

from ..tiers.cache_server.rig import LAYOUT, SECRET, WAIT_SECONDS, proof_of, running_server
from ..tiers.rig import LAYOUT as TINY
from ..tiers.rig import HeldStore, content

pytestmark = pytest.mark.regression

SIZE = LAYOUT.page_bytes
TAGGER = Tagger(LAYOUT.layout_id(), SIZE)


def wait_until(what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@contextmanager
def opened(*ports: int, **settings: Any) -> Iterator[RemoteStore]:
    addresses = [ServerAddress("127.0.0.1", port) for port in ports]
    store = open_remote(addresses, LAYOUT, RemoteSettings(**settings))
    try:
        assert store.wait_up(WAIT_SECONDS)
        yield store
    finally:
        store.close(WAIT_SECONDS)


def fill(hierarchy: Hierarchy, slab: CpuSlab, keys: Sequence[bytes]) -> None:
    """As an engine stores blocks."""
    ticket = hierarchy.begin_store(keys)
    proofs: list[Proof | None] = []
    for key, slot in zip(ticket.keys, ticket.slots, strict=True):
        slab.buffer(slot)[:SIZE] = payload_of(key, LAYOUT)
        proofs.append(TAGGER.prove(key, payload_of(key, LAYOUT)))
    hierarchy.end_store(ticket, True, proofs)


def contents(hierarchy: Hierarchy, slab: CpuSlab, keys: Sequence[bytes]) -> list[bytes | None]:
    """What a load of blocks that the slab has brings."""
    ticket = hierarchy.begin_load(keys)
    assert not ticket.waiting
    found = [None if s is None else bytes(slab.buffer(s)[:SIZE]) for s in ticket.slots]
    hierarchy.end_load(ticket)
    return found


def test_a_busy_server_beside_one_that_has_begun_to_write() -> None:
    """A load over two servers was refused by the second when the first had begun: its slots were
    given to other blocks while the first still wrote to them."""
    with running_server() as one, running_server() as two:
        with opened(one.port, two.port) as store:
            keys = make_keys(40)
            owners = store._owners(keys)
            at_one = [key for key, owner in zip(keys, owners, strict=True) if owner == 0][:4]
            at_two = [key for key, owner in zip(keys, owners, strict=True) if owner == 1][:8]
            buffers = [memoryview(bytearray(payload_of(k, LAYOUT))) for k in [*at_one, *at_two]]
            store.store([*at_one, *at_two], buffers).result(WAIT_SECONDS)
        with opened(one.port, two.port, queue_bytes=4 * SIZE) as store:
            slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
            hierarchy = Hierarchy(
                slab, [store], wakeup=lambda: None, options=HierarchyOptions(tagger=TAGGER)
            )
            asked = store.prefetch_lookup([*at_one, *at_two])
            if asked is not None:
                asked.result(WAIT_SECONDS)
            with two.tenant_store()._changed:  # somebody keeps the second server waiting
                first = hierarchy.begin_load(at_two[:4])
                with one.tenant_store()._changed:
                    second = hierarchy.begin_load([*at_one[:2], *at_two[4:6]])
                    others = make_keys(4, "others")
                    fill(hierarchy, slab, others)
            loads = [server.loads._queue for server in store._servers]
            wait_until(lambda: not any(queue._bytes for queue in loads))
            wait_until(lambda: hierarchy.poll() or (not first.waiting and not second.waiting))
            hierarchy.end_load(first)
            hierarchy.end_load(second)
            known = slab.keys()
            assert contents(hierarchy, slab, known) == [payload_of(k, LAYOUT) for k in known]
            hierarchy.close(WAIT_SECONDS)


def test_forgetting_behind_a_batch_that_is_larger_than_the_queue() -> None:
    """The order to forget was refused, and the block was never loaded from that server again."""
    keys = make_keys(9)
    with running_server() as server, opened(server.port, queue_bytes=4 * SIZE) as store:
        buffers = [memoryview(bytearray(payload_of(k, LAYOUT))) for k in keys]
        store.store(keys[:1], buffers[:1]).result(WAIT_SECONDS)
        with server.tenant_store()._changed:
            storing = store.store(keys[1:], buffers[1:])  # taken, since nothing waits before it
            store.drop(keys[:1])
            store.clear()
        storing.result(WAIT_SECONDS)
        wait_until(lambda: not store._servers[0].clearing)
        assert not store._servers[0].going
        store.store(keys[:1], buffers[:1]).result(WAIT_SECONDS)
        found = memoryview(bytearray(SIZE))
        assert store.load(keys[:1], [found]).result(WAIT_SECONDS)[0] is not None


class TenantStoreOverHeldDisk:
    """A room of eight blocks over a store that ends what it is given when the test says so."""

    def __init__(self) -> None:
        self.store = HeldStore()
        self.slab = CpuSlab(TINY, 8 * TINY.slot_bytes)
        self.tenant_store = TenantStore(self.slab, [self.store], KeySalt(SECRET, "tenant"))

    def keep(self, keys: Sequence[bytes]) -> None:
        write_lease = self.tenant_store.begin_store(keys)
        for key, slot in zip(keys, write_lease.slots, strict=True):
            assert slot is not None
            self.tenant_store.buffer(slot)[:] = content(key)
        given = [proof_of(key, memoryview(content(key)), TINY) for key in keys]
        assert self.tenant_store.end_store(write_lease, given) == [State.KEPT] * len(keys)

    def close(self) -> None:
        self.store.hold_loads = self.store.hold_stores = False
        self.store.release()
        assert self.tenant_store.close(WAIT_SECONDS)


@pytest.fixture
def held() -> Iterator[TenantStoreOverHeldDisk]:
    found = TenantStoreOverHeldDisk()
    yield found
    found.close()


def check_gone(held: TenantStoreOverHeldDisk, key: bytes) -> None:
    """Nobody finds the block, in memory or below, now or later."""
    (stored,) = KeySalt(SECRET, "tenant").salt_keys([key])
    wait_until(lambda: not held.slab.stats().pinned_blocks)
    assert held.tenant_store.lookup([key]) == [State.MISS]
    assert held.slab.lookup([stored]) == [Answer.MISS]
    assert held.store.lookup([stored]) == [Answer.MISS]
    stats = held.slab.stats()
    assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)


def test_deleting_a_block_that_is_being_written_down(held: TenantStoreOverHeldDisk) -> None:
    """It stayed, since the write held its slot, and was there for the next who asked."""
    held.store.hold_stores = True
    keys = make_keys(8)
    for key in keys:
        held.keep([key])
    wait_until(lambda: held.slab.stats().pinned_blocks)
    (first, *_) = held.store.written
    salted = KeySalt(SECRET, "tenant").salt_keys(keys)
    key = keys[salted.index(first)]
    assert held.tenant_store.drop([key]) == 1
    assert held.tenant_store.lookup([key]) == [State.MISS]
    held.store.hold_stores = False
    held.store.release()
    check_gone(held, key)


def test_deleting_a_block_that_is_being_promoted(held: TenantStoreOverHeldDisk) -> None:
    """It arrived after it had been deleted, and was there for the next who asked."""
    (key,) = make_keys(1)
    (stored,) = KeySalt(SECRET, "tenant").salt_keys([key])
    proof = proof_of(key, memoryview(content(key)), TINY)
    buffer = memoryview(bytearray(content(key)))
    held.store.store([stored], [buffer], [proof]).result(WAIT_SECONDS)
    held.store.hold_loads = True
    read_lease = held.tenant_store.begin_load([key])
    held.tenant_store.drop([key])
    held.store.hold_loads = False
    # What a disk has read by then it brings, though it has forgotten the block since.
    held.store.store([stored], [buffer], [proof]).result(WAIT_SECONDS)
    held.store.release()
    held.store.drop([stored])
    held.tenant_store.wait_loaded(read_lease, time.monotonic() + WAIT_SECONDS)
    held.tenant_store.end_load(read_lease)
    check_gone(held, key)


def test_deleting_a_block_that_somebody_just_loads(held: TenantStoreOverHeldDisk) -> None:
    """A client that finds a block damaged deletes it while its own load still holds the slot."""
    (key,) = make_keys(1)
    held.keep([key])
    read_lease = held.tenant_store.begin_load([key])
    held.tenant_store.wait_loaded(read_lease, time.monotonic() + WAIT_SECONDS)
    assert held.tenant_store.drop([key]) == 1
    (slot,) = read_lease.slots
    assert slot is not None and bytes(held.tenant_store.buffer(slot)) == content(key)
    held.tenant_store.end_load(read_lease)
    check_gone(held, key)


def test_forgetting_blocks_of_a_store_that_is_down(tmp_path: Path) -> None:
    """They were back when the disk was, poisoned ones too; and who waited was told that they were
    gone for good."""
    keys = make_keys(4)
    disk = SsdStore(tmp_path, LAYOUT, 2**22)
    buffers = [memoryview(bytearray(payload_of(k, LAYOUT))) for k in keys]
    disk.store(keys, buffers).result(WAIT_SECONDS)
    disk.close(WAIT_SECONDS)
    is_mounted = False

    def open_it(create: bool) -> SsdStore:
        if not is_mounted:
            raise TierDown("nothing is mounted there")
        return SsdStore(tmp_path, LAYOUT, 2**22, create=create)

    store = ReopeningStore("ssd", LAYOUT, open_it, first_pause_seconds=0.01)
    assert store.drop(keys[:2]) == 0
    assert not store.wait_forgotten(0.0)
    is_mounted = True
    wait_until(lambda: store.is_up)
    assert store.lookup(keys) == [Answer.MISS] * 2 + [Answer.HIT] * 2
    assert store.wait_forgotten(WAIT_SECONDS)
    store.close(WAIT_SECONDS)


class OldStore(MemoryStore):
    """A tier of somebody else, written for another interface: it answers at once, and in bools."""

    def load(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> Any:
        return [proof is not None for proof in super().load(keys, buffers).result()]

    def store(self, *given: Any, **named: Any) -> Any:
        return [outcome is Stored.KEPT for outcome in super().store(*given, **named).result()]

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Any:
        return bool(keys)


def test_a_tier_whose_answers_are_no_futures() -> None:
    """The thread that steps got the exception, and slots stayed reserved or pinned for ever."""
    keys = make_keys(8)
    store = OldStore(LAYOUT, 2**20, name="old")
    MemoryStore.store(store, keys[:2], [memoryview(payload_of(k, LAYOUT)) for k in keys[:2]])
    slab = CpuSlab(LAYOUT, 4 * LAYOUT.slot_bytes)
    hierarchy = Hierarchy(
        slab, [store], wakeup=lambda: None, options=HierarchyOptions(tagger=TAGGER, watermark=2.0)
    )
    assert not hierarchy.prefetch_lookup(keys)
    load = hierarchy.begin_load(keys[:2])
    assert not load.waiting and load.slots == [None, None]
    hierarchy.end_load(load)
    fill(hierarchy, slab, keys[2:6])
    hierarchy.poll()
    stats = slab.stats()
    assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)
    assert hierarchy.stats()["old"].errors["AttributeError"] >= 3  # of a question, load and store
    hierarchy.close(WAIT_SECONDS)


def test_deleting_at_a_server_whose_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server waited for its disk as long as an engine waits for the server, so that each order
    to forget ended at the deadline and took the tier with it."""

    assert RemoteSettings().store_seconds >= FORGET_SECONDS + 1.0

    def hang(_store: SsdStore, timeout_seconds: float) -> bool:
        time.sleep(timeout_seconds)
        return False

    monkeypatch.setattr(SsdStore, "wait_forgotten", hang)
    keys = make_keys(2)
    server = running_server(ssd_bytes=2**22, ssd_path=tmp_path, secret=SECRET)
    with server as running, opened(running.port) as store:
        buffers = [memoryview(bytearray(payload_of(k, LAYOUT))) for k in keys]
        store.store(keys, buffers).result(WAIT_SECONDS)
        store.drop(keys[:1])
        wait_until(lambda: not store._servers[0].going)
        assert store.is_up
        assert "deadline" not in store.stats().errors


def test_forgetting_a_record_that_is_being_read() -> None:
    """It was not erased while it was read, and never after: an index made anew from the records
    brought it back."""
    (key,) = make_keys(1)
    index = SlotIndex(4)
    (slot,) = index.allocate(1)
    entry = Entry(key, slot, 7)
    index.publish([entry])
    assert index.pin([key]) == [entry]
    assert index.forget_key(key)
    index.free_entries(index.take_leaving())
    assert index.take_dropped(0) == []
    index.unpin(entry)
    assert index.take_dropped(0) == [slot]
    assert index.take_dropped(0) == []


def test_a_block_that_is_being_promoted_for_another(held: TenantStoreOverHeldDisk) -> None:
    """Two engines with one prompt: the second was told that the disk had nothing, while it read the
    block for the first."""
    (key,) = make_keys(1)
    (stored,) = KeySalt(SECRET, "tenant").salt_keys([key])
    proof = proof_of(key, memoryview(content(key)), TINY)
    buffer = memoryview(bytearray(content(key)))
    held.store.store([stored], [buffer], [proof]).result(WAIT_SECONDS)
    assert held.tenant_store.lookup([key]) == [State.HIT]
    held.store.hold_loads = True
    read_leases = [held.tenant_store.begin_load([key])]
    assert held.tenant_store.lookup([key]) == [State.HIT]
    read_leases.append(held.tenant_store.begin_load([key]))
    held.store.hold_loads = False
    held.store.release()
    for read_lease in read_leases:
        held.tenant_store.wait_loaded(read_lease, time.monotonic() + WAIT_SECONDS)
        (slot,) = read_lease.slots
        assert slot is not None and bytes(held.tenant_store.buffer(slot)) == content(key)
        held.tenant_store.end_load(read_lease)
