# SPDX-License-Identifier: Apache-2.0
"""Faults of network and servers, seen by a process that does nothing but use the cache.

Whatever happens: no wrong byte, no call that does not end, the 99th percentile of what a call takes
beyond its own deadline within 100 ms; and blocks come back by themselves when the fault has ended.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import pytest

from stratakv.tiers.cache_server.service import DataPlane
from stratakv.tiers.wire.frames import GREETING, MAGIC, WELCOME, Status
from stratakv.tiers.wire.rpc import SERVICE_NAME

from ...free_ports import free_ports
from ..cache_server.bare_client import BareClient
from ..cache_server.rig import WAIT_SECONDS, running_server, server_process
from .fault_proxy import FaultProxy

HOST = "127.0.0.2"  # the proxies': what a client is told of ports holds for them too
SECONDS = {"attach_seconds": 0.5, "lookup_seconds": 0.1, "load_seconds": 0.2, "store_seconds": 0.2}
MOST_LATE = 0.1
MOST_LATE_EVER = 1.0  # of the one call that was hit worst
RECOVERY_SECONDS = 8.0
# Of each test: faults in CI, and in a long run.
NETWORK, SERVER, RESTARTS, VERSIONS = (12, 600), (8, 180), (5, 120), (4, 40)


def judge(client: BareClient, recoveries: list[float]) -> None:
    """Everything that is promised, of a client that has ended."""
    report = client.report
    assert report is not None
    lateness = {call: report.percentile(call) for call in report.late}
    print(f"calls {dict(report.outcomes)} errors {report.errors}")
    print(f"late p99 {lateness} max { {call: max(t) for call, t in report.late.items()} }")
    print(f"recovery max {max(recoveries):.2f} s of {len(recoveries)}")
    assert (report.wrong, report.hung) == (0, 0)
    assert max(lateness.values()) <= MOST_LATE
    assert max(max(times) for times in report.late.values()) <= MOST_LATE_EVER
    assert max(recoveries) <= RECOVERY_SECONDS
    assert report.outcomes["load ok"] and report.outcomes["store ok"]
    assert any(not outcome.endswith(" ok") for outcome in report.outcomes), "nothing was at fault"


@contextmanager
def behind_proxies(*ports: int) -> Iterator[list[FaultProxy]]:
    """A proxy for each port, at the same port of HOST."""
    with ExitStack() as stack:
        yield [stack.enter_context(FaultProxy((HOST, port), ("127.0.0.1", port))) for port in ports]


# What begins a fault of one proxy, and what ends it.
Fault = tuple[Callable[[FaultProxy], None], Callable[[FaultProxy], None]]


NETWORK_FAULTS: dict[str, Fault] = {
    "reset": (FaultProxy.reset, lambda proxy: None),
    "black hole": (lambda proxy: proxy.black_hole(True), lambda proxy: proxy.black_hole(False)),
    "half-open": (FaultProxy.vanish, lambda proxy: None),
    "one byte a second": (lambda proxy: proxy.pace(1, 1.0), FaultProxy.pace),
    "delay": (lambda proxy: proxy.pace(0, 0.05), FaultProxy.pace),
    "nobody listens": (FaultProxy.leave, lambda proxy: proxy.refuse(False)),
}


@pytest.mark.parametrize("path", ["socket", "streams"])
def test_faults_of_the_network(path: str, scale: str, rng: random.Random) -> None:
    """Where the data connection has no proxy it cannot be reached, and blocks go through gRPC."""
    recoveries = []
    with server_process() as server:
        ports = [server.port, server.data_port][: 2 if path == "socket" else 1]
        with (
            behind_proxies(*ports) as proxies,
            BareClient(server.port, host=HOST, shares_memory=False, **SECONDS) as client,
        ):
            client.wait_good(after=0.0)
            for number in range(NETWORK[scale == "long"]):
                begin, end = list(NETWORK_FAULTS.values())[number % len(NETWORK_FAULTS)]
                hit = rng.choice([proxies, proxies[:1], proxies[1:] or proxies])
                for proxy in hit:
                    begin(proxy)
                time.sleep(rng.uniform(0.0, 0.4))
                for proxy in hit:
                    end(proxy)
                recoveries.append(client.wait_good(after=time.monotonic()))
    judge(client, recoveries)


@pytest.mark.parametrize("path", ["memory", "socket"])
def test_faults_of_the_server(path: str, scale: str, rng: random.Random) -> None:
    """It is stopped, or killed while it holds what clients asked of it."""
    recoveries = []
    with (
        server_process() as server,
        BareClient(server.port, shares_memory=path == "memory", **SECONDS) as client,
    ):
        client.wait_good(after=0.0)
        for number in range(SERVER[scale == "long"]):
            if number % 6 < 5:
                server.stop()
                time.sleep(rng.uniform(0.0, 0.6))
                server.go_on()
            else:
                server.stop()
                time.sleep(rng.uniform(0.0, 0.3))
                server.kill()
                time.sleep(rng.uniform(0.0, 0.3))
                server.start()
            recoveries.append(client.wait_good(after=time.monotonic()))
    judge(client, recoveries)


@pytest.mark.parametrize("path", ["memory", "socket", "streams"])
def test_restarts_faster_than_anybody_looks(path: str, scale: str) -> None:
    """Another server is at the same address before anybody has missed the one before."""
    port, data_port = free_ports(2)
    settings = {"port": port, "data_port": None if path == "streams" else data_port}
    recoveries = []
    with ExitStack() as stack:
        client = None
        for _ in range(RESTARTS[scale == "long"]):
            with running_server(drain_seconds=0.0, **settings):
                began = time.monotonic()
                if client is None:
                    client = stack.enter_context(
                        BareClient(port, shares_memory=path == "memory", **SECONDS)
                    )
                    began = 0.0
                recoveries.append(client.wait_good(after=began) * bool(began))
    assert client is not None
    judge(client, recoveries)


class _Others:
    """A server of another version of the service: nothing is there that this client asks for."""

    def __init__(self, port: int) -> None:
        self._threads = ThreadPoolExecutor(2)
        self.server = grpc.server(self._threads, options=[("grpc.so_reuseport", 0)])
        # An older one has the service, and none of these calls.
        handlers = grpc.method_handlers_generic_handler(SERVICE_NAME, {})
        self.server.add_generic_rpc_handlers((handlers,))
        self.server.add_insecure_port(f"127.0.0.1:{port}")
        self.server.start()

    def close(self) -> None:
        self.server.stop(None).wait()
        self._threads.shutdown()


class _OtherData:
    """A data connection that answers every greeting in its own way."""

    def __init__(self, port: int, answer: bytes) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_SECONDS)

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                with sock:
                    sock.settimeout(1.0)
                    with contextlib.suppress(OSError):
                        sock.recv(GREETING.size, socket.MSG_WAITALL)
                        sock.sendall(self._answer)


def _welcome(version: int, status: int) -> bytes:
    return WELCOME.pack(MAGIC, version, status, 0, bytes(16), 0, 0, 0)


def test_servers_of_other_versions(scale: str, rng: random.Random) -> None:
    """In place of the server for a while, and again and again; then ours is back."""
    port, data_port = free_ports(2)
    settings: dict[str, Any] = {"port": port, "drain_seconds": 0.0}
    data_answers = [
        _welcome(0, Status.BAD_VERSION),
        _welcome(2, Status.OK),
        _welcome(1, Status.BAD_VERSION),
        _welcome(1, 99),
        b"HTTP/1.1 400 Bad Request\r\n\r\n" * 4,
        b"",
    ]
    recoveries = []
    with ExitStack() as stack:
        with running_server(data_port=data_port, **settings):
            client = stack.enter_context(BareClient(port, shares_memory=False, **SECONDS))
            client.wait_good(after=0.0)
        for number in range(VERSIONS[scale == "long"]):
            others = _Others(port)
            time.sleep(rng.uniform(0.0, 1.0))
            others.close()
            other_data = _OtherData(data_port, data_answers[number % len(data_answers)])
            # Calls are understood and the data connection is not: blocks come through gRPC.
            with running_server(data_port=None, **settings) as server:
                service = server.server._service
                assert service is not None
                service._data_plane = DataPlane(data_port)
                recoveries.append(client.wait_good(after=time.monotonic()))
            other_data.close()
            with running_server(data_port=data_port, **settings):
                recoveries.append(client.wait_good(after=time.monotonic()))
    judge(client, recoveries)
