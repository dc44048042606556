# SPDX-License-Identifier: Apache-2.0
"""Faults of the cache service that were found and mended, in a few lines each."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.contract import make_buffers, make_keys, payload_of, put
from stratakv.tiers.errors import TierError
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.remote_store import RemoteStore, open_remote
from stratakv.tiers.remote.transfers import Transfers
from stratakv.tiers.wire.frames import GREETING, REQUEST, encode_greeting
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.rpc import Stub

from ..tiers.cache_server.data_plane import TICKET, Plane
from ..tiers.cache_server.raw_http2 import RawConnection
from ..tiers.cache_server.rig import (
    LAYOUT,
    WAIT_SECONDS,
    proof_of,
    running_server,
    tenant,
    token_of,
)
from ..tiers.remote.fault_proxy import FaultProxy

PROXY = "127.0.0.2"
LOOKUP = "/stratakv.cache.v1.CacheService/Lookup"


@contextmanager
def opened(port: int, host: str = PROXY, **settings: Any) -> Iterator[RemoteStore]:
    given = {"attach_seconds": 0.5, "shares_memory": False, **settings}
    store = open_remote([ServerAddress(host, port)], LAYOUT, RemoteSettings(**given))
    try:
        assert store.wait_up(WAIT_SECONDS)
        yield store
    finally:
        store.close(WAIT_SECONDS)


def wait_for(what: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_connection_for_calls_whose_other_end_is_gone() -> None:
    """Nothing was attached again until a keepalive noticed, half a minute later."""
    with (
        running_server() as server,
        FaultProxy((PROXY, server.port), ("127.0.0.1", server.port)) as proxy,
        opened(server.port) as store,
    ):
        proxy.vanish()
        future = store.prefetch_lookup(make_keys(1))
        assert future is not None
        with pytest.raises(TierError):
            future.result(WAIT_SECONDS)
        wait_for(lambda: store.wait_up(0.1), 5.0)


def test_strangers_who_began_calls_and_sent_nothing() -> None:
    """Five connections without credentials held every call of a server, for ever."""
    with running_server([tenant("ann")], limits=Limits(max_calls=32)) as server:
        ann = server.stub(token_of("ann"))
        server.attach(ann)
        with RawConnection(("127.0.0.1", server.port)) as stranger:
            for _ in range(100):
                stranger.call(LOOKUP)
            time.sleep(0.2)
            ann.lookup(messages.LookupRequest(), timeout=WAIT_SECONDS)
            assert server.health() == 1


def test_a_firewall_in_front_of_the_data_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """What drops connections took the whole time of every transfer, so that none ever went through;
    and whoever had fallen back to gRPC stayed there."""
    monkeypatch.setattr("stratakv.tiers.remote.transfers._FALLBACK_SECONDS", 0.2)
    with running_server() as server:
        data_port = server.server.data_plane.port
        with (
            FaultProxy((PROXY, server.port), ("127.0.0.1", server.port)),
            FaultProxy((PROXY, data_port), ("127.0.0.1", data_port)) as data,
        ):
            data.swallow(True)
            with opened(server.port, load_seconds=1.0, store_seconds=1.0) as store:
                keys = make_keys(4)
                assert put(store, keys) == [True] * 4
                assert _kind(store._servers[0].stores) == "streams"
                data.swallow(False)
                time.sleep(0.3)
                assert put(store, make_keys(4, "n")) == [True] * 4
                assert _kind(store._servers[0].stores) == "socket"


def _kind(transfers: Transfers) -> str:
    assert transfers._connection is not None
    return transfers._connection.kind


def test_a_fault_while_attaching(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the only thread that ever attaches."""
    times: list[None] = []

    def failing(self: Stub, channel: Any) -> None:
        times.append(None)
        if len(times) < 3:
            raise ValueError("a fault that nobody foresaw")
        make(self, channel)

    make = Stub.__init__
    monkeypatch.setattr(Stub, "__init__", failing)
    with running_server() as server, opened(server.port, "127.0.0.1") as store:
        assert store.stats().errors["internal"] == 2


def test_a_server_out_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that takes connections ended with the first that it could not serve."""
    plane = Plane()
    start = threading.Thread.start

    def failing(self: threading.Thread) -> None:
        if self.name == "stratakv-data":
            raise RuntimeError("can't start new thread")
        start(self)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", failing)
        with socket.create_connection(("127.0.0.1", plane.port), WAIT_SECONDS) as sock:
            assert sock.recv(1) == b""
    connection = plane.connect()
    connection.close()
    plane.close()


def test_clients_that_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A line for each connection that said something wrong; a log that nobody empties stops the
    server."""
    caplog.set_level(logging.WARNING)
    plane = Plane()
    for raw in [b"\xff" * GREETING.size, encode_greeting(TICKET) + b"\xff" * REQUEST.size] * 50:
        with socket.create_connection(("127.0.0.1", plane.port), WAIT_SECONDS) as sock:
            sock.sendall(raw)
            while sock.recv(1000):
                pass
    plane.close()
    lines = [record for record in caplog.records if "was ended" in record.getMessage()]
    assert 1 <= len(lines) <= 5


def test_a_block_of_a_server_that_was_cleared() -> None:
    """A clear while a block arrived: its sender was told that its bytes were corrupt, and watchers
    that it was there."""
    plane = Plane()
    (key,) = make_keys(1)
    write_lease = plane.tenant_store.begin_store([key])
    plane.tenant_store.clear()
    (slot,) = write_lease.slots
    assert slot is not None
    plane.tenant_store.buffer(slot)[:] = payload_of(key, LAYOUT)
    plane.tenant_store.end_store(write_lease, [proof_of(key, plane.tenant_store.buffer(slot))])
    assert plane.tenant_store.corrupt_blocks == 0
    plane.close()


def test_nothing_to_receive_from_a_unix_socket() -> None:
    """A load of nothing but misses waited for bytes that never came."""
    plane = Plane()
    connection = plane.connect("memory")
    began = time.monotonic()
    connection.load(make_keys(4), make_buffers(4, LAYOUT), began + WAIT_SECONDS)
    assert time.monotonic() - began < WAIT_SECONDS, "what never comes is not waited for"
    connection.close()
    plane.close()
