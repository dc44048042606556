# SPDX-License-Identifier: Apache-2.0
"""Tenants, tokens and certificates that change while the server runs: what is refused at once, what
is still there, and what is left as it was where the new ones cannot be.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import re
import shutil
import signal
import socket
import ssl
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
import trustme

from stratakv.engine.config.cache_server_options import read_options, server_settings
from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.cache_server.access.shares import Shares
from stratakv.tiers.cache_server.access.tenants import Tenant, Tenants, token_digest
from stratakv.tiers.cache_server.access.tls import LiveTls, TlsFiles, end_of
from stratakv.tiers.cache_server.layout_note import store_folder
from stratakv.tiers.cache_server.server import ServerSettings
from stratakv.tiers.cache_server.transports.byte_budget import ByteBudget
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.rpc import Stub
from stratakv.tiers.wire.sockets import ConnectionLost

from ...free_ports import free_ports
from ...notify_socket import NotifySocket
from .rig import (
    LAYOUT,
    WAIT_SECONDS,
    RunningServer,
    load_blocks,
    running_server,
    server_process,
    store_blocks,
    tenant,
    token_of,
)

Code = grpc.StatusCode
KEYS = make_keys(6)
PAYLOADS = [payload_of(key, LAYOUT) for key in KEYS]


def with_tokens(name: str, *tokens: str, cpu_bytes: int = 64 * LAYOUT.slot_bytes) -> Tenant:
    return Tenant(name, cpu_bytes, token_digests=tuple(token_digest(each) for each in tokens))


def reload(server: RunningServer, *tenants: Tenant, **changed: Any) -> list[str]:
    settings = server.server.settings
    fresh = replace(settings, tenants=Tenants(tenants) if tenants else settings.tenants, **changed)
    left: list[str] = server.call(server.server.reload(lambda: fresh))
    return left


def refused(stub: Stub) -> bool:
    try:
        stub.lookup(messages.LookupRequest(keys=KEYS[0]), timeout=WAIT_SECONDS)
    except grpc.RpcError as error:
        if error.code() is not Code.UNAUTHENTICATED:
            raise
        return True
    return False


@pytest.fixture
def server() -> Iterator[RunningServer]:
    """With ann, who has blocks, and bob."""
    with running_server([tenant("ann"), tenant("bob")]) as server:
        for name in ("ann", "bob"):
            server.attach(server.stub(token_of(name)))
        assert store_blocks(server.stub(token_of("ann")), KEYS) == [State.KEPT] * len(KEYS)
        yield server


def open_data(server: RunningServer, stub: Stub) -> Callable[[], DataConnection]:
    """A ticket, and what opens a connection with it."""
    ticket = stub.open_data(messages.OpenDataRequest(), timeout=WAIT_SECONDS).ticket
    port = server.server.data_plane.port

    def open_it() -> DataConnection:
        deadline = time.monotonic() + WAIT_SECONDS
        return DataConnection.open("127.0.0.1", port, ticket, LAYOUT, deadline)

    return open_it


def load_by(connection: DataConnection) -> list[bytes]:
    buffers = [memoryview(bytearray(LAYOUT.page_bytes)) for _ in KEYS]
    proofs = connection.load(KEYS, buffers, time.monotonic() + WAIT_SECONDS)
    assert None not in proofs
    return [bytes(each) for each in buffers]


def test_a_token_that_is_gone_opens_nothing(server: RunningServer) -> None:
    old, new = token_of("ann"), "another-token-of-ann-0123456789"
    reload(server, with_tokens("ann", old, new), tenant("bob"))
    with_old, with_new = server.stub(old), server.stub(new)
    assert not refused(with_old) and not refused(with_new)
    late_ticket = open_data(server, with_old)
    watch = with_old.watch(messages.WatchRequest(), timeout=WAIT_SECONDS)
    next(watch)
    with (
        closing(open_data(server, with_old)()) as by_old,
        closing(open_data(server, with_new)()) as by_new,
    ):
        assert load_by(by_old) == load_by(by_new) == PAYLOADS
        reload(server, with_tokens("ann", new), tenant("bob"))
        assert refused(with_old)
        with pytest.raises(ConnectionLost):
            load_by(by_old)
        with pytest.raises(ConnectionLost):
            late_ticket()
        assert list(watch) == [], "the stream comes to its end"
        assert load_by(by_new) == PAYLOADS, "a connection of the new token stays open"
    assert load_blocks(with_new, KEYS) == PAYLOADS
    assert not refused(server.stub(token_of("bob"))), "who did not change notices nothing"
    text = server.server._metrics.exposition().decode()
    for reason in ("credentials", "ticket"):
        assert f'data_connections_refused_total{{reason="{reason}"}} 1.0' in text


def test_tenants_come_and_go(tmp_path: Path) -> None:
    first = [replace(tenant(name), ssd_bytes=2**20) for name in ("ann", "bob")]
    with running_server(first, ssd_path=tmp_path) as server:
        ann, bob = (server.stub(token_of(name)) for name in ("ann", "bob"))
        for stub in (ann, bob):
            server.attach(stub)
            assert store_blocks(stub, KEYS) == [State.KEPT] * len(KEYS)
        third = replace(tenant("cyd"), ssd_bytes=2**20)
        reload(server, first[0], third)
        assert refused(bob) and load_blocks(ann, KEYS) == PAYLOADS
        cyd = server.stub(token_of("cyd"))
        server.attach(cyd)
        assert store_blocks(cyd, KEYS) == [State.KEPT] * len(KEYS)
        assert store_folder(tmp_path, "tenant:bob").exists(), "the files stay"
        assert set(server.server.tenant_stores.open_tenant_stores()) == {"tenant:ann", "tenant:cyd"}
        wait_for(lambda: not any(t.is_alive() for t in server.server.tenant_stores._leaving))
        reload(server, *first)
        server.attach(bob)
        assert load_blocks(bob, KEYS) == PAYLOADS, "they come back out of the files"
        assert load_blocks(ann, KEYS) == PAYLOADS


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_waits_for_the_next_start_is_said(server: RunningServer) -> None:
    larger = replace(tenant("ann"), cpu_bytes=128 * LAYOUT.slot_bytes)
    left = reload(server, larger, tenant("bob"), port=1, drain_seconds=9.0)
    assert left == [
        "tenant:ann has another size from the next start on",
        "port, drain_seconds changed, which the next start takes up",
    ]
    assert load_blocks(server.stub(token_of("ann")), KEYS) == PAYLOADS


def test_what_cannot_be_read_changes_nothing(server: RunningServer) -> None:
    def cannot() -> ServerSettings:
        raise TierConfigError("the tenants file is no TOML")

    anyone = Tenants([Tenant("all", 64 * LAYOUT.slot_bytes, takes_anyone=True)])
    open_to_all = replace(server.server.settings, tenants=anyone, host="0.0.0.0")
    for read, message in ((cannot, "is no TOML"), (lambda: open_to_all, "credentials|TLS")):
        with pytest.raises(TierConfigError, match=message):
            server.call(server.server.reload(read))
    assert load_blocks(server.stub(token_of("ann")), KEYS) == PAYLOADS
    text = server.server._metrics.exposition().decode()
    assert 'stratakv_cache:reloads_total{result="refused"} 2.0' in text


# Certificates


class Authority:
    """Writes certificates of one CA into one pair of files."""

    def __init__(self, folder: Path) -> None:
        self.ca = trustme.CA()
        self.files = TlsFiles(folder / "cert.pem", folder / "key.pem")
        self.root = ssl.create_default_context(cadata=self.ca.cert_pem.bytes().decode())

    def write(self, days: float) -> None:
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=days)
        begin = end - datetime.timedelta(days=days + 100 if days > 0 else 100)
        issued = self.ca.issue_cert("localhost", "127.0.0.1", not_before=begin, not_after=end)
        issued.private_key_pem.write_to_path(self.files.key)
        for number, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(self.files.cert, append=number > 0)

    def serial_at(self, port: int) -> Any:
        """The number of the certificate that a server shows."""
        with (
            socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) as sock,
            self.root.wrap_socket(sock, server_hostname="localhost") as wrapped,
        ):
            shown = wrapped.getpeercert()
            assert shown is not None
            return shown["serialNumber"]


def test_another_certificate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    authority.write(days=3)
    with running_server([tenant("ann")], tls=authority.files) as server:
        assert re.search("cert.pem ends on .*, in 2 days; put another one there", caplog.text)
        server.tls = grpc.ssl_channel_credentials(authority.ca.cert_pem.bytes())
        ann = server.stub(token_of("ann"))
        server.attach(ann)
        store_blocks(ann, KEYS)
        ports = (server.port, server.server.data_plane.port)
        before = [authority.serial_at(port) for port in ports]
        authority.write(days=-1)
        with pytest.raises(TierConfigError, match=r"cert.pem holds a certificate that ended on"):
            reload(server)
        assert [authority.serial_at(port) for port in ports] == before
        caplog.clear()
        authority.write(days=90)
        reload(server)
        after = [authority.serial_at(port) for port in ports]
        assert after[0] == after[1] != before[0]
        assert load_blocks(ann, KEYS) == PAYLOADS, "a connection that is open stays"
        assert load_blocks(server.stub(token_of("ann")), KEYS) == PAYLOADS
        assert "ends on" not in caplog.text
        gauge = re.search(
            r"certificate_end_time_seconds (\d\S+)", server.server._metrics.exposition().decode()
        )
        ninety = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=90)
        assert gauge is not None and abs(float(gauge[1]) - ninety.timestamp()) < 3600
        with pytest.raises(TierConfigError, match="TLS cannot be begun or given up"):
            reload(server, tls=None)


def test_one_that_has_ended_is_told_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority(tmp_path)
    authority.write(days=-1)
    LiveTls(authority.files)
    assert "clients refuse it; put another one there and send SIGHUP" in caplog.text


@pytest.mark.parametrize("year", [2031, 2049, 2050, 2077])  # two ways to write a time
def test_the_end_of_a_certificate(year: int) -> None:
    end = datetime.datetime(year, 5, 17, 3, 4, 5, tzinfo=datetime.UTC)
    later = trustme.CA().cert_pem.bytes()
    pem = trustme.CA().issue_cert("x", not_after=end).cert_chain_pems[0].bytes()
    assert end_of(pem) == end
    assert end_of(later) is not None and end_of(later + pem) == min(end, end_of(later) or end)


@pytest.mark.parametrize(
    "pem",
    [
        b"",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----",
    ],
)
def test_what_is_no_certificate_has_no_end(pem: bytes) -> None:
    assert end_of(pem) is None


# Shares


def test_shares_of_another_number_of_tenants(rng: Any) -> None:
    shares = Shares(16, 2)
    held: list[str] = []
    for _ in range(2000):
        match rng.randrange(5):
            case 0:
                shares.set_tenants(rng.randint(1, 20))
            case 1 | 2 if held:
                name = held.pop(rng.randrange(len(held)))
                shares.give_back_place(name)
            case _:
                name = f"t{rng.randrange(8)}"
                if shares.take_place(name):
                    held.append(name)
        for name in set(held):
            assert shares.places_of(name) == held.count(name)
    for name in held:
        shares.give_back_place(name)
    shares.set_tenants(4)
    for name in ("a", "b", "c", "d"):
        assert shares.take_place(name), "what is kept for each is there for each"


def test_bytes_of_another_total() -> None:
    async def resize() -> None:
        budget = ByteBudget(100)
        assert await budget.take_bytes(80) == 80
        waiting = asyncio.ensure_future(budget.take_bytes(70))
        await asyncio.sleep(0)
        budget.resize(60)
        assert not waiting.done()
        budget.give_back_bytes(80)
        assert await waiting == 60, "no more than there are now"
        budget.give_back_bytes(60)
        assert budget.in_use == 0

    asyncio.run(resize())


# A process


FILE = """\
[[tenant]]
name = "ann"
token_sha256 = ["{ann}"]
cpu_bytes = "1MiB"

