# SPDX-License-Identifier: Apache-2.0
"""Each transport of `stratakv bench service` brings back what was stored, or gives no figure."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratakv.benchmarks.harness.comparison import WrongWork
from stratakv.benchmarks.harness.served import certificate, find_redis, redis_server
from stratakv.benchmarks.service import transports
from stratakv.benchmarks.service.clients import TRANSPORTS, _Client
from stratakv.benchmarks.service.command import _plan
from stratakv.benchmarks.service.transports import Plan, Transport
from stratakv.benchmarks.tiers.scale import layout_of
from stratakv.tiers.cache_server.access.tls import TlsFiles
from stratakv.tiers.remote.membership import ServerAddress

from ...tiers.cache_server.rig import RunningServer, running_server

BLOCK_BYTES = 16 * 1024
COUNT = 300  # more than the protocol takes at a time


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    with certificate() as files:
        yield files


@pytest.fixture
def client() -> _Client:
    """One client, in this process."""
    return _Client(threading.Barrier(1), 0, BLOCK_BYTES, COUNT)


def check_transport(client: _Client, plan: Plan) -> None:
    """Blocks go and come, in any order, and come back as they were stored last."""
    client.open("transport", plan)
    for verb, passes in (("load", 2), ("store", 2), ("load", 1)):
        moved = client.move("transport", verb, passes)
        assert moved.began < moved.ended and moved.cpu_seconds > 0
    client.shut("transport")


def server_with_room(**settings: Any) -> Any:
    return running_server(cpu_bytes=3 * COUNT * layout_of(BLOCK_BYTES).slot_bytes, **settings)


def where(server: RunningServer) -> ServerAddress:
    return ServerAddress("127.0.0.1", server.port)


def test_memcpy(client: _Client) -> None:
    check_transport(client, Plan("copy"))


@pytest.mark.parametrize("with_tls", [False, True])
def test_raw_sockets(client: _Client, files: tuple[Path, Path], with_tls: bool) -> None:
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, BLOCK_BYTES, COUNT, files if with_tls else None)
    far_end = threading.Thread(target=transports.serve_raw, args=arguments)
    far_end.start()
    assert ours.poll(30)
    plan = Plan("raw", {"port": ours.recv(), "ca_file": files[0] if with_tls else None})
    check_transport(client, plan)
    far_end.join(30)
    assert not far_end.is_alive(), "it leaves when its client does"


@pytest.mark.parametrize("kind", ["memory", "socket"])
def test_connections(client: _Client, kind: str) -> None:
    with server_with_room() as server:
        check_transport(client, _plan(where(server), kind))


def test_streams(client: _Client) -> None:
    with server_with_room(shares_memory=False, data_port=None) as server:
        check_transport(client, _plan(where(server), "streams"))


def test_tls(client: _Client, files: tuple[Path, Path]) -> None:
    with server_with_room(tls=TlsFiles(*files)) as server:
        check_transport(client, _plan(where(server), "socket", files[0]))


def test_the_tier(client: _Client) -> None:
    with server_with_room() as server:
        check_transport(client, Plan("tier", {"address": where(server)}))


def test_another_connection_than_was_meant_is_no_figure(client: _Client) -> None:
    with server_with_room(shares_memory=False) as server:
        with pytest.raises(WrongWork, match="blocks went through socket, not memory"):
            client.open("transport", _plan(where(server), "memory"))
        with pytest.raises(WrongWork, match="blocks went through socket, not memory"):
            client.open("transport", Plan("tier", {"address": where(server)}))


def test_a_server_without_room_is_no_figure(client: _Client) -> None:
    with (
        running_server(cpu_bytes=10 * layout_of(BLOCK_BYTES).slot_bytes) as server,
        pytest.raises(WrongWork, match="did not keep every block"),
    ):
        client.open("transport", _plan(where(server), "socket"))


def test_look_ups(client: _Client) -> None:
    with server_with_room() as server:
        client.open("transport", _plan(where(server), "memory"))
        assert all(seconds > 0 for seconds in client.look_up("transport", 3, COUNT))
        server.tenant_store().clear()
        with pytest.raises(WrongWork, match="did not find every block"):
            client.look_up("transport", 1, COUNT)
        client.shut("transport")


@pytest.mark.skipif(not find_redis(None)[0], reason="redis-server is not installed")
def test_redis(client: _Client) -> None:
    with redis_server(find_redis(None)[0]) as server:
        check_transport(client, Plan("redis", {"port": server.port, "prefix": "client0"}))


@pytest.mark.skipif(bool(transports.why_no_mooncake()), reason="mooncake is not installed")
def test_mooncake(client: _Client) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, BLOCK_BYTES, COUNT)
    far_end = context.Process(target=transports.serve_mooncake, args=arguments)
    far_end.start()
    assert ours.poll(60)
    target, addresses = ours.recv()
    check_transport(client, Plan("mooncake", {"target": target, "addresses": addresses}))
    ours.send(None)
    far_end.join(30)
    assert far_end.exitcode == 0


def test_a_load_that_brings_nothing_is_no_figure(
    client: _Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Idle(Transport):
        """Says that it did."""

        def __init__(self, _blocks: object) -> None:
            pass

        def store(self, order: object) -> None:
            pass

        def load(self, order: object) -> None:
            pass

    monkeypatch.setitem(TRANSPORTS, "idle", Idle)
    client.open("transport", Plan("idle"))
    with pytest.raises(WrongWork, match="block 0 was loaded, but its buffer does not hold it"):
        client.move("transport", "load", 1)
