# SPDX-License-Identifier: Apache-2.0
"""Two tenants of one server, one of whom tries every way to the other's blocks: calls, data
connections, shared memory, tickets, watching, and the files on the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import make_buffers, make_keys, payload_of
from stratakv.tiers.remote.transports.block_connection import BlockConnection, Refused
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.remote.transports.memory_client import MemoryConnection
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.rpc import Stub

from .data_plane import KINDS, fetch, put
from .rig import (
    LAYOUT,
    WAIT_SECONDS,
    RunningServer,
    load_blocks,
    running_server,
    store_blocks,
    tenant,
    token_of,
)

KEYS = make_keys(8, "hers")
PACKED = b"".join(KEYS)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    """Ann has blocks, in memory and on the disk; eve knows their keys."""
    tenants = [replace(tenant(name), ssd_bytes=4 * 1024**2) for name in ("ann", "eve")]
    limits = Limits(ticket_seconds=0.5)
    with running_server(tenants, ssd_path=tmp_path, limits=limits) as server:
        for name in ("ann", "eve"):
            server.attach(server.stub(token_of(name)))
        assert store_blocks(server.stub(token_of("ann")), KEYS) == [State.KEPT] * 8
        yield server
        found = load_blocks(server.stub(token_of("ann")), KEYS)
        assert found == [payload_of(key, LAYOUT) for key in KEYS]


@pytest.fixture
def eve(server: RunningServer) -> Stub:
    return server.stub(token_of("eve"))


def ticket(stub: Stub) -> Any:
    return stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS)


def opened(offer: Any, kind: str) -> BlockConnection:
    deadline = time.monotonic() + WAIT_SECONDS
    if kind == "memory":
        return MemoryConnection.open(offer.unix_path, offer.ticket, LAYOUT, deadline)
    return DataConnection.open("127.0.0.1", offer.port, offer.ticket, LAYOUT, deadline)


@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_shows_its_own_tenants_blocks(
    server: RunningServer, eve: Stub, kind: str
) -> None:
    connection = opened(ticket(eve), kind)
    assert fetch(connection, KEYS, LAYOUT) == [None] * 8
    # The same keys, other bytes: both are kept, each for their own.
    buffers = make_buffers(8, LAYOUT)
    for buffer in buffers:
        buffer[:] = b"e" * len(buffer)
    stored = connection.store(KEYS, buffers, [None] * 8, time.monotonic() + WAIT_SECONDS)
    assert stored == [State.KEPT] * 8
    assert fetch(connection, KEYS, LAYOUT) == [b"e" * LAYOUT.page_bytes] * 8
    connection.close()


def test_the_memory_that_is_handed_out_holds_nothing_of_others(
    server: RunningServer, eve: Stub
) -> None:
    mine, hers = (
        server.tenant_store("tenant:eve").memory_fd,
        server.tenant_store("tenant:ann").memory_fd,
    )
    assert mine != hers
    connection = opened(ticket(eve), "memory")
    assert isinstance(connection, MemoryConnection)
    put(connection, make_keys(4, "own"), LAYOUT)
    whole = bytes(connection._memory)
    assert payload_of(make_keys(4, "own")[0], LAYOUT) in whole
    assert not any(payload_of(key, LAYOUT) in whole for key in KEYS)
    connection.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_opens_one_connection_and_soon(
    server: RunningServer, eve: Stub, kind: str
) -> None:
    offer = ticket(eve)
    first = opened(offer, kind)
    with pytest.raises(Refused, match="BAD_TICKET"):
        opened(offer, kind)
    first.close()
    with pytest.raises(Refused, match="BAD_TICKET"):
        opened(offer, kind)
    late = ticket(eve)
    time.sleep(0.6)
    with pytest.raises(Refused, match="BAD_TICKET"):
        opened(late, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_ticket_is_that_of_its_tenant_whoever_shows_it(
    server: RunningServer, eve: Stub, kind: str
) -> None:
    """And so it is as secret as a token: one of eve's gives ann nothing of eve's but what eve has,
    and nobody ann's."""
    put(own := opened(ticket(eve), kind), make_keys(2, "own"), LAYOUT)
    shown_by_ann = opened(ticket(eve), kind)
    assert fetch(shown_by_ann, KEYS, LAYOUT) == [None] * 8
    assert None not in fetch(shown_by_ann, make_keys(2, "own"), LAYOUT)
    own.close()
    shown_by_ann.close()


def test_nothing_of_others_is_deleted_touched_or_held(server: RunningServer, eve: Stub) -> None:
    eve.touch(messages.TouchRequest(keys=PACKED), timeout=WAIT_SECONDS)
    assert not eve.delete(messages.DeleteRequest(keys=PACKED), timeout=WAIT_SECONDS).deleted
    eve.delete(messages.DeleteRequest(all=True), timeout=WAIT_SECONDS)
    pinned = eve.pin(messages.PinRequest(keys=PACKED, lease_ms=1000), timeout=WAIT_SECONDS)
    assert (pinned.lease, pinned.prefix) == (0, 0)
    ann = server.stub(token_of("ann"))
    hers = ann.pin(messages.PinRequest(keys=PACKED, lease_ms=60_000), timeout=WAIT_SECONDS)
    for lease in range(1, 20):
        request = messages.UnpinRequest(lease=lease)
        assert not eve.unpin(request, timeout=WAIT_SECONDS).was_held
    assert ann.unpin(messages.UnpinRequest(lease=hers.lease), timeout=WAIT_SECONDS).was_held


def test_a_flood_evicts_only_its_own(server: RunningServer, eve: Stub) -> None:
    for number in range(20):
        store_blocks(eve, make_keys(64, str(number)))
    ann = server.stub(token_of("ann"))
    assert ann.lookup(messages.LookupRequest(keys=PACKED), timeout=WAIT_SECONDS).prefix == 8


def test_a_watcher_hears_of_its_own_tenant_only(server: RunningServer, eve: Stub) -> None:
    events = eve.watch(messages.WatchRequest(), timeout=WAIT_SECONDS)
    next(events)
    ann = server.stub(token_of("ann"))
    store_blocks(ann, more := make_keys(4, "more"))
    ann.delete(messages.DeleteRequest(keys=more[0]), timeout=WAIT_SECONDS)
    store_blocks(eve, own := make_keys(1, "own"))
    assert next(events).stored == own[0]
    events.cancel()
    with pytest.raises(grpc.RpcError):
        next(events)


def test_no_key_of_a_client_is_on_the_disk(tmp_path: Path) -> None:
    with running_server(ssd_path=tmp_path, ssd_bytes=4 * 1024**2) as server:
        stub = server.stub()
        server.attach(stub)
        store_blocks(stub, KEYS)
    raw = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    for key in KEYS:
        assert payload_of(key, LAYOUT) in raw, "the blocks are there"
        assert key[:32] not in raw
        assert key[:32].hex().encode() not in raw
