# SPDX-License-Identifier: Apache-2.0
"""Both kinds of connection to a tenant store: what they promise, and what becomes of broken
ones."""

from __future__ import annotations

import operator
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import trustme

from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.key_salt import KeySalt
from stratakv.tiers.cache_server.transports import data_session
from stratakv.tiers.cache_server.transports.block_receiver import BlockReceiver
from stratakv.tiers.contract import make_buffers, make_keys, payload_of
from stratakv.tiers.remote.transports.block_connection import Refused
from stratakv.tiers.testing.memory_store import MemoryStore
from stratakv.tiers.wire.frames import (
    GREETING,
    MAX_BLOCKS,
    REQUEST,
    WELCOME,
    RequestFrame,
    State,
    Status,
    Verb,
    decode_reply,
    decode_welcome,
    encode_greeting,
    encode_request,
    pack_keys,
)
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.protobuf_messages import header_message
from stratakv.tiers.wire.raw_messages import Piece
from stratakv.tiers.wire.sockets import ConnectionLost

from .data_plane import BOOT_ID, KINDS, TICKET, Plane, fetch, put
from .rig import LAYOUT, SECRET, WAIT_SECONDS, proof_of

# 2.5 MiB a block, several parts of a transfer; and a payload that is no multiple of a page.
LARGE = BlockLayout(num_layers=20, block_size=16, num_kv_heads=8, head_dim=128, kv_dtype="float32")
ODD = BlockLayout(num_layers=1, block_size=3, num_kv_heads=1, head_dim=7, kv_dtype="float16")
SLOW = Limits(request_seconds=0.3, idle_seconds=0.3, handshake_seconds=0.3)


@pytest.fixture
def plane(request: pytest.FixtureRequest) -> Iterator[Plane]:
    """A plane; options by indirect parameter."""
    plane = Plane(**getattr(request, "param", {}))
    yield plane
    plane.close()


def soon() -> float:
    return time.monotonic() + WAIT_SECONDS


def greeted(plane: Plane) -> socket.socket:
    """A data connection of which the test speaks every word itself."""
    sock = socket.create_connection(("127.0.0.1", plane.port), WAIT_SECONDS)
    sock.sendall(encode_greeting(TICKET))
    assert decode_welcome(sock.recv(WELCOME.size, socket.MSG_WAITALL)).status is Status.OK
    return sock


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "plane",
    [{"layout": LAYOUT}, {"layout": LARGE, "slots": 12}, {"layout": ODD}],
    indirect=True,
    ids=["small", "large", "odd"],
)
def test_blocks_come_back_as_they_were_stored(plane: Plane, kind: str) -> None:
    keys, unknown = make_keys(10), make_keys(2, "unknown")
    connection = plane.connect(kind)
    assert connection.boot_id == BOOT_ID
    assert put(connection, keys, plane.layout) == [State.KEPT] * 10
    other = plane.connect("memory" if kind == "data" else "data")
    found = fetch(other, [unknown[0], *keys[::-1], unknown[1]], plane.layout)
    assert found == [None, *(payload_of(key, plane.layout) for key in keys[::-1]), None]
    assert put(other, keys, plane.layout) == [State.KEPT] * 10
    connection.close()
    other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_behind_a_payload_in_a_buffer_stays(kind: str) -> None:
    plane = Plane(layout=ODD)
    connection = plane.connect(kind)
    keys = make_keys(2)
    put(connection, keys, ODD)
    buffers = make_buffers(2, ODD)
    for buffer in buffers:
        buffer[:] = b"\xa5" * len(buffer)
    assert None not in connection.load(keys, buffers, soon())
    rest = len(buffers[0]) - ODD.page_bytes
    assert all(bytes(buffer[ODD.page_bytes :]) == b"\xa5" * rest for buffer in buffers)
    connection.close()
    plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_in_memory_that_is_read_only_are_stored(plane: Plane, kind: str) -> None:
    keys = make_keys(2)
    payloads = [payload_of(key, LAYOUT) for key in keys]
    connection = plane.connect(kind)
    views = list(map(memoryview, payloads))
    assert connection.store(keys, views, [None] * 2, soon()) == [State.KEPT] * 2
    assert fetch(connection, keys, LAYOUT) == payloads
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_batch_and_a_full_one_are_answered(kind: str) -> None:
    plane = Plane(slots=2 * MAX_BLOCKS)
    connection = plane.connect(kind)
    assert (put(connection, [], LAYOUT), fetch(connection, [], LAYOUT)) == ([], [])
    keys = make_keys(MAX_BLOCKS)
    assert put(connection, keys, LAYOUT) == [State.KEPT] * MAX_BLOCKS
    assert fetch(connection, keys, LAYOUT) == [payload_of(key, LAYOUT) for key in keys]
    connection.close()
    plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_given_twice_is_stored_once_and_found_twice(plane: Plane, kind: str) -> None:
    (key,) = make_keys(1)
    connection = plane.connect(kind)
    assert put(connection, [key, key], LAYOUT) == [State.KEPT] * 2
    assert plane.slab.stats().blocks == 1
    assert fetch(connection, [key, key], LAYOUT) == [payload_of(key, LAYOUT)] * 2
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plane", [{"slots": 4}], indirect=True)
def test_what_finds_no_room_is_said(plane: Plane, kind: str) -> None:
    connection = plane.connect(kind)
    first, others = make_keys(4), make_keys(4, "other")
    assert put(connection, first, LAYOUT) == [State.KEPT] * 4
    read_lease = plane.tenant_store.begin_load(first)
    plane.tenant_store.wait_loaded(read_lease, soon())
    assert put(connection, others, LAYOUT) == [State.NO_ROOM] * 4
    plane.tenant_store.end_load(read_lease)
    connection.close()


