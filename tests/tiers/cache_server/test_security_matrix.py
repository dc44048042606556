# SPDX-License-Identifier: Apache-2.0
"""Every call: with no token, a wrong one, another tenant's, an expired certificate.

The calls come from the service descriptor, so a new one is in the matrix before anybody thinks of
it; `_request` must learn how to ask for it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from stratakv.proto.v1 import cache_service_pb2 as messages
from stratakv.tiers.cache_server.access.tenants import Tenant
from stratakv.tiers.cache_server.access.tls import TlsFiles
from stratakv.tiers.contract import make_keys, payload_of
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.protobuf_messages import layout_message
from stratakv.tiers.wire.rpc import METHODS, Method, Stub

from .rig import (
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
KEYS = make_keys(4)
PACKED = b"".join(KEYS)
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"

every_call = pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)


def _request(method: Method, lease: int = 1) -> Any:
    """A call that would do something."""
    return {
        "Describe": messages.DescribeRequest(),
        "Attach": messages.AttachRequest(layout=layout_message(LAYOUT)),
        "Lookup": messages.LookupRequest(keys=PACKED),
        "Load": messages.LoadRequest(keys=PACKED),
        "Store": pieces_of(make_keys(1, "new")),
        "Pin": messages.PinRequest(keys=PACKED, lease_ms=1000),
        "Unpin": messages.UnpinRequest(lease=lease),
        "Touch": messages.TouchRequest(keys=PACKED),
        "Delete": messages.DeleteRequest(all=True),
        "Watch": messages.WatchRequest(),
        "Stats": messages.StatsRequest(),
        "OpenData": messages.OpenDataRequest(),
    }[method.name]


def _call(stub: Stub, method: Method, lease: int = 1) -> Any:
    """The only response, or the first of several; None where there is none."""
    answer = getattr(stub, method.attribute)(_request(method, lease), timeout=WAIT_SECONDS)
    if not method.server_streaming:
        return answer
    first = next(answer, None)
    answer.cancel()
    return first


def _code(stub: Stub, method: Method) -> tuple[Any, str]:
    with pytest.raises(grpc.RpcError) as raised:
        _call(stub, method)
    error: Any = raised.value
    return error.code(), dict(error.trailing_metadata() or ()).get("stratakv-reason", "")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server([tenant("ann"), tenant("bob")], reflection=True) as server:
        for name in ("ann", "bob"):
            server.attach(server.stub(token_of(name)))
        yield server


@pytest.fixture
def ann(server: RunningServer) -> Iterator[Stub]:
    """A stub of the tenant who has blocks, which must be there afterwards too."""
    stub = server.stub(token_of("ann"))
    assert store_blocks(stub, KEYS) == [State.KEPT] * 4
    yield stub
    assert load_blocks(stub, KEYS) == [payload_of(key, LAYOUT) for key in KEYS]


@every_call
def test_without_a_token(server: RunningServer, ann: Stub, method: Method) -> None:
    assert _code(server.stub(), method) == (Code.UNAUTHENTICATED, "unauthenticated")


@every_call
def test_with_a_wrong_token(server: RunningServer, ann: Stub, method: Method) -> None:
    for token in (token_of("ann") + "x", token_of("ann")[:-1], "", token_of("nobody")):
        stub = server.stub(token)
        assert _code(stub, method) == (Code.UNAUTHENTICATED, "unauthenticated")


@every_call
def test_with_the_token_of_another_tenant(server: RunningServer, ann: Stub, method: Method) -> None:
    """It works, on blocks of their own."""
    bob = server.stub(token_of("bob"))
    lease = ann.pin(messages.PinRequest(keys=PACKED, lease_ms=60_000), timeout=WAIT_SECONDS).lease
    try:
        answer = _call(bob, method, lease)
        match method.name:
            case "Describe":
                assert answer.tenant == "bob"
            case "Lookup":
                assert (answer.prefix, set(answer.states)) == (0, {State.MISS})
            case "Load":
                assert (answer.state, len(answer.payload)) == (State.MISS, 0)
            case "Store":
                assert not ann.lookup(messages.LookupRequest(keys=make_keys(1, "new")[0])).prefix
            case "Pin":
                assert (answer.lease, answer.prefix) == (0, 0)
            case "Unpin":
                assert not answer.was_held
            case "Delete":
                assert not answer.deleted
            case "Watch":
                assert not answer.stored
            case "Stats":
                assert not answer.leases
            case "OpenData":
                tenant_store, name, _ = server.server._resolve(answer.ticket) or (None, "", None)
                assert name == "bob" and tenant_store is server.tenant_store("tenant:bob")
            case "Attach" | "Touch":
                pass  # what they did to ann's blocks is looked at below and in the fixture
            case other:
                raise AssertionError(f"say what {other} must not show of another tenant")
        assert server.tenant_store("tenant:ann").num_leases == 1
    finally:
        assert ann.unpin(messages.UnpinRequest(lease=lease), timeout=WAIT_SECONDS).was_held


def test_health_is_open_and_nothing_else(server: RunningServer) -> None:
    assert server.health() == health_pb2.HealthCheckResponse.SERVING
    with server.channel() as channel:
        for path in (REFLECTION, "/stratakv.cache.v1.CacheService/Nothing", "/other.Service/Call"):
            call = channel.stream_stream(path)
            with pytest.raises(grpc.RpcError) as raised:
                list(call(iter([b""]), timeout=WAIT_SECONDS))
            wanted = Code.UNAUTHENTICATED if path == REFLECTION else Code.UNIMPLEMENTED
            assert raised.value.code() is wanted


def test_reflection_with_a_token(server: RunningServer) -> None:
    with server.channel(token_of("ann")) as channel:
        call = channel.stream_stream(
            REFLECTION,
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        [answer] = list(call(iter([request]), timeout=WAIT_SECONDS))
        names = {each.name for each in answer.list_services_response.service}
        assert "stratakv.cache.v1.CacheService" in names


def test_no_reflection_unless_asked_for() -> None:
    with running_server() as server, server.channel() as channel:
        with pytest.raises(grpc.RpcError) as raised:
            list(channel.stream_stream(REFLECTION)(iter([b""]), timeout=WAIT_SECONDS))
        assert raised.value.code() is Code.UNIMPLEMENTED


# Certificates


class Pki:
    """A server's certificate, a CA of clients, and certificates of that CA and of another."""

    def __init__(self, folder: Path) -> None:
        self.server_ca = trustme.CA()
        self.client_ca = trustme.CA()
        self.stranger_ca = trustme.CA()
        served = self.server_ca.issue_cert("localhost", "127.0.0.1")
        self.files = TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "clients.pem")
        served.private_key_pem.write_to_path(self.files.key)
        for number, blob in enumerate(served.cert_chain_pems):
            blob.write_to_path(self.files.cert, append=number > 0)
        assert self.files.client_ca is not None
        self.client_ca.cert_pem.write_to_path(self.files.client_ca)

    def credentials(self, name: str | None, ca: trustme.CA | None = None, **dates: Any) -> Any:
        """Of a client with a certificate of that name, None for no certificate."""
        root = self.server_ca.cert_pem.bytes()
        if name is None:
            return grpc.ssl_channel_credentials(root)
        issued = (ca or self.client_ca).issue_cert(name, **dates)
        chain = b"".join(blob.bytes() for blob in issued.cert_chain_pems)
        return grpc.ssl_channel_credentials(root, issued.private_key_pem.bytes(), chain)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module")
