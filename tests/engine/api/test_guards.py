# SPDX-License-Identifier: Apache-2.0
"""What guards the server: the key, limits on bodies and headers, time-outs, a core that dies."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stratakv.engine.api.settings import ApiSettings
from stratakv.engine.config import ConfigError

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
        stats_timeout_seconds=0.2,
    )
    live = live_server(model_path, settings)
    yield live
    live.stop()


def _code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    "headers",
    [{}, {"Authorization": ""}, {"Authorization": "Bearer"}, {"Authorization": "Bearer wrong"},
     {"Authorization": "Basic s3cret"}, {"Authorization": "s3cret"}],
)  # fmt: skip
def test_every_route_but_health_asks_for_the_key(strict: Any, headers: dict[str, str]) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/ping", "/nothing"):
        response = httpx.get(strict.url + path, headers=headers)
        assert _code(response) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(strict.url + "/health", headers=headers).status_code == 200


def test_the_key_opens(strict: Any) -> None:
    for path in ("/v1/models", "/metrics", "/version", "/ping"):
        assert httpx.get(strict.url + path, headers=KEY).status_code == 200
    lower = {"Authorization": "bearer  s3cret"}
    assert httpx.get(strict.url + "/version", headers=lower).status_code == 200


def test_dev_routes_are_not_there_unless_asked_for(strict: Any) -> None:
    assert httpx.post(strict.url + "/reset_prefix_cache", headers=KEY).status_code == 404


def test_a_body_over_the_limit(strict: Any) -> None:
    url = strict.url + "/v1/completions"
    body = json.dumps({"prompt": "a" * 3000}).encode()
    assert _code(httpx.post(url, content=body, headers=KEY)) == (413, "body_too_large")
    # Without a declared length it is counted while it comes in.
    chunks = (body[i : i + 500] for i in range(0, len(body), 500))
    assert _code(httpx.post(url, content=chunks, headers=KEY)) == (413, "body_too_large")


def test_too_many_prompts(strict: Any) -> None:
    response = httpx.post(strict.url + "/v1/completions", json={"prompt": ["a"] * 4}, headers=KEY)
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


def test_headers_over_the_limit(strict: Any) -> None:
    answer = _talk(strict, b"GET /health HTTP/1.1\r\nX-Long: " + b"a" * 70_000)
    assert answer.startswith(b"HTTP/1.1 400")
    assert httpx.get(strict.url + "/health").status_code == 200


def test_a_request_over_its_time_is_aborted(strict: Any) -> None:
    url = strict.url + "/v1/completions"
    assert _code(httpx.post(url, json=ENDLESS, headers=KEY)) == (504, "timeout")
    streamed = httpx.post(url, json={**ENDLESS, "stream": True}, headers=KEY)
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


def test_a_scrape_does_not_wait_for_a_busy_core(strict: Any) -> None:
    url = strict.url + "/metrics"
    fresh = httpx.get(url, headers=KEY).text
    busy, free = threading.Event(), threading.Event()
    answer = strict.core.call

    def blocked(name: str, argument: str) -> Any:
        busy.set()
        free.wait(10)
        return answer(name, argument)

    strict.core.call = blocked
    try:
        began = time.monotonic()
        stale = httpx.get(url, headers=KEY)
        assert time.monotonic() - began < 2
    finally:
        strict.core.call = answer
        free.set()
    assert busy.is_set()
    assert stale.status_code == 200
    line = 'stratakv:pool_blocks{engine="0",model_name="tiny"} 600.0'
    assert line in fresh
    assert line in stale.text


def test_a_dead_core_is_told_to_everybody(live_server: Any, model_path: Path) -> None:
    live = live_server(model_path, ApiSettings(stats_timeout_seconds=0.5))
    url = live.url + "/v1/completions"
    with (
        httpx.Client(timeout=10) as client,
        client.stream("POST", url, json={**ENDLESS, "stream": True}) as stream,
    ):
        lines = stream.iter_lines()
        assert "choices" in next(lines)
        live.run(live.client.close(5))
        last = [line for line in lines if line][-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["code"] == "engine_dead"
    assert _code(httpx.post(url, json=ENDLESS)) == (503, "engine_dead")
    assert _code(httpx.post(url, json={**ENDLESS, "stream": True})) == (503, "engine_dead")
    assert _code(httpx.get(live.url + "/health")) == (503, "engine_dead")
    metrics = httpx.get(live.url + "/metrics")
    assert metrics.status_code == 200
    assert 'stratakv:engine_up{engine="0",model_name="tiny"} 0.0' in metrics.text
    live.stop()


def test_the_end_of_the_server_ends_streams_and_aborts_them(
    live_server: Any, model_path: Path
) -> None:
    live = live_server(model_path)
    body = {**ENDLESS, "stream": True}
    with (
        httpx.Client(timeout=20) as client,
        client.stream("POST", live.url + "/v1/completions", json=body) as stream,
    ):
        assert "choices" in next(stream.iter_lines())
        began = time.monotonic()
        live.stop()
        assert time.monotonic() - began < 10
    assert live.error is None


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"api_key": " "}, "--api-key"), ({"max_body_bytes": 0}, "max_body_bytes")],
)
def test_settings_that_cannot_work(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ApiSettings(**settings)
