# SPDX-License-Identifier: Apache-2.0
"""The calls of the cache service over a real server: what each promises, and what it refuses."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.access.auth import Caller, set_caller
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.wire.frames import MAX_BLOCKS, MAX_KEYS, State
from stratakv.tiers.wire.limits import PIECE_BYTES, Limits
from stratakv.tiers.wire.rpc import Stub

from .calls import lookup, packed, refused
from .rig import (
    LARGE,
    LAYOUT,
    WAIT_SECONDS,
    RunningServer,
    load_blocks,
    pieces_of,
    running_server,
    store_blocks,
    tenant,
    token_of,
)

Code = grpc.StatusCode
OTHER = BlockLayout(2, 16, 1, 32, "float32")


def test_describe(server: RunningServer, stub: Stub) -> None:
    said = stub.describe(messages.DescribeRequest(), timeout=WAIT_SECONDS)
    assert said.boot_id == server.server.boot_id and len(said.boot_id) == 16
    assert (said.max_keys, said.max_blocks) == (MAX_KEYS, MAX_BLOCKS)
    assert (said.max_piece_bytes, said.max_lease_ms) == (PIECE_BYTES, 60_000)
    assert said.capacity_bytes == 300 * LAYOUT.slot_bytes
    assert said.tenant == "default" and said.server_version
    assert said.layout.num_layers == LAYOUT.num_layers


def test_every_reply_with_a_boot_id_has_the_same(server: RunningServer, stub: Stub) -> None:
    replies = [
        server.attach(stub),
        stub.lookup(messages.LookupRequest(), timeout=WAIT_SECONDS),
        stub.store(iter(()), timeout=WAIT_SECONDS),
        stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS),
    ]
    assert {reply.boot_id for reply in replies} == {server.server.boot_id}


def test_a_layout_that_differs_is_refused_with_both(server: RunningServer, stub: Stub) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        server.attach(stub, OTHER)
    assert raised.value.code() is Code.FAILED_PRECONDITION
    assert str(LAYOUT) in raised.value.details() and str(OTHER) in raised.value.details()
    assert dict(raised.value.trailing_metadata())["stratakv-reason"] == "layout"
    server.attach(stub)


def test_a_layout_that_is_none_is_refused(stub: Stub) -> None:
    code, _, text = refused(stub.attach, messages.AttachRequest())
    assert code is Code.INVALID_ARGUMENT and "needs the layout" in text
    request = messages.AttachRequest()
    request.layout.layout_version = 9
    code, _, text = refused(stub.attach, request)
    assert code is Code.INVALID_ARGUMENT and "version 9 and this side knows version 1" in text
    request.layout.layout_version = 1
    assert refused(stub.attach, request)[0] is Code.INVALID_ARGUMENT


def test_what_was_stored_is_found_and_loaded(stub: Stub) -> None:
    keys = make_keys(20)
    assert store_blocks(stub, keys) == [State.KEPT] * 20
    assert lookup(stub, b"".join(keys)) == (20, [State.HIT] * 20)
    assert load_blocks(stub, keys) == [payload_of(key, LAYOUT) for key in keys]
    assert store_blocks(stub, keys) == [State.KEPT] * 20
    backwards = [*reversed(keys), keys[0]]
    assert load_blocks(stub, backwards) == [payload_of(key, LAYOUT) for key in backwards]


def test_unknown_keys_are_misses(stub: Stub) -> None:
    keys, unknown = make_keys(3), make_keys(3, "unknown")
    store_blocks(stub, [keys[0], keys[2]])
    mixed = b"".join([keys[0], keys[1], keys[2], *unknown])
    hit, miss = State.HIT, State.MISS
    assert lookup(stub, mixed) == (1, [hit, miss, hit, miss, miss, miss])
    first, second, third = load_blocks(stub, keys)
    assert first and not second and third
    assert load_blocks(stub, unknown) == [None] * 3
    pinned = stub.pin(messages.PinRequest(keys=b"".join(unknown), lease_ms=50))
    assert (pinned.lease, pinned.prefix) == (0, 0)
    stub.touch(messages.TouchRequest(keys=b"".join(unknown)), timeout=WAIT_SECONDS)
    gone = stub.delete(messages.DeleteRequest(keys=b"".join(unknown)), timeout=WAIT_SECONDS)
    assert gone.deleted == 0
    assert not stub.unpin(messages.UnpinRequest(lease=4711), timeout=WAIT_SECONDS).was_held


def test_empty_batches(stub: Stub) -> None:
    assert lookup(stub, b"") == (0, [])
    assert load_blocks(stub, []) == []
    assert store_blocks(stub, []) == []
    stub.touch(messages.TouchRequest(), timeout=WAIT_SECONDS)
    assert stub.delete(messages.DeleteRequest(), timeout=WAIT_SECONDS).deleted == 0
    code, _, text = refused(stub.pin, messages.PinRequest(lease_ms=5))
    assert code is Code.INVALID_ARGUMENT and "needs keys" in text


@pytest.mark.parametrize("length", [1, 39, 41, 79])
def test_keys_of_the_wrong_length(stub: Stub, length: int) -> None:
    keys = bytes(length)
    for call, request in (
        (stub.lookup, messages.LookupRequest(keys=keys)),
        (stub.load, messages.LoadRequest(keys=keys)),
        (stub.pin, messages.PinRequest(keys=keys, lease_ms=5)),
        (stub.touch, messages.TouchRequest(keys=keys)),
        (stub.delete, messages.DeleteRequest(keys=keys)),
    ):
        code, reason, text = refused(call, request)
        assert (code, reason) == (Code.INVALID_ARGUMENT, "invalid")
        assert "keys of 40 bytes each" in text and f"got {length} bytes" in text


def test_oversized_batches(stub: Stub) -> None:
    assert lookup(stub, packed(MAX_KEYS))[0] == 0
    for call, request in (
        (stub.lookup, messages.LookupRequest(keys=packed(MAX_KEYS + 1))),
        (stub.load, messages.LoadRequest(keys=packed(MAX_BLOCKS + 1))),
        (stub.pin, messages.PinRequest(keys=packed(MAX_BLOCKS + 1), lease_ms=5)),
    ):
        assert refused(call, request)[0] is Code.INVALID_ARGUMENT
    code, _, text = refused(stub.store, pieces_of(make_keys(MAX_BLOCKS + 1)))
    assert code is Code.INVALID_ARGUMENT and f"up to {MAX_BLOCKS} blocks" in text


def test_a_message_that_is_too_long(stub: Stub) -> None:
    code, _, _ = refused(stub.lookup, messages.LookupRequest(keys=bytes(4 * 2**20)))
    assert code is Code.RESOURCE_EXHAUSTED
    assert lookup(stub, b"") == (0, [])


def test_a_lease_keeps_blocks(server: RunningServer, stub: Stub) -> None:
    keys = make_keys(4)
    store_blocks(stub, keys)
    pinned = stub.pin(messages.PinRequest(keys=b"".join(keys), lease_ms=60_000))
    assert pinned.prefix == 4 and pinned.lease
    stub.delete(messages.DeleteRequest(keys=b"".join(keys)), timeout=WAIT_SECONDS)
    for number in range(2):  # more than there is room for
        store_blocks(stub, make_keys(200, f"flood {number}"))
    assert load_blocks(stub, keys) == [payload_of(key, LAYOUT) for key in keys]
    assert stub.stats(messages.StatsRequest(), timeout=WAIT_SECONDS).leases == 1
    for was_held in (True, False):
        request = messages.UnpinRequest(lease=pinned.lease)
        assert stub.unpin(request, timeout=WAIT_SECONDS).was_held is was_held


def test_a_lease_ends_by_itself(server: RunningServer, stub: Stub) -> None:
    keys = make_keys(2)
    store_blocks(stub, keys)
    pinned = stub.pin(messages.PinRequest(keys=b"".join(keys), lease_ms=30))
    deadline = time.monotonic() + WAIT_SECONDS
    while server.tenant_store().num_leases and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not server.tenant_store().num_leases
    request = messages.UnpinRequest(lease=pinned.lease)
    assert not stub.unpin(request, timeout=WAIT_SECONDS).was_held


@pytest.mark.parametrize("lease_ms", [0, 60_001, 2**32 - 1])
def test_a_lease_that_cannot_be(stub: Stub, lease_ms: int) -> None:
    request = messages.PinRequest(keys=packed(1), lease_ms=lease_ms)
    code, _, text = refused(stub.pin, request)
    assert code is Code.INVALID_ARGUMENT and f"not {lease_ms}" in text
    assert refused(stub.unpin, messages.UnpinRequest())[0] is Code.INVALID_ARGUMENT


def test_delete(stub: Stub) -> None:
    keys = make_keys(6)
    store_blocks(stub, keys)
    some = messages.DeleteRequest(keys=b"".join(keys[:2] + make_keys(1, "unknown")))
    assert stub.delete(some, timeout=WAIT_SECONDS).deleted == 2
    assert lookup(stub, b"".join(keys))[1].count(State.HIT) == 4
    both = messages.DeleteRequest(keys=keys[0], all=True)
    assert refused(stub.delete, both)[0] is Code.INVALID_ARGUMENT
    stub.delete(messages.DeleteRequest(all=True), timeout=WAIT_SECONDS)
    assert lookup(stub, b"".join(keys)) == (0, [State.MISS] * 6)


def test_stats(stub: Stub) -> None:
    before = stub.stats(messages.StatsRequest(), timeout=WAIT_SECONDS)
    keys = make_keys(5)
    store_blocks(stub, keys)
    load_blocks(stub, keys)
    after = stub.stats(messages.StatsRequest(), timeout=WAIT_SECONDS)
    [was], [now] = before.tiers, after.tiers
    assert (now.name, now.capacity_bytes) == ("cpu", 300 * LAYOUT.slot_bytes)
    assert (now.blocks, now.used_bytes) == (5, 5 * LAYOUT.slot_bytes)
    assert (now.stored_blocks - was.stored_blocks, now.hits - was.hits) == (5, 5)


def test_a_store_that_was_acknowledged_is_seen_by_anyone(server: RunningServer) -> None:
    first, second = server.stub(), server.stub()
    for number in range(50):
        keys = make_keys(3, f"round {number}")
        store_blocks(first, keys)
        assert lookup(second, b"".join(keys))[0] == 3


def test_tenants_do_not_share_a_block() -> None:
    tenants = [tenant("ann"), tenant("bob"), tenant("cyd", pool="p"), tenant("dan", pool="p")]
    with running_server(tenants) as server:
        stubs = {each.name: server.stub(token_of(each.name)) for each in tenants}
        for stub in stubs.values():
            server.attach(stub)
        keys = make_keys(5)
        packed = b"".join(keys)
        store_blocks(stubs["ann"], keys)
        store_blocks(stubs["cyd"], keys[:2])
        prefixes = {name: lookup(stub, packed)[0] for name, stub in stubs.items()}
        assert prefixes == {"ann": 5, "bob": 0, "cyd": 2, "dan": 2}
        assert load_blocks(stubs["bob"], keys) == [None] * 5
        pinned = stubs["cyd"].pin(messages.PinRequest(keys=keys[0], lease_ms=9000))
        unpin = messages.UnpinRequest(lease=pinned.lease)
        assert not stubs["dan"].unpin(unpin).was_held, "a lease of another tenant of the pool"
        assert stubs["cyd"].unpin(unpin).was_held
        described = stubs["bob"].describe(messages.DescribeRequest())
        assert described.tenant == "bob" and described.capacity_bytes == 64 * LAYOUT.slot_bytes


def test_leases_and_tickets_are_bounded() -> None:
    with running_server(limits=Limits(max_leases=2, max_tickets=2)) as server:
        stub = server.stub()
        server.attach(stub)
        keys = make_keys(1)
        store_blocks(stub, keys)
        pin = messages.PinRequest(keys=keys[0], lease_ms=60_000)
        leases = [stub.pin(pin).lease for _ in range(2)]
        code, reason, text = refused(stub.pin, pin)
        assert (code, reason) == (Code.RESOURCE_EXHAUSTED, "busy") and "2 leases" in text
        stub.unpin(messages.UnpinRequest(lease=leases[0]))
        stub.pin(pin)
        for _ in range(2):
            stub.open_data(messages.OpenDataRequest())
        assert refused(stub.open_data, messages.OpenDataRequest())[1] == "busy"


def test_before_anybody_attached() -> None:
    with running_server() as server:
        stub = server.stub()
        described = stub.describe(messages.DescribeRequest(), timeout=WAIT_SECONDS)
        assert not described.HasField("layout") and not described.capacity_bytes
        code, reason, text = refused(stub.lookup, messages.LookupRequest())
        assert (code, reason) == (Code.FAILED_PRECONDITION, "not_attached")
        assert "call Attach first" in text


def test_a_tenant_with_too_little_for_one_block() -> None:
    with running_server(cpu_bytes=1000) as server:
        stub = server.stub()
        with pytest.raises(grpc.RpcError) as raised:
            server.attach(stub)
        assert raised.value.code() is Code.FAILED_PRECONDITION
        expected = "a block takes 4KiB and the tenant has 1kB"
        assert expected in raised.value.details()
        # The layout that could not be is forgotten: another may.
        described = stub.describe(messages.DescribeRequest(), timeout=WAIT_SECONDS)
        assert not described.HasField("layout")


def test_a_server_without_the_memory() -> None:
    with running_server(cpu_bytes=2**50) as server:
        stub = server.stub()
        with pytest.raises(grpc.RpcError) as raised:
            server.attach(stub, LARGE)
        assert raised.value.code() is Code.RESOURCE_EXHAUSTED
        assert dict(raised.value.trailing_metadata())["stratakv-reason"] == "memory"
        assert "iB of memory available" in raised.value.details()


def test_a_disk_that_cannot_be_used(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("in the way")
    with running_server(ssd_bytes=2**20, ssd_path=path) as server:
        stub = server.stub()
        with pytest.raises(grpc.RpcError) as raised:
            server.attach(stub)
        assert raised.value.code() is Code.RESOURCE_EXHAUSTED
        assert dict(raised.value.trailing_metadata())["stratakv-reason"] == "disk"


def test_long_look_ups_of_one_tenant_leave_the_loop_to_others(
    server: RunningServer, stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is alone is answered on the loop, and those that come with it on a thread, one
    after the other; a short one waits for none, and a very long one always takes a thread."""
    service, store = server.server._service, server.tenant_store()
    assert service is not None
    on_loop: list[tuple[int, bool]] = []
    look_up = store.lookup

    def seen(keys: Sequence[bytes], *, asked: bool = False) -> list[State]:
        on_loop.append((len(keys), threading.current_thread() is server._thread))
        return look_up(keys, asked=asked)

    monkeypatch.setattr(store, "lookup", seen)
    monkeypatch.setattr(store, "try_hold", store._changed.acquire)  # its keeper has it at times
    keys = make_keys(MAX_KEYS)

    async def ask(*sizes: int) -> None:
        set_caller(Caller(next(iter(server.settings.tenants))))
        found = await asyncio.gather(*(service._looked_up(store, keys[:size]) for size in sizes))
        assert [len(states) for states in found] == list(sizes)

    server.call(ask(1001, 1002, 1003, 3))
    assert on_loop[:2] == [(1001, True), (3, True)]
    assert sorted(on_loop[2:]) == [(1002, False), (1003, False)]
    on_loop.clear()
    for size in (1024, 1024, 1025):  # one after the other
        server.call(ask(size))
    assert on_loop == [(1024, True), (1024, True), (1025, False)]


def test_a_whole_prompt_in_one_look_up(stub: Stub, scale: str) -> None:
    """The gate is 500,000 keys a second; this only sees what is far from it on a busy machine."""
    store_blocks(stub, make_keys(100))
    request = messages.LookupRequest(keys=packed(1024))
    best, least, until = 1e9, 200 if scale == "long" else 50, time.perf_counter() + WAIT_SECONDS / 2
    for number in itertools.count():
        began = time.perf_counter()
        if number >= least and (1024 / best > 200_000 or began > until):
            break
        stub.lookup(request, timeout=WAIT_SECONDS)
        best = min(best, time.perf_counter() - began)
    assert 1024 / best > 200_000
