# SPDX-License-Identifier: Apache-2.0
"""Blocks through gRPC streams: pieces that make a block, wrong bytes, clients that leave."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import make_buffers, make_keys, payload_of
from stratakv.tiers.remote.transports.stream_client import StreamConnection
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.limits import PIECE_BYTES, Limits
from stratakv.tiers.wire.protobuf_messages import header_message
from stratakv.tiers.wire.raw_messages import Piece
from stratakv.tiers.wire.rpc import Stub

from .calls import lookup, refused
from .rig import (
    LARGE,
    LAYOUT,
    WAIT_SECONDS,
    RunningServer,
    load_blocks,
    pieces_of,
    proof_of,
    running_server,
    store_blocks,
)

Code = grpc.StatusCode


def _corrupt(pieces: Iterator[Piece], index: int) -> Iterator[Piece]:
    for piece in pieces:
        if piece.index == index:
            piece.payload = b"\x00" + bytes(piece.payload[1:])
        yield piece


def test_bytes_that_do_not_match_their_checksum(server: RunningServer, stub: Stub) -> None:
    keys = make_keys(3)
    bad = server.tenant_store().corrupt_blocks
    states = stub.store(_corrupt(pieces_of(keys), 1), timeout=WAIT_SECONDS).states
    assert list(states) == [State.KEPT, State.CORRUPT, State.KEPT]
    assert lookup(stub, b"".join(keys))[1] == [State.HIT, State.MISS, State.HIT]
    said = stub.stats(messages.StatsRequest(), timeout=WAIT_SECONDS)
    assert said.corrupt_blocks == bad + 1
    assert store_blocks(stub, keys) == [State.KEPT] * 3


def test_a_block_with_the_tag_of_another_is_none_to_who_loads_it(stub: Stub) -> None:
    """The tag goes out as it came; the server cannot judge it, since there may be a key in it."""
    ours, other = make_keys(2)
    payload = memoryview(payload_of(other, LAYOUT))
    header = header_message(ours, LAYOUT.layout_id(), len(payload), *proof_of(other, payload))
    response = stub.store(iter([Piece(0, header=header, payload=payload)]), timeout=WAIT_SECONDS)
    assert list(response.states) == [State.KEPT]
    connection = StreamConnection(stub, (), LAYOUT, bytes(16))
    buffers = make_buffers(1, LAYOUT)
    assert connection.load([ours], buffers, time.monotonic() + WAIT_SECONDS) == [None]
    assert connection.corrupt_keys == [ours]


def test_a_block_that_stays_away_half_way(stub: Stub) -> None:
    keys = make_keys(2)
    pieces = list(pieces_of(keys, piece_bytes=1000))
    half = [piece for piece in pieces if piece.index or not piece.offset]
    response = stub.store(iter(half), timeout=WAIT_SECONDS)
    assert list(response.states) == [State.CORRUPT, State.KEPT]
    response = stub.store(iter(pieces[:-1]), timeout=WAIT_SECONDS)
    assert list(response.states) == [State.KEPT, State.KEPT], "the second was there already"


def test_a_quota_that_is_full_of_blocks_in_use(server: RunningServer, stub: Stub) -> None:
    tenant_store = server.tenant_store()
    for number in range(2):
        store_blocks(stub, make_keys(150, f"hold {number}"))
    # Leases take half of it at most; somebody loads the rest.
    leased, loaded = make_keys(150, "hold 0"), make_keys(150, "hold 1")
    pinned = [
        stub.pin(messages.PinRequest(keys=b"".join(part), lease_ms=60_000), timeout=WAIT_SECONDS)
        for part in (leased[:64], leased[64:128])
    ]
    assert [each.prefix for each in pinned] == [64, 64]
    with pytest.raises(grpc.RpcError, match="leave too few for others"):
        stub.pin(messages.PinRequest(keys=b"".join(loaded), lease_ms=60_000), timeout=WAIT_SECONDS)
    reading = tenant_store.begin_load(leased[128:] + loaded)
    assert store_blocks(stub, make_keys(2, "more")) == [State.NO_ROOM] * 2
    tenant_store.end_load(reading)
    assert all(tenant_store.unpin(each.lease, "default") for each in pinned)
    assert store_blocks(stub, make_keys(2, "more")) == [State.KEPT] * 2


def _first_piece(**changes: Any) -> Piece:
    piece = next(pieces_of(make_keys(1), piece_bytes=100))
    for name, value in changes.items():
        setattr(piece, name, value)
    return piece


def _header(**changes: Any) -> Any:
    header = next(pieces_of(make_keys(1))).header
    assert header is not None
    for name, value in changes.items():
        target = header.key if name in ("digest", "group", "shard_count") else header
        setattr(target, name, value)
    return header


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([_first_piece(header=None)], "carries its header"),
        ([_first_piece(offset=100)], "does not follow"),
        ([_first_piece(), _first_piece(index=1, offset=100)], "does not follow"),
        ([_first_piece(), _first_piece(offset=200)], "does not follow"),
        ([_first_piece(), _first_piece(offset=100, payload=b"")], "within its block"),
        ([_first_piece(payload=b"")], "within its block"),
        ([_first_piece(payload=bytes(LAYOUT.page_bytes + 1))], "within its block"),
        ([_first_piece(header=_header(digest=b"short"))], "key is none"),
        ([_first_piece(header=_header(shard_count=0))], "key is none"),
        ([_first_piece(header=_header(shard_count=65536))], "key is none"),
        ([_first_piece(header=_header(group=65536))], "cache group"),
        ([_first_piece(header=_header(layout_id=bytes(16)))], "has layout 0000"),
        ([_first_piece(header=_header(layout_id=b""))], "has layout none"),
        ([_first_piece(header=_header(payload_bytes=5))], "has 5 bytes; expected 4096"),
        ([_first_piece(header=_header(tag=b"x"))], "digest have 16 bytes each, not 1 and 16"),
    ],
)
def test_pieces_that_make_no_block(stub: Stub, pieces: list[Piece], message: str) -> None:
    code, _, text = refused(stub.store, iter(pieces))
    assert code is Code.INVALID_ARGUMENT and message in text


def test_a_piece_larger_than_allowed() -> None:
    with running_server(cpu_bytes=8 * LARGE.slot_bytes) as server:
        stub = server.stub()
        server.attach(stub, LARGE)
        pieces = pieces_of(make_keys(1), LARGE, piece_bytes=PIECE_BYTES + 1)
        assert refused(stub.store, pieces)[0] is Code.INVALID_ARGUMENT


def test_blocks_of_several_pieces_and_parts() -> None:
    with running_server(cpu_bytes=10 * LARGE.slot_bytes) as server:
        stub = server.stub()
        server.attach(stub, LARGE)
        keys = make_keys(9)  # three parts of a Load, three groups of a Store
        assert store_blocks(stub, keys, LARGE) == [State.KEPT] * 9
        assert load_blocks(stub, keys) == [payload_of(key, LARGE) for key in keys]
        largest = max(
            len(piece.payload)
            for piece in stub.load(messages.LoadRequest(keys=keys[0]), timeout=WAIT_SECONDS)
        )
        assert largest == PIECE_BYTES
        # Of a chain the tail is evicted first.
        assert store_blocks(stub, make_keys(4, "more"), LARGE) == [State.KEPT] * 4
        assert lookup(stub, b"".join(keys))[0] == 6


def test_a_client_that_leaves_half_way_gives_everything_back(
    server: RunningServer, stub: Stub
) -> None:
    keys = make_keys(3)
    gone = threading.Event()

    def some() -> Iterator[Piece]:
        yield from itertools.islice(pieces_of(keys, piece_bytes=1000), 6)
        gone.wait(WAIT_SECONDS)

    call = stub.store.future(some(), timeout=WAIT_SECONDS)
    deadline = time.monotonic() + WAIT_SECONDS
    while not server.tenant_store().stats()["cpu"].reserved_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    assert server.tenant_store().lookup(keys)[0] is State.PENDING
    call.cancel()
    gone.set()
    while server.tenant_store().stats()["cpu"].reserved_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    # The first one was whole, and may have been stored before the cancellation was seen.
    assert server.tenant_store().lookup(keys[1:]) == [State.MISS] * 2
    assert store_blocks(stub, keys) == [State.KEPT] * 3


def test_a_reader_that_leaves_half_way(server: RunningServer) -> None:
    with running_server(cpu_bytes=10 * LARGE.slot_bytes) as large:
        stub = large.stub()
        large.attach(stub, LARGE)
        keys = make_keys(9)
        store_blocks(stub, keys, LARGE)
        for taken in range(4):
            call = stub.load(messages.LoadRequest(keys=b"".join(keys)), timeout=WAIT_SECONDS)
            list(itertools.islice(call, taken))
            call.cancel()
        deadline = time.monotonic() + WAIT_SECONDS
        while large.tenant_store().stats()["cpu"].pinned_blocks and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not large.tenant_store().stats()["cpu"].pinned_blocks


def test_two_who_store_the_same(server: RunningServer) -> None:
    keys = make_keys(100)
    with ThreadPoolExecutor(4) as pool:
        stubs = [server.stub() for _ in range(4)]
        results = list(pool.map(lambda each: store_blocks(each, keys), stubs))
    allowed = {State.KEPT, State.MISS}  # MISS: another is still at it
    assert all(set(states) <= allowed for states in results)
    assert server.tenant_store().lookup(keys) == [State.HIT] * 100
    assert load_blocks(server.stub(), keys) == [payload_of(key, LAYOUT) for key in keys]


def test_a_call_has_the_deadline_of_its_client(server: RunningServer, stub: Stub) -> None:
    began, given_up = time.monotonic(), threading.Event()

    def slow() -> Iterator[Piece]:
        yield next(pieces_of(make_keys(1), piece_bytes=1000))
        given_up.wait(2 * WAIT_SECONDS)

    with pytest.raises(grpc.RpcError) as raised:
        stub.store(slow(), timeout=0.2)
    assert raised.value.code() is Code.DEADLINE_EXCEEDED
    assert time.monotonic() - began < WAIT_SECONDS
    given_up.set()
    deadline = time.monotonic() + WAIT_SECONDS
    while server.tenant_store().stats()["cpu"].reserved_blocks and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not server.tenant_store().stats()["cpu"].reserved_blocks


def test_the_server_has_a_deadline_of_its_own() -> None:
    with running_server(limits=Limits(call_seconds=0.2)) as server:
        stub = server.stub()
        server.attach(stub)
        done = threading.Event()

        def slow() -> Iterator[Piece]:
            yield next(pieces_of(make_keys(1), piece_bytes=1000))
            done.wait(WAIT_SECONDS)

        try:
            code, reason, _ = refused(stub.store, slow())
        finally:
            done.set()
        assert (code, reason) == (Code.DEADLINE_EXCEEDED, "deadline")
        assert not server.tenant_store().stats()["cpu"].reserved_blocks


@pytest.mark.parametrize("kind", ["reader", "writer"])
def test_a_client_that_stalls_is_cut_off(kind: str) -> None:
    limits = Limits(stall_seconds=2.0, max_bytes_in_flight=16 * 2**20)
    with running_server(cpu_bytes=20 * LARGE.slot_bytes, limits=limits) as server:
        stub = server.stub()
        server.attach(stub, LARGE)
        keys = make_keys(12)
        store_blocks(stub, keys, LARGE)
        done = threading.Event()

        def slow() -> Iterator[Piece]:
            yield next(pieces_of(make_keys(1, "new"), LARGE))
            done.wait(WAIT_SECONDS)

        began = time.monotonic()
        if kind == "reader":
            stalled = stub.load(messages.LoadRequest(keys=b"".join(keys)), timeout=WAIT_SECONDS)
            next(stalled)
        else:
            stalled = stub.store.future(slow(), timeout=WAIT_SECONDS)
        try:
            # It holds all the bytes there are; the next one waits no longer than the stall.
            assert load_blocks(server.stub(), keys) == [payload_of(key, LARGE) for key in keys]
            assert time.monotonic() - began < 10
            with pytest.raises(grpc.RpcError) as raised:
                list(stalled if kind == "reader" else [stalled.result(WAIT_SECONDS)])
            assert raised.value.code() is Code.DEADLINE_EXCEEDED
        finally:
            done.set()
        stats = server.tenant_store().stats()["cpu"]
        assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)
