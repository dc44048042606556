# SPDX-License-Identifier: Apache-2.0
"""Links to servers: no proxy between, and files that are renewed while a link is down."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme

from stratakv.engine.router import node_tls
from stratakv.engine.router.node_tls import NodeTls
from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.cache_server.access.tls import TlsFiles
from stratakv.tiers.cache_server.slab_serving import slab_process as process
from stratakv.tiers.cache_server.slab_serving.served_files import ServedFiles
from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.remote.credentials import Credentials
from stratakv.tiers.remote.membership import ServerAddress
from stratakv.tiers.remote.remote_settings import RemoteSettings
from stratakv.tiers.remote.server_link import ServerLink, open_channel
from stratakv.tiers.wire.rpc import Stub

from ..tiers.cache_server.rig import LAYOUT, WAIT_SECONDS, running_server
from ..tiers.cache_server.slab_serving.rig import wait_for

pytestmark = pytest.mark.regression


class Authority:
    """Signs certificates, and writes them over those that are there."""

    def __init__(self, folder: Path) -> None:
        self._ca = trustme.CA()
        self._folder = folder

    def trusted(self, name: str = "ca.pem") -> Path:
        self._ca.cert_pem.write_to_path(self._folder / name)
        return self._folder / name

    def issue(self, name: str) -> tuple[Path, Path]:
        issued = self._ca.issue_cert("localhost", common_name=name)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        cert.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        return cert, key


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A socket that the environment calls a proxy."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for name in ("http_proxy", "https_proxy", "grpc_proxy", "GRPC_ADDRESS_HTTP_PROXY"):
            monkeypatch.setenv(name, url if name.islower() else url.removeprefix("http://"))
        monkeypatch.setenv("GRPC_ADDRESS_HTTP_PROXY_ENABLED_ADDRESSES", "127.0.0.0/8")
        for name in ("no_proxy", "no_grpc_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield listener


def test_w03_no_proxy_sees_a_call(proxy: socket.socket) -> None:
    with running_server(token="a-token-of-some-length", data_port=None) as server:
        address = ServerAddress("127.0.0.1", server.port)
        with open_channel(address, Credentials()) as channel:
            metadata = (("authorization", "Bearer a-token-of-some-length"),)
            stub = Stub(channel)
            stub.describe(messages.DescribeRequest(), timeout=WAIT_SECONDS, metadata=metadata)
        with server.channel("a-token-of-some-length") as channel:
            Stub(channel).describe(messages.DescribeRequest(), timeout=WAIT_SECONDS)
    with pytest.raises(BlockingIOError):  # nobody called
        proxy.accept()


def attached_once_renewed(
    server: Any, credentials: Credentials, renew: Callable[[], object], reason: str
) -> bool:
    """Whether a link that is refused for its files is up after they were written anew."""
    settings = RemoteSettings(credentials=credentials)
    link = ServerLink(ServerAddress("localhost", server.port, tls=True), LAYOUT, settings)
    try:
        wait_for(lambda: link.errors.get(reason, 0) > 0, "a refusal")
        renew()
        return link.wait_up(WAIT_SECONDS)
    finally:
        link.close()


@pytest.mark.parametrize("renewed", ["authority", "certificate"])
def test_w02_renewed_files_are_taken_up_by_a_link_that_is_down(
    tmp_path: Path, renewed: str
) -> None:
    right, stranger = Authority(tmp_path), Authority(tmp_path)
    tls = TlsFiles(*right.issue("server"), right.trusted("clients.pem"))
    trusting, issuing = (stranger, right) if renewed == "authority" else (right, stranger)
    cert, key = issuing.issue("engine")
    credentials = Credentials(ca_file=trusting.trusted(), cert_file=cert, key_file=key)

    def renew() -> None:
        right.trusted()
        right.issue("engine")

    with running_server(tls=tls, host="localhost", data_port=None) as server:
        assert attached_once_renewed(server, credentials, renew, "unavailable")


def test_w02_the_router_trusts_a_renewed_authority(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Authority(tmp_path).trusted()
    tls = NodeTls(path)
    before = tls.context()
    assert tls.context() is before  # not read for each request
    path.write_text("half of a file")
    assert [tls.context() for _ in range(3)] == [before] * 3
    assert caplog.text.count("those that were read before stay") == 1
    path.unlink()
    assert tls.context() is before
    Authority(tmp_path).trusted()
    assert tls.context() is not before
    assert tls.context().get_ca_certs() != before.get_ca_certs()


def test_w02_the_router_needs_a_file_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(node_tls.ConfigError, match="holds no certificates"):
        NodeTls(tmp_path / "none")


def test_w02_an_engine_that_serves_takes_renewed_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = Authority(tmp_path), Authority(tmp_path)
    token = tmp_path / "token"
    token.write_text("the-first-token-of-all")
    token.chmod(0o600)
    cert, key = old.issue("server")
    files = ServedFiles(token_file=str(token), tls_cert=str(cert), tls_key=str(key))
    start: Any = SimpleNamespace(
        files=files,
        num_slots=8,
        layout=(LAYOUT.num_layers, LAYOUT.block_size, LAYOUT.num_kv_heads, LAYOUT.head_dim,
                LAYOUT.kv_dtype),
        own_token=None,
    )  # fmt: skip
    with running_server(
        process._tenants(start), tls=files.tls(), host="localhost", data_port=None
    ) as server:
        renewed = process.RenewedFiles(server.server, start, files.state())
        first = served_certificate(server.port)
        new.issue("server")
        cert.write_text("half of a file")
        server.call(renewed.reload_changed())
        server.call(renewed.reload_changed())
        assert caplog.text.count("those before") == 1
        assert served_certificate(server.port) == first
        new.issue("server")
        token.write_text("the-second-token-of-all")
        server.call(renewed.reload_changed())
        second = served_certificate(server.port)
        assert second != first
        credentials = Credentials(ca_file=new.trusted(), token_file=token)
        link = ServerLink(
            ServerAddress("localhost", server.port, tls=True),
            LAYOUT,
            RemoteSettings(credentials=credentials),
        )
        try:
            assert link.wait_up(WAIT_SECONDS)
        finally:
            link.close()


def served_certificate(port: int) -> bytes | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("localhost", port), WAIT_SECONDS) as sock,
        context.wrap_socket(sock) as secured,
    ):
        return secured.getpeercert(binary_form=True)


def test_w02_flags_that_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(TierConfigError, match="go together"):
        ServedFiles(tls_cert="cert").check_flags()
