# SPDX-License-Identifier: Apache-2.0
"""The server as a whole: where it may listen, health, drain, metrics, and as a process."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.cache_server.access.call_guard import _end_call
from stratakv.tiers.cache_server.access.tls import LiveTls, TlsFiles
from stratakv.tiers.cache_server.transports.byte_budget import ByteBudget
from stratakv.tiers.contract import make_keys
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.limits import Limits
from stratakv.tiers.wire.listen import check_exposure, host_port, is_loopback
from stratakv.tiers.wire.status import ending_of

from .rig import WAIT_SECONDS, pieces_of, running_server, store_blocks

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False),
    ],
)  # fmt: skip
def test_what_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize("has_tls", [True, False])
@pytest.mark.parametrize("has_credentials", [True, False])
@pytest.mark.parametrize("insecure", [True, False])
def test_what_others_can_reach_needs_tls_and_credentials(
    has_tls: bool, has_credentials: bool, insecure: bool
) -> None:
    given = {"has_tls": has_tls, "has_credentials": has_credentials, "insecure": insecure}
    check_exposure("127.0.0.1", **given)
    if insecure or (has_tls and has_credentials):
        check_exposure("0.0.0.0", **given)
        return
    with pytest.raises(TierConfigError, match="or say --insecure") as raised:
        check_exposure("0.0.0.0", **given)
    assert ("--tls-cert" in str(raised.value)) is not has_tls
    assert ("--tenants" in str(raised.value)) is not has_credentials


def test_an_open_address_is_refused_before_anything_runs() -> None:
    threads = threading.active_count()
    with pytest.raises(TierConfigError, match=r"other machines can reach 0\.0\.0\.0"):
        running_server(host="0.0.0.0").__enter__()
    assert threading.active_count() <= threads + 1
    with running_server(host="0.0.0.0", insecure=True) as server:
        server.host = "127.0.0.1"
        assert server.health() == SERVING


@pytest.mark.parametrize("flag", ["port", "data_port", "metrics_port"])
def test_a_port_in_use(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        wanted = f"port {port} of 127.0.0.1 is in use; .* --{flag.replace('_', '-')}"
        with pytest.raises(TierConfigError, match=wanted):
            running_server(**{flag: port}).__enter__()


def test_two_servers_cannot_share_a_port() -> None:
    with running_server() as server:
        with pytest.raises(TierConfigError, match="is in use"):
            running_server(port=server.port).__enter__()
        assert server.health() == SERVING


def test_an_address_that_is_none() -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(TierConfigError, match="is no address of this machine"):
            running_server(host=host, insecure=True).__enter__()
    assert host_port("::1", 5) == "[::1]:5"


def test_ipv6_loopback() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with running_server(host="::1") as server:
        server.host = "[::1]"
        assert server.health() == SERVING


def test_tls_files_that_are_none(tmp_path: Path) -> None:
    issued = trustme.CA().issue_cert("localhost")
    cert, key, junk = (tmp_path / name for name in ("cert", "key", "junk"))
    issued.cert_chain_pems[0].write_to_path(cert)
    issued.private_key_pem.write_to_path(key)
    junk.write_text("junk")
    LiveTls(TlsFiles(cert, key)).credentials()
    for files, message in (
        (TlsFiles(tmp_path / "none", key), "--tls-cert names .*none, which cannot be read"),
        (TlsFiles(cert, junk), "no certificate and its key"),
        (TlsFiles(cert, key, junk), "holds no certificates"),
        (TlsFiles(cert, key, tmp_path), "--tls-client-ca names"),
    ):
        with pytest.raises(TierConfigError, match=message):
            files.configuration()


def test_health_while_serving_and_draining() -> None:
    with running_server() as server, server.channel() as channel:
        codec = {
            "request_serializer": health_pb2.HealthCheckRequest.SerializeToString,
            "response_deserializer": health_pb2.HealthCheckResponse.FromString,
        }
        check = channel.unary_unary("/grpc.health.v1.Health/Check", **codec)
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch", **codec)
        named = health_pb2.HealthCheckRequest(service="stratakv.cache.v1.CacheService")
        assert check(named, timeout=WAIT_SECONDS).status == SERVING
        with pytest.raises(grpc.RpcError) as raised:
            check(health_pb2.HealthCheckRequest(service="other"), timeout=WAIT_SECONDS)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        stream = watch(named, timeout=WAIT_SECONDS)
        assert next(stream).status == SERVING
        assert server.close()
        assert [each.status for each in stream] == [NOT_SERVING]


def test_health_watchers_are_bounded() -> None:
    with running_server() as server, server.channel() as channel:
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        streams = [watch(health_pb2.HealthCheckRequest(), timeout=30) for _ in range(32)]
        for stream in streams:
            next(stream)
        with pytest.raises(grpc.RpcError) as raised:
            next(watch(health_pb2.HealthCheckRequest(), timeout=30))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert server.health() == SERVING


def test_a_drain_lets_running_calls_finish() -> None:
    with running_server() as server:
        stub = server.stub()
        server.attach(stub)
        begun, go_on = threading.Event(), threading.Event()

        def slow() -> Iterator[object]:
            pieces = pieces_of(make_keys(2))
            yield next(pieces)
            begun.set()
            go_on.wait(WAIT_SECONDS)
            yield from pieces

        call = stub.store.future(slow(), timeout=WAIT_SECONDS)
        assert begun.wait(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not server.server._guard.running and time.monotonic() < deadline:
            time.sleep(0.002)
        drained = threading.Thread(target=server.close, args=(10.0,))
        drained.start()
        # Refused while the other runs: by the guard, or because nobody listens any more.
        while True:
            try:
                stub.lookup(messages.LookupRequest(), timeout=1.0)
            except grpc.RpcError as error:
                refused = error
                break
            time.sleep(0.002)
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        go_on.set()
        assert list(call.result(WAIT_SECONDS).states) == [State.KEPT] * 2
        drained.join(WAIT_SECONDS)
        assert not drained.is_alive()


def test_a_drain_does_not_wait_for_ever() -> None:
    with running_server() as server:
        stub = server.stub()
        server.attach(stub)
        hold = threading.Event()

        def endless() -> Iterator[object]:
            yield next(pieces_of(make_keys(1)))
            hold.wait(WAIT_SECONDS)

        call = stub.store.future(endless(), timeout=WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while not server.server._guard.running and time.monotonic() < deadline:
            time.sleep(0.002)
        began = time.monotonic()
        assert server.close(drain_seconds=0.6)
        assert time.monotonic() - began < WAIT_SECONDS / 2
        hold.set()
        assert isinstance(call.exception(WAIT_SECONDS), grpc.RpcError)


def test_no_thread_and_no_descriptor_is_left_behind() -> None:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    def one_life() -> None:
        with running_server(metrics_port=0) as server, server.channel() as channel:
            from stratakv.tiers.wire.rpc import Stub

            stub = Stub(channel)
            server.attach(stub)
            store_blocks(stub, make_keys(3))

    one_life()  # what grpc makes once for the process
    before = counts()
    for _ in range(3):
        one_life()
    deadline = time.monotonic() + WAIT_SECONDS
    while counts() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    threads, descriptors = counts()
    assert threads <= before[0] and descriptors <= before[1] + 2


def test_connections_are_bounded() -> None:
    with running_server(limits=Limits(max_connections=3)) as server:
        address = ("127.0.0.1", server.port)
        socks = [socket.create_connection(address, timeout=WAIT_SECONDS) for _ in range(6)]
        closed = 0
        for sock in socks:
            sock.settimeout(0.3)
            try:
                closed += not sock.recv(1)
            except TimeoutError:
                pass  # it waits for us to say something
            except ConnectionError:
                closed += 1
        assert closed == 3
        for sock in socks:
            sock.close()
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                assert server.health(1.0) == SERVING
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline
                time.sleep(0.02)


def test_limits_are_above_zero() -> None:
    with pytest.raises(TierConfigError, match="max_calls must be a number above 0, not 0"):
        Limits(max_calls=0)
    with pytest.raises(TierConfigError, match="two pieces of 1048576 bytes"):
        Limits(max_bytes_in_flight=1000)


def test_bytes_in_flight_are_handed_out_in_turn() -> None:
    async def run() -> list[str]:
        budget, told = ByteBudget(10), []

        async def use(name: str, wish: int) -> None:
            taken = await budget.take_bytes(wish)
            told.append(f"{name} {taken} {budget.in_use}")
            await asyncio.sleep(0)
            budget.give_back_bytes(taken)

        first = await budget.take_bytes(6)
        large = asyncio.create_task(use("large", 100))
        left = asyncio.create_task(use("left", 4))
        small = asyncio.create_task(use("small", 4))
        await asyncio.sleep(0)
        assert not told, "a small wish does not pass a large one"
        left.cancel()
        await asyncio.sleep(0)
        budget.give_back_bytes(first)
        await asyncio.gather(large, small)
        assert left.cancelled() and not budget.in_use
        # Cancelled in the moment of its turn.
        first = await budget.take_bytes(10)
        last = asyncio.create_task(use("last", 10))
        await asyncio.sleep(0)
        budget.give_back_bytes(first)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        assert not budget.in_use
        return told

    assert asyncio.run(run()) == ["large 10 10", "small 4 4"]


def test_a_client_that_left_before_it_was_told_is_no_fault() -> None:
    """Its call is over: whatever runs for it is cancelled, and nobody reads a traceback."""

    class Gone:
        async def abort(self, *_args: object, **_options: object) -> None:
            raise grpc.aio.InternalError("the call has ended")

    ending = ending_of(TimeoutError())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(_end_call(Gone(), ending))
