# SPDX-License-Identifier: Apache-2.0
"""What guards the server: the key, limits on bodies and headers, time-outs, a core that dies."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from websockets.asyncio.client import connect as async_connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from stratakv.engine.api.api_errors import ApiError
from stratakv.engine.api.api_settings import ApiSettings, CrossOrigin
from stratakv.engine.api.http import http_protocol
from stratakv.engine.api.http.api_key import ApiKeyMiddleware
from stratakv.engine.api.http.hosts import HostMiddleware
from stratakv.engine.api.http.http_server import make_server
from stratakv.engine.api.http.origins import check_origin
from stratakv.tiers.settings.values import ConfigError

from .conftest import until

KEY = {"Authorization": "Bearer s3cret"}
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}


@pytest.fixture(scope="module")
def live_server(server: Any) -> Callable[..., Any]:
    """The class of the shared server, to start others."""
    return type(server)


@pytest.fixture(scope="module")
def strict(live_server: Any, model_path: Path) -> Iterator[Any]:
    """A server with a key and narrow limits."""
    settings = ApiSettings(
        api_key="s3cret",
        max_body_bytes=2000,
        max_prompts_per_request=3,
        request_timeout_seconds=0.3,
        body_timeout_seconds=0.3,
        part_timeout_seconds=0.3,
        stats_timeout_seconds=0.2,
    )
    live = live_server(model_path, settings)
    yield live
    live.stop()


@pytest.fixture(scope="module")
def web() -> Iterator[httpx.Client]:
    """Without a base address, and without certificates, which take long to load."""
    with httpx.Client(timeout=20, verify=False) as client:
        yield client


def _code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"},
     {"Authorization": "Basic s3cret"}, {"Authorization": "s3cret"}],
)  # fmt: skip
def test_every_route_but_health_asks_for_the_key(
    web: httpx.Client, strict: Any, headers: dict[str, str]
) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/ping", "/load", "/nothing"):
        response = web.get(strict.url + path, headers=headers)
        assert _code(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/ping"):
        response = web.post(strict.url + path, json={}, headers=headers)
        assert _code(response) == (401, "invalid_api_key")
    assert web.get(strict.url + "/health", headers=headers).status_code == 200


def test_the_key_opens(web: httpx.Client, strict: Any) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/ping"):
        assert web.get(strict.url + path, headers=KEY).status_code == 200
    lower = {"Authorization": "bearer  s3cret"}
    assert web.get(strict.url + "/version", headers=lower).status_code == 200


def test_dev_routes_are_not_there_unless_asked_for(web: httpx.Client, strict: Any) -> None:
    response = web.post(strict.url + "/reset_prefix_cache", headers=KEY)
    assert _code(response) == (404, "not_found")
    assert "--enable-dev-routes" in response.json()["error"]["message"]


def test_a_body_over_the_limit(web: httpx.Client, strict: Any) -> None:
    url = strict.url + "/v1/completions"
    body = json.dumps({"prompt": "a" * 3000}).encode()
    assert _code(web.post(url, content=body, headers=KEY)) == (413, "body_too_large")
    # Without a declared length it is counted while it comes in.
    chunks = (body[i : i + 500] for i in range(0, len(body), 500))
    assert _code(web.post(url, content=chunks, headers=KEY)) == (413, "body_too_large")


def test_a_body_far_over_the_limit_is_still_answered(web: httpx.Client, strict: Any) -> None:
    """Its client has to be let finish, or it sees a broken connection and no reason."""
    body = b'{"prompt": "' + b"a" * 20_000_000
    response = web.post(strict.url + "/v1/completions", content=body, headers=KEY)
    assert _code(response) == (413, "body_too_large")
    assert response.headers["connection"] == "close"


def test_a_client_that_asks_first_need_not_send_it(strict: Any) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\n"
    head += "Expect: 100-continue\r\nContent-Length: 20000000\r\n\r\n"
    assert _talk(strict, head.encode()).startswith(b"HTTP/1.1 413")


def test_too_many_prompts(web: httpx.Client, strict: Any) -> None:
    response = web.post(strict.url + "/v1/completions", json={"prompt": ["a"] * 4}, headers=KEY)
    assert _code(response) == (400, "too_many_prompts")


def _talk(server: Any, data: bytes) -> bytes:
    """Send raw bytes, then read to the end of the connection."""
    with socket.create_connection(server.address, timeout=10) as sock:
        sock.sendall(data)
        received = b""
        while part := sock.recv(65536):
            received += part
    return received


def test_a_body_that_does_not_come(strict: Any) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer s3cret\r\n"
    answer = _talk(strict, (head + "Content-Length: 100\r\n\r\n{").encode())
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"body_timeout" in answer


def test_headers_over_the_limit(web: httpx.Client, strict: Any) -> None:
    answer = _talk(strict, b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 70_000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert web.get(strict.url + "/health").status_code == 200


@pytest.mark.parametrize("part", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_a_head_that_does_not_come(
    strict: Any, part: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    began = time.monotonic()
    assert _talk(strict, part) == b"", "closed without an answer"
    assert 0.15 < time.monotonic() - began < 20


def test_the_head_of_a_second_request_that_does_not_come(
    strict: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.2)
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with socket.create_connection(strict.address, timeout=10) as sock:
        for _ in range(2):
            sock.sendall(whole)
            received = b""
            while b'"ok"}' not in received:
                part = sock.recv(65536)
                assert part, "closed too early"
                received += part
            time.sleep(0.3)  # between requests another limit counts, and it is longer
        sock.sendall(whole[:20])
        assert sock.recv(65536) == b""


@pytest.mark.parametrize("data", [b"\x16\x03\x01\0\0\r\n\r\n", b"GET /\r\n\r\n"])
def test_what_is_no_http(strict: Any, data: bytes) -> None:
    head, _, body = _talk(strict, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


def test_a_request_over_its_time_is_aborted(web: httpx.Client, strict: Any) -> None:
    url = strict.url + "/v1/completions"
    assert _code(web.post(url, json=ENDLESS, headers=KEY)) == (504, "timeout")
    streamed = web.post(url, json={**ENDLESS, "stream": True}, headers=KEY)
    assert streamed.status_code == 200
    *_, last, rest = streamed.text.split("\n\n")
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert _ends_idle(strict)


def _ends_idle(server: Any) -> bool:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        if server.stats()["num_running"] == 0:
            return True
        time.sleep(0.02)
    return False


def test_a_scrape_does_not_wait_for_a_busy_core(web: httpx.Client, strict: Any) -> None:
    url = strict.url + "/metrics"
    fresh = web.get(url, headers=KEY).text
    busy, free = threading.Event(), threading.Event()
    answer = strict.core.call

    def blocked(name: str, argument: str) -> Any:
        busy.set()
        free.wait(10)
        return answer(name, argument)

    strict.core.call = blocked
    try:
        began = time.monotonic()
        stale = web.get(url, headers=KEY)
        assert time.monotonic() - began < 9, "the core is busy for ten"
    finally:
        strict.core.call = answer
        free.set()
    assert busy.is_set()
    assert stale.status_code == 200
    line = 'stratakv:pool_blocks{engine="0",model_name="tiny"} 600.0'
    assert line in fresh
    assert line in stale.text


def test_a_dead_core_is_told_to_everybody(
    web: httpx.Client, live_server: Any, model_path: Path
) -> None:
    live = live_server(model_path, ApiSettings(stats_timeout_seconds=0.5))
    url = live.url + "/v1/completions"
    with web.stream("POST", url, json={**ENDLESS, "stream": True}) as stream:
        lines = stream.iter_lines()
        assert "choices" in next(lines)
        live.run(live.client.close(5))
        last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
    assert _code(web.post(url, json=ENDLESS)) == (503, "engine_dead")
    assert _code(web.post(url, json={**ENDLESS, "stream": True})) == (503, "engine_dead")
    assert _code(web.get(live.url + "/health")) == (503, "engine_dead")
    metrics = web.get(live.url + "/metrics")
    assert metrics.status_code == 200
    assert 'stratakv:engine_up{engine="0",model_name="tiny"} 0.0' in metrics.text
    live.stop()


def test_the_end_of_the_server_ends_streams_and_aborts_them(
    web: httpx.Client, live_server: Any, model_path: Path
) -> None:
    live = live_server(model_path)
    body = {**ENDLESS, "stream": True}
    with web.stream("POST", live.url + "/v1/completions", json=body) as stream:
        assert "choices" in next(stream.iter_lines())
        began = time.monotonic()
        live.stop()
        assert time.monotonic() - began < 10
    assert live.error is None


# Websockets


def dial(live: Any, **headers: str) -> ClientConnection:
    url = live.url.replace("http", "ws") + "/v1/completions/parts"
    return connect(url, additional_headers=headers, close_timeout=5, proxy=None)


def hear_error(ws: ClientConnection) -> tuple[str, int | None]:
    """The code of the error that comes, and that of the close behind it."""
    code = json.loads(ws.recv(20))["error"]["code"]
    with pytest.raises(ConnectionClosed):
        ws.recv(20)
    return code, ws.close_code


def test_a_socket_asks_for_the_key(strict: Any) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        with pytest.raises(InvalidStatus) as refused, dial(strict, **headers):
            pass
        assert refused.value.response.status_code == 401
        assert b"invalid_api_key" in refused.value.response.body


def test_a_socket_has_the_limits_of_a_body(strict: Any) -> None:
    with dial(strict, **KEY) as ws:  # no message comes
        assert hear_error(ws) == ("body_timeout", 1008)
    with dial(strict, **KEY) as ws:
        ws.send('{"prompt": [5]}')  # no second one
        assert hear_error(ws) == ("body_timeout", 1008)
    with dial(strict, **KEY) as ws:
        ws.send(json.dumps({"prompt": "a" * 2000}))
        assert hear_error(ws) == ("body_too_large", 1009)
    with dial(strict, **KEY) as ws:
        ws.send(json.dumps({**ENDLESS, "is_last": True}))
        assert hear_error(ws) == ("timeout", 1011)
    assert strict.app.state.in_flight.count == 0


def test_the_end_of_the_server_lets_parts_end(live_server: Any, model_path: Path) -> None:
    live = live_server(model_path)
    part = b'10\r\n{"prompt": [5]}\n\r\n'
    head = b"POST /v1/completions/parts HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: application/x-ndjson\r\n\r\n"
    post = socket.create_connection(live.address, 20)
    post.sendall(head + part)
    with dial(live) as ends, dial(live) as stays, post:
        for ws in (ends, stays):
            ws.send('{"prompt": [5], "max_tokens": 2}')
        assert until(lambda: live.app.state.in_flight.count == 3)
        live.server.should_exit = True
        assert until(lambda: not live.server.servers[0].is_serving())
        ends.send('{"prompt": [6], "is_last": true}')
        assert json.loads(ends.recv(20))["choices"]
        live.loop.call_soon_threadsafe(live.app.state.in_flight.abort_all)
        assert hear_error(stays) == ("shutting_down", 1012)
        assert post.recv(65536).startswith(b"HTTP/1.1 503")
    live.thread.join(20)
    assert not live.thread.is_alive() and live.error is None


def test_pages_of_named_origins_may_open_sockets() -> None:
    scope = {"type": "websocket", "headers": [(b"host", b"h:1"), (b"origin", b"https://a.example")]}
    for origins in (("*",), ("https://a.example",)):
        check_origin(scope, CrossOrigin(origins))
    for others in (None, CrossOrigin(("https://b.example",))):
        with pytest.raises(ApiError, match="may not open websockets"):
            check_origin(scope, others)
    twice = {**scope, "headers": [*scope["headers"], (b"origin", b"http://h:1")]}
    with pytest.raises(ApiError):
        check_origin(twice, None)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000"])
def test_a_socket_to_another_host_is_refused(host: str) -> None:
    """A page whose own name leads here is of one origin with the server, for a browser."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def is_never_called(*_: Any) -> None:
        raise AssertionError

    scope = {"type": "websocket", "extensions": {"websocket.http.response": {}},
             "headers": [(b"host", host.encode())]}  # fmt: skip
    guard = HostMiddleware(is_never_called, frozenset(("localhost",)))
    asyncio.run(guard(scope, is_never_called, send))
    assert sent[0]["type"] == "websocket.http.response.start" and sent[0]["status"] == 403


