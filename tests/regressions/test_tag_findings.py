# SPDX-License-Identifier: Apache-2.0
"""Findings about wrong bytes: the tag that the storing engine made is the one that counts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stratakv.tiers import contract
from stratakv.tiers.base import StoreTier
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.contract import fetch, filled_buffers, make_buffers, make_keys, payload_of
from stratakv.tiers.hierarchy.hierarchy import Hierarchy
from stratakv.tiers.hierarchy.hierarchy_options import HierarchyOptions
from stratakv.tiers.mac_key import MacKey
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_store import RemoteStore, open_remote
from stratakv.tiers.remote.transports.block_connection import BlockConnection
from stratakv.tiers.remote.transports.memory_client import MemoryConnection
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.ssd import SsdStore
from stratakv.tiers.tag import Proof, Tagger
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.wire.frames import State, Verb, encode_request

from ..tiers.cache_server import data_plane
from ..tiers.cache_server.data_plane import Plane, put
from ..tiers.cache_server.rig import LAYOUT, WAIT_SECONDS, running_server

pytestmark = pytest.mark.regression

SIZE = LAYOUT.page_bytes
STORE_BYTES = 4 * 1024**2
SEAL = MacKey(bytes(range(32)))


@contextmanager
def opened_store(store: RemoteStore) -> Iterator[RemoteStore]:
    yield store
    store.close(WAIT_SECONDS)


def committed(slab: CpuSlab) -> list[bytes]:
    return slab.keys()


def stored(plane: Plane, key: bytes) -> bytes:
    """The key under which a tenant store keeps a block."""
    return plane.tenant_store._salt.salt_keys([key])[0]


def wait_until(what: object) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def plane_over(path: Path, mac_key: MacKey | None = None, slots: int = 16) -> Plane:
    """A server's room with memory and a disk."""
    return Plane(slots=slots, stores=[SsdStore(path, LAYOUT, STORE_BYTES, mac_key=mac_key)])


def slot_of(tenant_store: TenantStore, key: bytes) -> memoryview:
    """The memory of a block, as anything that damages it would reach it."""
    read_lease = tenant_store.begin_load([key])
    tenant_store.wait_loaded(read_lease, time.monotonic() + WAIT_SECONDS)
    (slot,) = read_lease.slots
    tenant_store.end_load(read_lease)
    assert slot is not None
    return tenant_store.buffer(slot)


def put_all(connection: BlockConnection, keys: Sequence[bytes]) -> bool:
    """Whether all were kept; blocks that are being written down leave little room."""
    return put(connection, keys, LAYOUT) == [State.KEPT] * len(keys)


def load_all(plane: Plane, kind: str, keys: Sequence[bytes]) -> list[bytes | None]:
    connection = plane.connect(kind)
    found = [
        payload
        for start in range(0, len(keys), 4)
        for payload in data_plane.fetch(connection, keys[start : start + 4], LAYOUT)
    ]
    connection.close()
    return found


@pytest.mark.parametrize("mac_key", [None, SEAL], ids=["plain", "sealed"])
@pytest.mark.parametrize("kind", ["data", "memory"])
def test_t01_flipped_bit_before_a_write_back(
    tmp_path: Path, kind: str, mac_key: MacKey | None
) -> None:
    """It got a new checksum on the disk, and a new tag on its way back: a verified hit."""
    keys = make_keys(8)
    plane = plane_over(tmp_path, mac_key)
    connection = plane.connect(kind)
    assert put(connection, keys, LAYOUT) == [State.KEPT] * 8
    connection.close()
    slot_of(plane.tenant_store, keys[3])[1000] ^= 0x10
    plane.close()
    plane = plane_over(tmp_path, mac_key)
    expected = [payload_of(key, LAYOUT) for key in keys]
    expected[3] = None  # type: ignore[call-overload]
    assert load_all(plane, kind, keys) == expected
    plane.close()


@pytest.mark.parametrize("kind", ["data", "memory"])
def test_t01_flipped_bit_without_a_restart(tmp_path: Path, kind: str) -> None:
    """Evicted, written down and read up again, by one server."""
    keys, others = make_keys(8), make_keys(40, "others")
    plane = plane_over(tmp_path)
    connection = plane.connect(kind)
    put(connection, keys, LAYOUT)
    slot_of(plane.tenant_store, keys[3])[0] ^= 1
    for start in range(0, 40, 4):
        put(connection, others[start : start + 4], LAYOUT)
        wait_until(lambda: not plane.slab.stats().pinned_blocks)
    wait_until(lambda: stored(plane, keys[3]) not in committed(plane.slab))
    found = load_all(plane, kind, keys)
    assert found[3] is None
    assert all(f in (None, payload_of(k, LAYOUT)) for f, k in zip(found, keys, strict=True))
    connection.close()
    plane.close()


