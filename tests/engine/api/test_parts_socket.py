# SPDX-License-Identifier: Apache-2.0
"""Prompts in parts over a websocket: messages, closes, and clients that mean no good."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, ConnectionClosedOK
from websockets.sync.client import ClientConnection, connect

from stratakv.engine.api.http import websocket_protocol
from stratakv.engine.api.http.http_server import make_server
from stratakv.engine.api.http.websocket_protocol import PIECE_BYTES, WebSocketProtocol
from stratakv.engine.client import message_client
from stratakv.engine.request.core_messages import ExtendPrompt
from stratakv.engine.router.router import Router
from stratakv.engine.router.router_settings import RouterConfig, read_node

from ...tiers.store_contract import wait_until
from .conftest import LiveServer
from .test_completion_parts import PATH, TEXT, computed, gauge, lines_of, send
from .test_completions import GREEDY, IDS, post


@pytest.fixture
def dial(server: LiveServer) -> Callable[..., ClientConnection]:
    """Opens websockets to the shared server."""
    url = server.url.replace("http", "ws") + PATH

    def open_socket(**options: Any) -> ClientConnection:
        return connect(url, open_timeout=30, close_timeout=5, proxy=None, **options)

    return open_socket


def say(ws: ClientConnection, *parts: Any) -> None:
    for part in parts:
        ws.send(json.dumps(part))


def hear_error(ws: ClientConnection) -> tuple[dict[str, Any], int]:
    """The error object that comes next, and the code of the close behind it."""
    error = json.loads(ws.recv(30))["error"]
    with pytest.raises(ConnectionClosed) as ended:
        ws.recv(30)
    assert ended.value.rcvd is not None
    return error, ended.value.rcvd.code


@pytest.mark.parametrize("size", [7, 40])
def test_a_socket_answers_as_the_route_does(
    http: httpx.Client, dial: Callable[..., ClientConnection], size: int
) -> None:
    parts = [TEXT[place : place + size] for place in range(0, len(TEXT), size)]
    wishes = {"max_tokens": 9, "return_token_ids": True}
    with dial() as ws:
        say(ws, *lines_of(parts, **wishes), {"is_last": True})
        found = json.loads(ws.recv(30))
        with pytest.raises(ConnectionClosedOK):
            ws.recv(30)
    assert ws.close_code == 1000
    whole = post(http, prompt=TEXT, **wishes)
    assert found["choices"] == whole["choices"]
    assert found["object"] == "text_completion"


def test_a_socket_gets_a_message_for_each_chunk(
    http: httpx.Client, dial: Callable[..., ClientConnection]
) -> None:
    options = {"max_tokens": 6, "stream": True, "stream_options": {"include_usage": True}}
    with dial() as ws:
        first, *others = lines_of([IDS[:3], IDS[3:]], **options)
        say(ws, first, {**others[0], "is_last": True})
        chunks = [json.loads(each) for each in ws]
    assert ws.close_code == 1000
    assert len(chunks) > 2 and chunks[-1]["usage"]["completion_tokens"] == 6
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == post(http, prompt=IDS, max_tokens=6)["choices"][0]["text"]


@pytest.mark.parametrize(("messages", "param", "code"), [
    (['{"prompt": [1], "n": 2}'], "n", 1008),
    (['{"prompt": [1], "model": "other"}'], "model", 1008),
    (['{"prompt": [1], "more": 2}'], "more", 1008),
    (['{"prompt": [1]}', '{"prompt": "a", "max_tokens": 2}'], "max_tokens", 1008),
    (['{"prompt": [1]}', "{}"], "prompt", 1008),
    (['{"prompt": [1]}', '{"prompt": [1000000]}'], "prompt[1]", 1008),
    (['{"is_last": true}'], "prompt[0]", 1008),
    (['"text"'], None, 1008),
    (['{"prompt": '], None, 1007),
    ([""], None, 1007),
    ([b'{"prompt": [1]}'], None, 1003),
    (['{"prompt": [1], "max_tokens": 4000, "ignore_eos": true, "is_last": true}', "{}"], None,
     1008),
])  # fmt: skip
def test_bad_messages_are_refused_by_name(
    http: httpx.Client,
    dial: Callable[..., ClientConnection],
    messages: list[str | bytes],
    param: str | None,
    code: int,
) -> None:
    with dial() as ws:
        with suppress(ConnectionClosed):
            for each in messages:
                ws.send(each)
        error, closed = hear_error(ws)
    assert error["param"] == param, error
    assert closed == code
    assert error["message"] and ws.close_reason == (error["code"] or error["type"])
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_a_full_engine_asks_a_socket_to_try_later(
    dial: Callable[..., ClientConnection], server: LiveServer
) -> None:
    sessions = server.core._continuations.sessions
    before = sessions.most_sessions
    sessions.most_sessions = 0
    try:
        with dial() as ws:
            with suppress(ConnectionClosed):  # the refusal may come before the last part is sent
                say(ws, *lines_of([IDS, IDS]), {"is_last": True})
            error, closed = hear_error(ws)
    finally:
        sessions.most_sessions = before
    assert "try later" in error["message"] and closed == 1013


def test_a_socket_that_closes_in_the_middle_leaves_nothing_behind(
    http: httpx.Client, dial: Callable[..., ClientConnection]
) -> None:
    before = computed(http)
    with dial() as ws:
        say(ws, {**GREEDY, "prompt": [9, 8, 7] * 15})
        wait_until(lambda: computed(http) >= before + 45)
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)
    with dial() as ws:  # and in the middle of its answer
        say(ws, {"prompt": IDS, "max_tokens": 4000, "ignore_eos": True, "stream": True,
                 "is_last": True})  # fmt: skip
        ws.recv(30)
        assert gauge(http, "vllm:num_requests_running") == 1.0
    wait_until(lambda: gauge(http, "vllm:num_requests_running") == 0.0)
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_ten_thousand_tiny_parts_are_one_prompt(
    http: httpx.Client, dial: Callable[..., ClientConnection]
) -> None:
    """They are one write, and the server takes them a few hundred at a time."""
    tiny = b"".join(masked(0x81, b'{"prompt":""}') for _ in range(10_000))
    with dial() as ws:
        say(ws, {**GREEDY, "prompt": IDS[:2], "max_tokens": 3})
        ws.socket.sendall(tiny)
        say(ws, {"prompt": IDS[2:], "is_last": True})
        found = json.loads(ws.recv(30))
    assert found["choices"] == post(http, prompt=IDS, max_tokens=3)["choices"]


def masked(first_byte: int, data: bytes) -> bytes:
    """A short frame as a client sends it, under a mask of zeros."""
    return bytes([first_byte, 0x80 | len(data)]) + b"\0\0\0\0" + data


def shake(server: LiveServer, then: bytes = b"", **headers: str) -> socket.socket:
    """A socket whose handshake is sent; its answer is not read."""
    given = {"Host": server.url.removeprefix("http://"), "Connection": "Upgrade",
             "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
             "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", **headers}  # fmt: skip
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(30.0)
    client.connect(server.address)
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    client.sendall(f"GET {PATH} HTTP/1.1\r\n{lines}\r\n".encode() + then)
    return client


def raw_socket(server: LiveServer) -> socket.socket:
    """A websocket that is open, whose client reads nothing further."""
    client, head = shake(server), b""
    while not head.endswith(b"\r\n\r\n"):
        head += client.recv(1)
    assert head.startswith(b"HTTP/1.1 101"), head
    return client


def fill(client: socket.socket, data: bytes) -> int:
    """Send the same again and again until nothing more fits into the kernel's buffers, or the
    server is gone; how many bytes it took."""
    client.settimeout(0.2)
    sent = 0
    try:
        while True:
            sent += client.send(data)
    except OSError:  # a timeout is one too
        return sent


def of_server(server: LiveServer) -> WebSocketProtocol:
    [ws] = [each for each in server.server.server_state.connections
            if isinstance(each, WebSocketProtocol)]  # fmt: skip
    return ws


def test_frames_faster_than_the_engine_wait_in_the_socket(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the engine takes no part, the server reads no more than one read of the socket."""
    gate, held = asyncio.Event(), asyncio.Event()
    extend = server.client.extend_prompt

    async def wait_for_gate(part: ExtendPrompt) -> None:
        held.set()
        await gate.wait()
        await extend(part)

    monkeypatch.setattr(server.client, "extend_prompt", wait_for_gate)
    line = masked(0x81, b'{"prompt":[7]}')
    try:
        with raw_socket(server) as client:
            client.sendall(masked(0x81, b'{"prompt": [5, 6, 7], "max_tokens": 2}') + line)
            sent = fill(client, line * 5000)
            wait_until(held.is_set)
            mine = of_server(server)
            assert sent > len(mine._unparsed) > 0
            assert len(mine._unparsed) <= 512 * 1024
            assert mine.queue.qsize() <= PIECE_BYTES // len(line) + 1
            assert not mine.transport.is_reading()
    finally:
        server.loop.call_soon_threadsafe(gate.set)
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)