def test_a_socket_that_is_refused_over_tls_leaves_no_fault(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its connection is closed twice, and asyncio then knows of no buffer any more."""
    authority = trustme.CA()
    for_server, for_client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("127.0.0.1").configure_cert(for_server)
    authority.configure_trust(for_client)

    async def is_never_called(*_: Any) -> None:
        raise AssertionError

    async def run() -> None:
        faults: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        app = ApiKeyMiddleware(is_never_called, "s3cret", ())
        server = make_server(app, log_level="warning", shutdown_seconds=1, tls=for_server)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            running = asyncio.ensure_future(server.serve(sockets=[sock]))
            url = f"wss://127.0.0.1:{sock.getsockname()[1]}/v1/completions/parts"
            with pytest.raises(InvalidStatus, match="401"):
                await async_connect(url, ssl=for_client, proxy=None)
            server.should_exit = True
            await asyncio.wait_for(running, 20)
        assert not faults

    asyncio.run(run())
    assert not caplog.records


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"api_key": " "}, "--api-key"), ({"max_body_bytes": 0}, "max_body_bytes")],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ApiSettings(**settings)


@pytest.mark.parametrize("path", ["/v1/completions/parts", "/v1/completions"])
def test_a_refusal_is_read_by_a_client_that_still_sends(strict: Any, path: str) -> None:
    """The server closes behind its answer: what comes until the client closes breaks nothing."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    kind = "Transfer-Encoding: chunked\r\nContent-Type: application/x-ndjson\r\n\r\n"
    with socket.create_connection(strict.address, timeout=30) as client:
        client.sendall((head + kind).encode() + b"1\r\n{\r\n")
        assert client.recv(1, socket.MSG_PEEK)  # the answer is there
        for _ in range(20):
            client.sendall(b"1\r\n{\r\n")
        answer = b""
        while data := client.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"invalid_api_key" in answer