def test_t01_late_writer(tmp_path: Path) -> None:
    """A client that was stopped in the middle of a copy finished it after its lease, into a slot
    that was another client's acknowledged block by then."""
    late_keys, keys = make_keys(4, "late"), make_keys(40)
    plane = plane_over(tmp_path, slots=8)
    late = plane.connect("memory")
    assert isinstance(late, MemoryConnection)
    asked = late._build_request(Verb.RESERVE, late_keys, time.monotonic() + 0.05)
    late._connection.send([asked.words], time.monotonic() + WAIT_SECONDS)
    reserved = late._take_reserved(asked, 4, time.monotonic() + WAIT_SECONDS)
    targets = [late._slot(slot) for slot in reserved.slots]
    # The lease ends, and others have what room there is.
    wait_until(lambda: plane.tenant_store.lookup(late_keys) == [State.MISS] * 4)
    other = plane.connect("memory")
    for start in range(0, 40, 2):
        wait_until(lambda pair=keys[start : start + 2]: put_all(other, pair))
    for target in targets:
        target[:] = b"\xff" * SIZE
    found = load_all(plane, "memory", keys)
    assert all(f in (None, payload_of(k, LAYOUT)) for f, k in zip(found, keys, strict=True))
    # Once that client has gone, its slots are used again.
    assert plane.slab.free_slots() + len(committed(plane.slab)) == 4
    lost = plane.tenant_store._hierarchy.traffic()["ssd"].lost_blocks  # evicted before the write
    targets.clear()
    late.close()
    wait_until(lambda: plane.slab.free_slots() + len(committed(plane.slab)) == 8)
    other.close()
    plane.close()
    plane = plane_over(tmp_path, slots=8)
    found = load_all(plane, "memory", keys)
    assert sum(payload is not None for payload in found) >= max(8, 40 - lost)
    assert all(f in (None, payload_of(k, LAYOUT)) for f, k in zip(found, keys, strict=True))
    plane.close()


def test_t01_late_writer_that_says_so() -> None:
    """A COMMIT after the lease's end: nothing is stored, and its slots are used again at once."""
    plane = Plane(slots=8)
    late = plane.connect("memory")
    assert isinstance(late, MemoryConnection)
    keys = make_keys(4)
    asked = late._build_request(Verb.RESERVE, keys, time.monotonic() + 0.05)
    late._connection.send([asked.words], time.monotonic() + WAIT_SECONDS)
    reserved = late._take_reserved(asked, 4, time.monotonic() + WAIT_SECONDS)
    wait_until(lambda: plane.tenant_store.lookup(keys) == [State.MISS] * 4)
    assert plane.slab.free_slots() == 4
    commit = late._next_request(Verb.COMMIT, 4, reserved.lease)
    late._connection.send([encode_request(commit) + bytes(4 * 32)], time.monotonic() + WAIT_SECONDS)
    with pytest.raises(Exception, match="NO_LEASE"):
        late._take_committed(commit, 4, time.monotonic() + WAIT_SECONDS)
    assert plane.slab.free_slots() == 8
    late.close()
    plane.close()


