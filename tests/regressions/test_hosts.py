# SPDX-License-Identifier: Apache-2.0
"""Whom a server on loopback answers: not a page whose name was made to lead there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stratakv.engine.api.api_errors import ApiError
from stratakv.engine.api.http.hosts import HostMiddleware, check_host, hosts_to_check
from stratakv.engine.cli.serve import api_settings
from stratakv.engine.config.server_options import ServerConfig
from stratakv.engine.router.router import Router
from stratakv.engine.router.router_settings import NodeAddress, RouterConfig
from stratakv.tiers.cache_server.metrics_endpoint import MetricsEndpoint
from stratakv.tiers.settings import readers
from stratakv.tiers.settings.values import ConfigError

pytestmark = pytest.mark.regression

OWN = (b"localhost", b"LOCALHOST:8000", b"app.localhost:8000", b"127.0.0.1:8000", b"[::1]:8000",
       b"192.168.0.9", b"[fe80::1%25lo]:1", b"localhost.")  # fmt: skip
OTHERS = (b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"127.0.0.1.evil",
          b"", b"[", b"evil@localhost:x", b"notlocalhost", b"0x7f.1")  # fmt: skip


def scope_of(host: bytes | None, path: str = "/v1/models") -> dict[str, Any]:
    headers = [] if host is None else [(b"host", host)]
    return {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"",
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}  # fmt: skip


def status_of(app: Any, host: bytes | None, path: str = "/v1/models") -> int:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    asyncio.run(app(scope_of(host, path), None, send))
    return int(said[0]["status"])


def test_y04_who_is_checked() -> None:
    for host in ("127.0.0.1", "localhost", "::1"):
        assert hosts_to_check((), host, asks_for_key=False) == {host}
        assert hosts_to_check((), host, asks_for_key=True) is None
        assert hosts_to_check(("*",), host, asks_for_key=False) is None
    assert hosts_to_check((), "0.0.0.0", asks_for_key=False) is None
    assert hosts_to_check(("a.org",), "0.0.0.0", asks_for_key=True) == {"a.org", "0.0.0.0"}


@pytest.mark.parametrize("host", OWN)
def test_y04_addresses_and_localhost_are_answered(host: bytes) -> None:
    check_host(scope_of(host), frozenset())


@pytest.mark.parametrize("host", OTHERS)
def test_y04_other_names_are_refused(host: bytes) -> None:
    with pytest.raises(ApiError, match="--allowed-hosts") as raised:
        check_host(scope_of(host), frozenset({"127.0.0.1"}))
    assert (raised.value.status, raised.value.code) == (403, "host_not_allowed")
    check_host(scope_of(host), None)


def test_y04_names_that_are_told() -> None:
    check_host(scope_of(b"Models.Example:443"), frozenset({"models.example"}))
    check_host(scope_of(None), frozenset())
    for bad in ("http://a", "a:1", "", "a b", "-a"):
        with pytest.raises(ConfigError):
            readers.hosts("--allowed-hosts", bad)


def test_y04_serve_and_route_check_by_default() -> None:
    async def answers(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    assert api_settings(ServerConfig(api_key="k")).allowed_hosts is None
    allowed = api_settings(ServerConfig()).allowed_hosts
    assert allowed is not None
    app = HostMiddleware(answers, allowed)
    assert (status_of(app, b"evil.example:8000"), status_of(app, b"localhost:8000")) == (403, 200)
    router = Router(RouterConfig(decode=(NodeAddress("127.0.0.1", 9),)))
    assert status_of(router, b"evil.example:8100", "/metrics") == 403
    assert status_of(router, b"localhost:8100", "/metrics") == 200
    told = RouterConfig(decode=(NodeAddress("127.0.0.1", 9),), allowed_hosts=("evil.example",))
    assert status_of(Router(told), b"evil.example:8100", "/metrics") == 200


def test_y04_the_cache_servers_metrics() -> None:
    async def said(listens_on: str, host: bytes | None) -> bytes:
        endpoint = MetricsEndpoint(lambda: b"figures")
        await endpoint.start(listens_on, 0)
        line = b"" if host is None else b"Host: " + host + b"\r\n"
        try:
            answer = await endpoint._handle_request(b"GET /metrics HTTP/1.1\r\n" + line + b"\r\n")
        finally:
            await endpoint.close()
        return answer.partition(b" ")[2][:3]

    for listens_on, host, status in (
        ("127.0.0.1", b"evil.example:9405", b"403"),
        ("127.0.0.1", b"localhost:9405", b"200"),
        ("127.0.0.1", None, b"200"),
        ("0.0.0.0", b"cache.example:9405", b"200"),
    ):
        assert asyncio.run(said(listens_on, host)) == status