def test_a_load_out_of_memory_goes_in_few_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first part is small where the one before, of this connection, came from a disk."""

    class Later(MemoryStore):
        def load(self, keys, buffers):  # type: ignore[no-untyped-def]
            ended: Future[object] = Future()
            loaded = super().load(keys, buffers)
            threading.Timer(0.01, lambda: ended.set_result(loaded.result())).start()
            return ended

    store, below = Later(LAYOUT, 100 * LAYOUT.page_bytes, name="ssd"), make_keys(28, "below")
    buffers = make_buffers(28, LAYOUT)
    for key, buffer in zip(below, buffers, strict=True):
        buffer[: LAYOUT.page_bytes] = payload_of(key, LAYOUT)
    proofs = [proof_of(k, b[: LAYOUT.page_bytes]) for k, b in zip(below, buffers, strict=True)]
    store.store(KeySalt(SECRET, "tenant").salt_keys(below), buffers, proofs).result(0)
    monkeypatch.setattr(data_session, "part_blocks", lambda _page, _slots, most=0: 8 if most else 2)
    plane = Plane(stores=[store])
    parts: list[int] = []
    begin = plane.tenant_store.begin_load
    monkeypatch.setattr(
        plane.tenant_store, "begin_load", lambda keys: parts.append(len(keys)) or begin(keys)
    )
    connection, keys = plane.connect("data"), make_keys(20)
    put(connection, keys, LAYOUT)
    for asked, expected in (
        (keys, [2, 8, 8, 2]),
        (keys, [8, 8, 4]),
        (below[:14], [8, 6]),
        (below[14:], [2, 4, 8]),
    ):
        parts.clear()
        assert fetch(connection, asked, LAYOUT) == [payload_of(key, LAYOUT) for key in asked]
        assert parts == expected
    connection.close()
    plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_only_the_disk_has_are_promoted(kind: str) -> None:
    store = MemoryStore(LAYOUT, 1000 * LAYOUT.page_bytes, name="ssd")
    keys = make_keys(32)
    buffers = make_buffers(32, LAYOUT)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[: LAYOUT.page_bytes] = payload_of(key, LAYOUT)
    proofs = [
        proof_of(key, buffer[: LAYOUT.page_bytes])
        for key, buffer in zip(keys, buffers, strict=True)
    ]
    store.store(KeySalt(SECRET, "tenant").salt_keys(keys), buffers, proofs).result(0)
    plane = Plane(slots=16, stores=[store])
    connection = plane.connect(kind)
    for start in range(0, 32, 4):
        batch = keys[start : start + 4]
        assert fetch(connection, batch, LAYOUT) == [payload_of(key, LAYOUT) for key in batch]
    # Of a batch that the slab cannot hold at a time, what fits; and never another's bytes.
    found = fetch(connection, keys, LAYOUT)
    assert found.count(None) < 32
    assert all(f in (None, payload_of(k, LAYOUT)) for f, k in zip(found, keys, strict=True))
    connection.close()
    plane.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_that_opens_nothing_is_refused(plane: Plane, kind: str) -> None:
    with pytest.raises(Refused, match="BAD_TICKET"):
        plane.connect(kind, ticket=b"x" * 32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_with_another_layout_is_refused(plane: Plane, kind: str) -> None:
    plane.layout = LARGE
    with pytest.raises(ConnectionLost, match=r"blocks have 4096 bytes, ours 2621440"):
        plane.connect(kind)


def test_another_version_is_refused(plane: Plane) -> None:
    with socket.create_connection(("127.0.0.1", plane.port), WAIT_SECONDS) as sock:
        sock.sendall(GREETING.pack(b"STRKVDAT", 1, 0, 0, TICKET))
        raw = sock.recv(WELCOME.size, socket.MSG_WAITALL)
        assert decode_welcome(raw).status is Status.BAD_VERSION
        assert sock.recv(1) == b""


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xff" * REQUEST.size, id="no verb"),
        pytest.param(REQUEST.pack(Verb.LOAD, 0, 0, MAX_BLOCKS + 1, 1, 0), id="too many"),
        pytest.param(REQUEST.pack(Verb.PIN, 0, 0, 1, 1, 1000), id="a word for memory"),
        pytest.param(REQUEST.pack(Verb.LOAD, 1, 0, 0, 1, 0), id="not zero"),
    ],
)
def test_words_that_are_none_end_the_connection(plane: Plane, raw: bytes) -> None:
    with greeted(plane) as sock:
        sock.sendall(raw)
        answer = sock.recv(1000)
        assert not answer or decode_reply(answer).status is Status.BAD_REQUEST
        assert sock.recv(1) == b""


def test_a_stranger_who_says_nothing_is_sent_away() -> None:
    plane = Plane(limits=SLOW)
    with socket.create_connection(("127.0.0.1", plane.port), WAIT_SECONDS) as sock:
        assert sock.recv(1) == b""
    plane.close()


def test_there_are_only_so_many_connections() -> None:
    plane = Plane(limits=Limits(max_data_connections=2))
    kept = [plane.connect(), plane.connect()]
    with pytest.raises(ConnectionLost):
        plane.connect()
    assert fetch(kept[0], make_keys(1), LAYOUT) == [None]
    kept.pop().close()
    deadline = soon()
    while plane.num_connections > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    kept.append(plane.connect())
    for connection in kept:
        connection.close()
    plane.close()


@pytest.mark.parametrize("sent", [0, 1, 4000, 4096, 4100, 8300])
def test_a_store_that_stops_half_way_gives_its_slots_back(sent: int) -> None:
    plane = Plane(limits=SLOW)
    keys = make_keys(3)
    with greeted(plane) as sock:
        sock.sendall(encode_request(RequestFrame(Verb.STORE, 3, 1, 0)) + pack_keys(keys))
        sock.sendall(bytes(sent))
        sock.settimeout(WAIT_SECONDS)
        while sock.recv(4096):
            pass
    plane.check_idle()
    assert plane.tenant_store.lookup(keys) == [State.MISS] * 3
    plane.close()


def test_blocks_that_came_whole_before_the_client_went_are_kept() -> None:
    plane = Plane()
    keys = make_keys(2)
    payload = payload_of(keys[0], LAYOUT)
    with greeted(plane) as sock:
        sock.sendall(encode_request(RequestFrame(Verb.STORE, 2, 1, 0)) + pack_keys(keys))
        sock.sendall(payload + proof_of(keys[0], memoryview(payload)).pack() + payload[:100])
    plane.check_idle()
    assert plane.tenant_store.lookup(keys) == [State.HIT, State.MISS]
    plane.close()


def test_a_block_whose_bytes_differ_from_its_digest_is_not_kept(plane: Plane) -> None:
    keys = make_keys(2)
    payload = payload_of(keys[1], LAYOUT)
    with greeted(plane) as sock:
        sock.sendall(encode_request(RequestFrame(Verb.STORE, 2, 1, 0)) + pack_keys(keys))
        proof = proof_of(keys[1], memoryview(payload)).pack()
        sock.sendall(payload[:-1] + b"?" + proof + payload + proof)
        sock.settimeout(None)
        answer = sock.recv(2 * (REQUEST.size + 2), socket.MSG_WAITALL)
    assert list(answer[-2:]) == [State.CORRUPT, State.KEPT]
    assert plane.tenant_store.lookup(keys) == [State.MISS, State.HIT]
    assert plane.tenant_store.corrupt_blocks == 1


def test_blocks_of_a_client_that_hangs_up_are_aborted_and_not_corrupt(plane: Plane) -> None:
    keys, store = make_keys(4), plane.tenant_store
    payload = payload_of(keys[0], LAYOUT)
    with greeted(plane) as sock:
        sock.sendall(encode_request(RequestFrame(Verb.STORE, 4, 1, 0)) + pack_keys(keys))
        sock.recv(REQUEST.size + 4, socket.MSG_WAITALL)
        proof = proof_of(keys[0], memoryview(payload)).pack()
        sock.sendall(payload + proof + payload[:-1] + b"?" + proof + payload[:100])
    plane.check_idle()
    assert store.lookup(keys) == [State.HIT, *[State.MISS] * 3]
    assert (store.corrupt_blocks, store.aborted_blocks) == (1, 2)

    connection = plane.connect("memory")
    request = encode_request(RequestFrame(Verb.RESERVE, 2, 1, 60_000)) + pack_keys(keys[2:])
    connection._connection.send([request], soon())
    connection._connection.receive(REQUEST.size, soon())
    connection.close()
    plane.check_idle()
    assert (store.corrupt_blocks, store.aborted_blocks) == (1, 4)

    receiver = BlockReceiver(store)
    header = header_message(keys[3], LAYOUT.layout_id(), len(payload), bytes(16), bytes(16))
    piece = Piece(0, State.HIT, header, 0, payload[:100])
    receiver.begin_block(piece)
    receiver.take_piece(piece)
    receiver.close()
    assert (store.corrupt_blocks, store.aborted_blocks) == (1, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_servers_memory_is_a_miss(plane: Plane, kind: str) -> None:
    keys = make_keys(3)
    connection = plane.connect(kind)
    put(connection, keys, LAYOUT)
    read_lease = plane.tenant_store.begin_load(keys)
    plane.tenant_store.wait_loaded(read_lease, soon())
    (slot,) = read_lease.slots[1:2]
    assert slot is not None
    plane.tenant_store.buffer(slot)[100] ^= 1
    plane.tenant_store.end_load(read_lease)
    found = fetch(connection, keys, LAYOUT)
    assert found == [payload_of(keys[0], LAYOUT), None, payload_of(keys[2], LAYOUT)]
    assert connection.corrupt_blocks == 1
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_stands_still_costs_the_deadline_and_no_more(plane: Plane, kind: str) -> None:
    connection = plane.connect(kind)
    keys = make_keys(4)
    put(connection, keys, LAYOUT)
    with plane.tenant_store._changed:
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="before the deadline"):
            connection.load(keys, make_buffers(4, LAYOUT), began + 0.1)
        assert 0.1 <= time.monotonic() - began < WAIT_SECONDS
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_can_be_ended_from_another_thread(plane: Plane, kind: str) -> None:
    connection = plane.connect(kind)
    with plane.tenant_store._changed:
        threading.Timer(0.05, connection.abort_call).start()
        with pytest.raises(ConnectionLost):
            connection.load(make_keys(1), make_buffers(1, LAYOUT), soon())
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_goes_down_ends_idle_connections_at_once(kind: str) -> None:
    plane = Plane()
    connection = plane.connect(kind)
    began = time.monotonic()
    plane.data.close(WAIT_SECONDS)
    plane.memory.close(WAIT_SECONDS)
    assert time.monotonic() - began < WAIT_SECONDS / 2
    assert not plane.num_connections
    with pytest.raises(ConnectionLost):
        fetch(connection, make_keys(1), LAYOUT)
    connection.close()
    plane.close()


def test_the_socket_for_memory_is_the_users_own(plane: Plane) -> None:
    folder = os.path.dirname(plane.path)
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.stat(plane.path).st_mode & 0o777 == 0o600
    plane.memory.close(1.0)
    assert not os.path.exists(folder)


def test_leases_of_a_connection_that_ends_are_given_back(plane: Plane) -> None:
    keys = make_keys(4)
    connection = plane.connect("memory")
    put(connection, keys, LAYOUT)
    raw = connection._connection
    for number, (verb, wanted) in enumerate([(Verb.PIN, keys), (Verb.RESERVE, make_keys(3, "n"))]):
        head = encode_request(RequestFrame(verb, len(wanted), number, 60_000))
        raw.send([head + pack_keys(wanted)], soon())
    deadline = soon()
    while plane.slab.stats().reserved_blocks < 3 and time.monotonic() < deadline:
        time.sleep(0.001)
    stats = plane.slab.stats()
    assert (stats.pinned_blocks, stats.reserved_blocks) == (4, 3)
    connection.close()
    plane.check_idle()


def test_a_lease_ends_at_its_time_while_the_connection_is_idle(plane: Plane) -> None:
    keys = make_keys(4)
    connection = plane.connect("memory")
    put(connection, keys, LAYOUT)
    raw = connection._connection
    raw.send([encode_request(RequestFrame(Verb.RESERVE, 1, 1, 100)) + make_keys(1, "n")[0]], soon())
    raw.send([encode_request(RequestFrame(Verb.PIN, 4, 2, 100)) + pack_keys(keys)], soon())
    deadline = soon()
    while plane.slab.stats().pinned_blocks < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert plane.slab.stats().pinned_blocks == 4
    while plane.slab.stats().pinned_blocks and time.monotonic() < deadline:
        time.sleep(0.001)
    plane.check_nothing_held()
    assert plane.num_connections == 1
    connection.close()


def test_a_block_copied_after_its_lease_is_a_miss(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(2)
    connection = plane.connect("memory")
    put(connection, keys, LAYOUT)
    monkeypatch.setattr(connection, "_lease", lambda _deadline: (time.monotonic() - 1, 50))
    assert fetch(connection, keys, LAYOUT) == [None, None]
    assert put(connection, make_keys(1, "n"), LAYOUT) == [State.CORRUPT]
    assert connection.corrupt_blocks == 0
    connection.close()


def test_connections_leave_no_descriptor_and_no_thread_behind(plane: Plane) -> None:
    def open_now() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    keys = make_keys(2)
    before = open_now()
    for _ in range(100):
        for kind in KINDS:
            connection = plane.connect(kind)
            put(connection, keys, LAYOUT)
            fetch(connection, keys, LAYOUT)
            connection.close()
    deadline = soon()
    # Fewer where something of an earlier test was still ending.
    while any(map(operator.gt, open_now(), before)) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not any(map(operator.gt, open_now(), before))


def test_with_tls_strangers_and_plain_clients_get_nothing() -> None:
    authority = trustme.CA()
    server_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_side)
    client_side = ssl.create_default_context()
    authority.configure_trust(client_side)
    plane = Plane(layout=LARGE, slots=8, tls=server_side, limits=Limits(handshake_seconds=0.5))
    connection = plane.connect(tls=client_side)
    keys = make_keys(3)
    assert put(connection, keys, LARGE) == [State.KEPT] * 3
    assert fetch(connection, keys, LARGE) == [payload_of(key, LARGE) for key in keys]
    connection.close()
    with pytest.raises(ConnectionLost):
        plane.connect()
    with pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"):
        plane.connect(tls=ssl.create_default_context())
    plane.close()