class Forging(MemoryStore):
    """A tier that answers with another block, digest and all."""

    def _load_now(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[Proof | None]:
        proofs = super()._load_now(keys, buffers)
        tagger = Tagger(self.layout.layout_id(), SIZE)
        for i, buffer in enumerate(buffers):
            if proofs[i] is not None:
                buffer[:SIZE] = b"\xee" * SIZE
                made = tagger.prove(bytes(40), buffer[:SIZE])
                proofs[i] = proofs[i]._replace(digest=made.digest)  # type: ignore[union-attr]
        return proofs


def test_t01_block_with_the_tag_of_another() -> None:
    """An engine takes nothing from any tier whose tag is not of that name and those bytes."""
    layout_id = LAYOUT.layout_id()
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
    store = Forging(LAYOUT, 100 * SIZE, name="other")
    keys = make_keys(2)
    store.store(keys, filled_buffers(keys, LAYOUT)).result(0)
    hierarchy = Hierarchy(
        slab, [store], wakeup=lambda: None, options=HierarchyOptions(tagger=Tagger(layout_id, SIZE))
    )
    ticket = hierarchy.begin_load(keys)
    while ticket.waiting:
        hierarchy.poll()
    assert ticket.slots == [None, None]
    assert hierarchy.stats()["other"].errors["wrong_tag"] == 2
    assert store.lookup(keys) == hierarchy.lookup(keys)
    assert store.stats().blocks == 0, "they can be stored anew"
    hierarchy.end_load(ticket)
    hierarchy.close(WAIT_SECONDS)


def store_below(kind: str, path: Path) -> StoreTier:
    return (
        SsdStore(path, LAYOUT, STORE_BYTES) if kind == "ssd" else MemoryStore(LAYOUT, STORE_BYTES)
    )


@pytest.mark.parametrize("kind", ["ssd", "memory"])
def test_t01_block_damaged_in_an_engines_slab(tmp_path: Path, kind: str) -> None:
    """What was damaged between the copy out of the pool and the write-back is neither written nor
    found in the slab afterwards."""
    store = store_below(kind, tmp_path)
    slab = CpuSlab(LAYOUT, 8 * LAYOUT.slot_bytes)
    tagger = Tagger(LAYOUT.layout_id(), SIZE)
    hierarchy = Hierarchy(
        slab, [store], wakeup=lambda: None, options=HierarchyOptions(tagger=tagger)
    )
    keys = make_keys(4)
    ticket = hierarchy.begin_store(keys)
    for key, slot in zip(ticket.keys, ticket.slots, strict=True):
        slab.buffer(slot)[:SIZE] = payload_of(key, LAYOUT)
    proofs = [tagger.prove(key, payload_of(key, LAYOUT)) for key in ticket.keys]
    hierarchy.end_store(ticket, True, proofs)
    slab.buffer(ticket.slots[2])[7] ^= 1
    hierarchy.flush(WAIT_SECONDS)
    assert fetch(store, keys) == [payload_of(k, LAYOUT) if k != keys[2] else None for k in keys]
    assert keys[2] not in committed(slab)
    assert hierarchy.stats()[store.name].errors["damaged_in_slab"] == 1
    hierarchy.close(WAIT_SECONDS)


def test_t11_hostile_server_with_a_key(tmp_path: Path) -> None:
    """Tags without a key are anybody's to make; with one, a server that serves what it likes, and
    makes tags for it, serves misses."""
    keys = make_keys(4)
    plane = Plane(slots=16)
    tag_key = SEAL.tag_key
    deadline = time.monotonic() + WAIT_SECONDS

    def connect(key: bytes | None) -> MemoryConnection:
        return MemoryConnection.open(plane.path, data_plane.TICKET, LAYOUT, deadline, tag_key=key)

    honest = connect(tag_key)
    states = honest.store(keys, filled_buffers(keys, LAYOUT), [None] * 4, deadline)
    assert states == [State.KEPT] * 4
    # The server forges a block and gives it the best tag that it can make.
    forged = slot_of(plane.tenant_store, keys[1])
    forged[:] = b"\xee" * SIZE
    plain = Tagger(LAYOUT.layout_id(), SIZE).prove(keys[1], forged)
    plane.slab._slots[stored(plane, keys[1])].proof = plain
    buffers = make_buffers(4, LAYOUT)
    proofs = honest.load(keys, buffers, deadline)
    assert [proof is None for proof in proofs] == [False, True, False, False]
    assert honest.corrupt_keys == [keys[1]]
    # Without the key it would have passed; and one without the key takes none of the others.
    trusting = connect(None)
    proofs = trusting.load(keys, buffers, deadline)
    assert [proof is None for proof in proofs] == [True, False, True, True]
    # What the engine keeps below has plain tags, whoever it came from.
    proofs = honest.load(keys[:1], buffers, deadline)
    assert proofs == [Tagger(LAYOUT.layout_id(), SIZE).prove(keys[0], payload_of(keys[0], LAYOUT))]
    honest.close()
    trusting.close()
    plane.close()


def test_t01_corrupt_block_can_be_stored_anew() -> None:
    """A server kept it, every engine read it again and again, and none could replace it."""
    (key,) = make_keys(1)
    with (
        running_server() as server,
        opened_store(open_remote([ServerAddress("127.0.0.1", server.port)], LAYOUT)) as store,
    ):
        assert store.wait_up(WAIT_SECONDS)
        assert contract.put(store, [key]) == [True]
        slot_of(server.tenant_store(), key)[0] ^= 1
        assert fetch(store, [key]) == [None]
        wait_until(lambda: server.tenant_store().lookup([key]) == [State.MISS])
        # Until its last reader has let go, a forgotten block keeps its slot.
        wait_until(lambda: not server.tenant_store().stats()["cpu"].pinned_blocks)
        assert contract.put(store, [key]) == [True]
        assert fetch(store, [key]) == [payload_of(key, LAYOUT)]


def test_t12_commit_of_bytes_that_are_not_there() -> None:
    """A server that took a COMMIT at its word passed 676 tests."""
    plane = Plane(slots=8)
    connection = plane.connect("memory")
    assert isinstance(connection, MemoryConnection)
    keys = make_keys(2)
    real = connection._copy_in

    def copy_in(key, buffer, target, lease_ends):  # type: ignore[no-untyped-def]
        done = real(key, buffer, target, lease_ends)
        if bytes(buffer[:SIZE]) == payload_of(keys[0], LAYOUT):
            target[50] ^= 1  # what arrived is not what was sent
        return done

    connection._copy_in = copy_in  # type: ignore[method-assign]
    assert put(connection, keys, LAYOUT) == [State.CORRUPT, State.KEPT]
    assert plane.tenant_store.lookup(keys) == [State.MISS, State.HIT]
    assert plane.tenant_store.corrupt_blocks == 1
    connection.close()
    plane.close()