[[tenant]]
name = "bob"
token_sha256 = ["{bob}"]
cpu_bytes = "1MiB"
"""


# Of the old token, from the signal to the first refusal.
MOST_SECONDS = 1.0


def test_reloads_under_load(
    tmp_path: Path, scale: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """bob's token is another one each time, and ann's are never refused. What has told systemd
    that it is ready again refuses the old one at once; a long run holds how long that took against
    the promise, by its client's clock and by its own."""
    listening = NotifySocket(str(tmp_path / "notify"))
    monkeypatch.setenv("NOTIFY_SOCKET", listening.path)
    took: list[float] = []
    reloads = 50 if scale == "long" else 4
    path = tmp_path / "tenants.toml"

    def write(bob: str) -> None:
        digests = {"ann": token_of("ann"), "bob": bob}
        text = FILE.format(**{name: token_digest(each).hex() for name, each in digests.items()})
        fresh = path.with_suffix(".new")
        fresh.write_text(text)
        fresh.rename(path)

    write(token_of("bob"))
    with listening, server_process("--tenants", str(path), "--cpu-bytes", "2MiB") as server:
        assert server.process is not None
        assert listening.next() == {"READY": "1"}
        ann = server.stub(token_of("ann"))
        server.attach(ann)
        store_blocks(ann, KEYS)
        server.attach(server.stub(token_of("bob")))
        store_blocks(server.stub(token_of("bob")), KEYS)
        failures: list[str] = []
        calls, ended = [0], threading.Event()

        def work() -> None:
            stub = server.stub(token_of("ann"))
            while not ended.is_set():
                try:
                    if load_blocks(stub, KEYS) != PAYLOADS:
                        failures.append("a block is lost")
                    store_blocks(stub, make_keys(3, f"new-{calls[0]}"))
                except grpc.RpcError as error:
                    failures.append(str(error))
                calls[0] += 1

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            token = token_of("bob")
            for number in range(reloads):
                old, token = token, f"{token_of('bob')}-{number}"
                write(token)
                begun = calls[0]
                with_old, with_new = server.stub(old), server.stub(token)
                assert not refused(with_old) and refused(with_new)
                sent = time.monotonic_ns()
                server.process.send_signal(signal.SIGHUP)
                told = listening.next()
                assert told.keys() == {"RELOADING", "MONOTONIC_USEC"}
                assert int(told["MONOTONIC_USEC"]) >= sent // 1000
                assert listening.next() == {"READY": "1"}
                assert refused(with_old), "at the first call after it"
                took.append((time.monotonic_ns() - sent) / 1e9)
                assert load_blocks(with_new, KEYS) == PAYLOADS
                wait_for(lambda begun=begun: calls[0] > begun)
            path.write_text("[[tenant]\n")
            server.process.send_signal(signal.SIGHUP)
            assert "RELOADING" in listening.next() and listening.next() == {"READY": "1"}
            begun = calls[0]
            wait_for(lambda: calls[0] > begun + 2)
            assert load_blocks(server.stub(token), KEYS) == PAYLOADS, "the old ones stay"
        finally:
            ended.set()
            for thread in threads:
                thread.join(WAIT_SECONDS)
        assert server.terminate() == 0
        assert listening.next() == {"STOPPING": "1"} and listening.is_quiet()
    assert failures == [] and calls[0] > reloads
    own = [float(each) for each in re.findall(r"read anew in (\d\.\d{3}) s;", server.output)]
    assert len(own) == len(took) == reloads
    if scale == "long":
        with capsys.disabled():
            print(
                f"\n{reloads} reloads under load: the old token was refused after "
                f"{median(took):.3f} s (at most {max(took):.3f}), by the server's own clock "
                f"{median(own):.3f} s (at most {max(own):.3f})"
            )
        assert max(took) < MOST_SECONDS
    lines = [line for line in server.output.splitlines() if "SIGHUP" in line]
    assert len(lines) == reloads + 1
    assert re.search(r"tenants.toml is no TOML: .*; everything stays as it was", lines[-1])