def tls_server(pki: Pki) -> Iterator[RunningServer]:
    tenants = [
        Tenant("ann", 64 * LAYOUT.slot_bytes, certificate_names=("ann.example",)),
        Tenant("bob", 64 * LAYOUT.slot_bytes, certificate_names=("bob.example",)),
    ]
    with running_server(tenants, tls=pki.files) as server:
        for name in ("ann", "bob"):
            server.attach(server.stub(tls=pki.credentials(f"{name}.example")))
        yield server


@every_call
def test_with_a_certificate(tls_server: RunningServer, pki: Pki, method: Method) -> None:
    ann = tls_server.stub(tls=pki.credentials("ann.example"))
    store_blocks(ann, KEYS)
    _call(ann, method)  # a call that is refused raises
    bob = tls_server.stub(tls=pki.credentials("bob.example"))
    assert load_blocks(bob, KEYS) == [None] * 4


@every_call
def test_with_an_expired_certificate(tls_server: RunningServer, pki: Pki, method: Method) -> None:
    now = datetime.datetime.now(datetime.UTC)
    day = datetime.timedelta(days=1)
    expired = pki.credentials("ann.example", not_before=now - 9 * day, not_after=now - day)
    code, _ = _code(tls_server.stub(tls=expired), method)
    assert code is Code.UNAVAILABLE, "the handshake fails"


@every_call
@pytest.mark.parametrize("kind", ["none", "of another CA", "of nobody here"])
def test_with_a_certificate_that_does_not_count(
    tls_server: RunningServer, pki: Pki, method: Method, kind: str
) -> None:
    credentials = {
        "none": lambda: pki.credentials(None),
        "of another CA": lambda: pki.credentials("ann.example", pki.stranger_ca),
        "of nobody here": lambda: pki.credentials("eve.example"),
    }[kind]()
    code, _ = _code(tls_server.stub(tls=credentials), method)
    assert code is (Code.UNAUTHENTICATED if kind == "of nobody here" else Code.UNAVAILABLE)


def test_no_call_without_tls_where_there_is_tls(tls_server: RunningServer) -> None:
    code, _ = _code(tls_server.stub(), METHODS[0])
    assert code is Code.UNAVAILABLE