@pytest.mark.parametrize(("frames", "code"), [
    (masked(0x01, b"{") + masked(0x00, b"") * 70_000, 1009),  # a message without an end
    (masked(0x81, b"\xff"), 1007),
    (masked(0x83, b""), 1002),
    (bytes([0x81, 0xFF]) + (1 << 40).to_bytes(8, "big") + b"\0\0\0\0", 1009),
    (b"\x81\x01a", 1002),  # without a mask
])  # fmt: skip
def test_frames_that_cannot_be_are_the_end(
    http: httpx.Client, dial: Callable[..., ClientConnection], frames: bytes, code: int
) -> None:
    with dial() as ws:
        ws.socket.sendall(frames)
        with pytest.raises(ConnectionClosed) as ended:
            ws.recv(30)
    assert ended.value.rcvd is not None and ended.value.rcvd.code == code
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_a_prompt_that_is_not_known_any_more_is_an_error(
    http: httpx.Client,
    server: LiveServer,
    dial: Callable[..., ClientConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Never the answer to the parts that were known."""
    with dial() as ws:
        say(ws, {"prompt": IDS, "max_tokens": 4})
        client = server.client
        wait_until(lambda: bool(client._unread_timers))
        [request_id] = client._unread_timers
        server.loop.call_soon_threadsafe(client._drop_unread, request_id)
        say(ws, {"prompt": IDS, "is_last": True})
        error, code = hear_error(ws)
    assert (error["code"], code) == ("body_timeout", 1008)
    assert "not open any more" in error["message"]
    assert not client._unread_timers and not client._mailboxes


def test_a_prompt_may_wait_as_long_as_the_core_lets_it(
    http: httpx.Client,
    server: LiveServer,
    dial: Callable[..., ClientConnection],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However much longer that is than what is let go of for its readers' sake."""
    monkeypatch.setattr(message_client, "UNREAD_SECONDS", 0.05)
    client = server.client
    assert client.ready.session_idle_seconds == server.core.config.session_idle_seconds == 60.0
    with dial() as ws:
        say(ws, {**GREEDY, "prompt": IDS[:4], "max_tokens": 4})
        wait_until(lambda: bool(client._unread_timers))
        [timer] = client._unread_timers.values()
        assert timer.when() > server.loop.time() + 50.0
        time.sleep(0.3)
        say(ws, {"prompt": IDS[4:], "is_last": True})
        found = json.loads(ws.recv(30))
    assert found["choices"] == post(http, prompt=IDS, max_tokens=4)["choices"]


def test_pings_that_are_never_read_hold_up_their_sender_alone(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_protocol, "STALL_SECONDS", 0.3)
    ping = masked(0x89, b"p" * 125) * 2000
    with raw_socket(server) as client:
        fill(client, ping)
        wait_until(lambda: http.get("/load").json()["server_load"] == 0)


def test_a_socket_that_reads_no_answer_is_cut_off(
    http: httpx.Client, server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket_protocol, "STALL_SECONDS", 0.3)
    body = {"prompt": IDS, "max_tokens": 4000, "ignore_eos": True, "stream": True,
            "logprobs": 20, "is_last": True}  # fmt: skip
    with raw_socket(server) as client:
        data = json.dumps(body).encode()
        frame = bytes([0x81, 0x80 | 126]) + len(data).to_bytes(2, "big") + b"\0\0\0\0" + data
        client.sendall(frame)
        wait_until(lambda: http.get("/load").json()["server_load"] == 1)
        narrow = of_server(server).transport.get_extra_info("socket")
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        wait_until(lambda: http.get("/load").json()["server_load"] == 0)
    assert server.stats()["num_running"] == 0


@pytest.mark.parametrize(("headers", "status", "code"), [
    ({"Origin": "https://elsewhere.example"}, 403, "origin_not_allowed"),
    ({"Origin": "null"}, 403, "origin_not_allowed"),
    ({"X-Long": "x" * 9000}, 400, "invalid_http"),
])  # fmt: skip
def test_handshakes_that_are_refused(
    server: LiveServer, headers: dict[str, str], status: int, code: str
) -> None:
    with shake(server, **headers) as client:
        answer = b""
        while more := client.recv(65536):
            answer += more
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert f'"code":"{code}"'.encode() in answer


def test_a_page_of_the_server_itself_may_open_a_socket(server: LiveServer) -> None:
    with shake(server, Origin=server.url) as client:
        assert client.recv(12) == b"HTTP/1.1 101"


def test_what_comes_together_with_the_handshake_counts(server: LiveServer) -> None:
    part = b'{"prompt":[1,5],"max_tokens":1,"is_last":true}'
    with shake(server, then=masked(0x81, part)) as client:
        answer = b""
        while b'"text_completion"' not in answer:
            more = client.recv(65536)
            assert more, answer
            answer += more


def test_only_this_path_has_sockets(http: httpx.Client, server: LiveServer) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    assert http.get("/health", headers=upgrade).status_code == 200
    response = http.get(PATH)
    assert response.status_code == 405 and "POST" in response.json()["error"]["message"]


@pytest.fixture
def routed(server: LiveServer) -> Iterator[str]:
    """The address of a router in front of the shared server."""
    router = Router(RouterConfig(decode=(read_node("--decode", server.url),), port=0))
    sock = socket.create_server(("127.0.0.1", 0))
    front = make_server(router, log_level="warning", shutdown_seconds=1)
    server.run(router.start())
    running = asyncio.run_coroutine_threadsafe(front.serve(sockets=[sock]), server.loop)
    yield f"127.0.0.1:{sock.getsockname()[1]}"
    front.should_exit = True
    running.result(20)
    server.run(router.close())
    sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_router_passes_parts_to_the_engine(http: httpx.Client, routed: str, stream: bool) -> None:
    expected = post(http, prompt=TEXT, max_tokens=6)["choices"][0]["text"]
    parts = [TEXT[place : place + 20] for place in range(0, len(TEXT), 20)]
    wishes = lines_of(parts, max_tokens=6, stream=stream)
    with httpx.Client(base_url=f"http://{routed}", timeout=30, verify=False) as client:
        response = send(client, wishes)
    assert response.status_code == 200, response.text
    if not stream:
        assert response.json()["choices"][0]["text"] == expected
    with connect(f"ws://{routed}{PATH}", proxy=None, close_timeout=5) as ws:
        say(ws, *wishes, {"is_last": True})
        found = [json.loads(each) for each in ws]
    assert "".join(each["choices"][0]["text"] for each in found) == expected
    assert ws.close_code == 1000 and (len(found) > 1) == stream


def test_what_the_engine_refuses_comes_through_the_router(http: httpx.Client, routed: str) -> None:
    with connect(f"ws://{routed}{PATH}", proxy=None, close_timeout=5) as ws:
        say(ws, *lines_of([IDS, [10**6], IDS]))
        error, closed = hear_error(ws)
    assert error["param"] == "prompt[1]" and closed == 1008
    wait_until(lambda: http.get("/load").json()["server_load"] == 0)