def test_a_signal_in_the_start_or_in_the_end_ends_nothing(tmp_path: Path) -> None:
    """What is written meanwhile is in force; the order to end is obeyed in the orderly way."""
    path = tmp_path / "token"
    path.write_bytes(b"\xef\xbb\xbf" + token_of("ann").encode() + b"\r\n")  # of another system
    path.chmod(0o600)
    [port] = free_ports(1)
    flags = ("--token-file", str(path), "--metrics-port", str(port))
    with server_process(*flags, start=False) as server:
        server.start(wait=False)
        assert server.process is not None
        number = server.process.pid

        def takes_it() -> bool:
            """It has come so far that the signal does not end it as it ends any program."""
            status = Path(f"/proc/{number}/status").read_text()
            masks = re.findall(r"^Sig(?:Ign|Cgt):\s*([0-9a-f]+)$", status, re.MULTILINE)
            return any(int(mask, 16) & 1 for mask in masks)

        wait_for(takes_it)
        for _ in range(3):
            server.process.send_signal(signal.SIGHUP)
        server.wait_until_serving()
        server.attach(server.stub(token_of("ann")))
        path.write_text("")
        server.process.send_signal(signal.SIGHUP)
        wait_for(lambda: 'reloads_total{result="refused"} 1.0' in metrics_at(port))
        assert refused(server.stub("x" * 20)), "an empty file lets nobody in"
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            while server.process.poll() is None:
                server.process.send_signal(signal.SIGHUP)
                time.sleep(0.01)
        assert server.wait() == 0
    assert "which is empty; write a token there" in server.output


def metrics_at(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_SECONDS) as read:
        text: str = read.read().decode()
    return text


def test_a_disk_that_is_gone_is_not_asked_at_a_reload(tmp_path: Path) -> None:
    """The secret lies there, and a token is to be refused nevertheless."""
    flags = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": "16MiB"}
    options = read_options(flags, {})
    first = server_settings(options)
    shutil.rmtree(tmp_path / "ssd")
    again = server_settings(options, first)
    assert again.secret == first.secret and again.own_token == first.own_token
    assert not (tmp_path / "ssd").exists(), "and no other secret is made"
