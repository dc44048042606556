# SPDX-License-Identifier: Apache-2.0
"""A router on a real socket between fake nodes and a small client, all in one event loop.

    async with rig(prefill=1, decode=2) as it:
        it.decode[0].script.append(Fault("die", after=3))      what the next request there meets
        answer = await it.complete("a prompt", stream=True)
        check(answer, "a prompt")

A fake node "computes" `tokens_of(prompt)`, so what is right is known for every prompt. Nothing here
waits for time: `until` waits for what is to come true.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h11

from stratakv.engine.api.http.server import make_server
from stratakv.engine.cli.serve import bind
from stratakv.engine.router.app import Router
from stratakv.engine.router.nodes import Choice
from stratakv.engine.router.settings import RouterConfig, read_node

WAIT_SECONDS = 30.0
NUM_TOKENS = 8
WIDE = "a prompt whose tokens are long"
LONG = "a long prompt " * 200  # 700 tokens, as the router counts


def tokens_of(prompt: str, count: int = NUM_TOKENS) -> list[str]:
    """What every node answers to a prompt."""
    end = "." * 10_000 if prompt == WIDE else " "
    return [f"{zlib.crc32(f'{prompt}/{number}'.encode()):08x}{end}" for number in range(count)]


async def until(is_true: Callable[[], object], what: str) -> None:
    """Wait for it to come true."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_true():
            await asyncio.sleep(0.005)
    assert is_true(), what


@dataclass
class Fault:
    """What one request meets. `after`: events of the stream that come before it."""

    kind: str
    after: int = 0
    status: int = 503


@dataclass
class Seen:
    """One request as a node saw it."""

    target: str
    headers: dict[str, str]
    raw: bytes
    body: Any  # decoded; None where it is no JSON


class FakeNode:
    """A tiny HTTP server that does what its script says, and else what is right."""

    def __init__(self) -> None:
        self.script: deque[Fault] = deque()
        self.seen: list[Seen] = []
        self.followed: list[Seen] = []
        self.follows: bool | None = True  # None: it never says
        self.health = 200
        self.identity: Any = 404  # what /node answers; a number is the status of a refusal
        self.node_asked = 0
        self.is_hung = False
        self.params: Any = None  # what its answers hand over
        self.sent_bytes = 0
        self.num_lost = 0  # connections that the router closed before the answer was whole
        self.port = 0
        self.go_on = asyncio.Event()  # for those that wait
        self.tls: ssl.SSLContext | None = None
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        return len(self._writers)

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Refuse connections from now on, and reset those that are open."""
        assert self._server is not None
        self._server.close()
        self.kill()
        self.go_on.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        """Reset every connection."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            self.num_lost += 1
        finally:
            writer.close()
            self._writers.discard(writer)
            self._tasks.discard(task)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:] if line)
        }
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.is_hung:
            await self._hang(reader)
            return
        if target == "/health":
            await self._send(writer, self.health, {"status": self.health})
            return
        if target == "/node":
            self.node_asked += 1
            if self.identity == "hang":
                await self._hang(reader)
            elif isinstance(self.identity, int):
                await self._send(writer, self.identity, {})
            else:
                await self._send(writer, 200, self.identity)
            return
        if target.startswith("/follow/"):
            self.followed.append(Seen(target, headers, body, _decoded(body)))
            if self.follows is None:
                await self._hang(reader)
            else:
                await self._send(writer, 200 if self.follows else 404, {})
            return
        self.seen.append(Seen(target, headers, body, _decoded(body)))
        fault = self.script.popleft() if self.script else Fault("none")
        await self._play(fault, self.seen[-1], method, reader, writer)

    async def _play(
        self,
        fault: Fault,
        seen: Seen,
        method: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        kind = fault.kind
        if kind == "reset":
            writer.transport.abort()
        elif kind == "close":
            pass
        elif kind == "half a head":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Ty")
            writer.transport.abort() if fault.after else await writer.drain()
        elif kind == "garbage":
            writer.write(b"220 smtp.example ESMTP\r\n")
        elif kind == "endless head":
            writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-filler: 1\r\n" * 20_000)
        elif kind == "status":
            error = {"error": {"message": f"fault {fault.status}", "type": "x"}}
            await self._send(writer, fault.status, error)
        elif kind == "hang" and not fault.after:
            await self._hang(reader)
        elif kind == "wait":
            await self.go_on.wait()
            await self._right(seen, method, writer)
        elif seen.body and seen.body.get("stream"):
            await self._stream(fault, seen, reader, writer)
        elif kind in ("die", "die in an event", "short"):
            text = json.dumps(self._whole(seen)).encode()
            head = (
                f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(text)}"
            )
            writer.write(head.encode() + b"\r\n\r\n" + text[: len(text) // 2])
            await writer.drain()
        elif kind == "hang":
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12")
            await self._hang(reader)
        elif kind == "no length":
            text = json.dumps(self._whole(seen)).encode()
            end = len(text) // 2 if fault.after else len(text)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n" + text[:end])
        else:
            await self._right(seen, method, writer)

    async def _right(self, seen: Seen, method: str, writer: asyncio.StreamWriter) -> None:
        if seen.body and seen.body.get("stream"):
            await self._stream(Fault("none"), seen, None, writer)
        elif seen.target.startswith(("/v1/completions", "/v1/chat/completions")):
            await self._send(writer, 200, self._whole(seen))
        else:
            await self._send(writer, 200, {"path": seen.target, "method": method})

    def _whole(self, seen: Seen) -> dict[str, Any]:
        count = seen.body.get("max_tokens", NUM_TOKENS)
        answer = {"choices": [{"text": "".join(tokens_of(prompt_in(seen.body), count))}]}
        return answer if self.params is None else {**answer, "kv_transfer_params": self.params}

    async def _stream(
        self,
        fault: Fault,
        seen: Seen,
        reader: asyncio.StreamReader | None,
        writer: asyncio.StreamWriter,
    ) -> None:
        is_chunked = fault.kind != "no length"
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(head + (b"transfer-encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"))
        tokens = tokens_of(prompt_in(seen.body), seen.body.get("max_tokens", NUM_TOKENS))
        events = [json.dumps({"choices": [{"text": token}]}) for token in tokens]
        for number, event in enumerate([*events, "[DONE]"]):
            data = f"data: {event}\n\n".encode()
            if fault.kind != "none" and number == fault.after and fault.kind != "flood":
                if fault.kind == "hang":
                    assert reader is not None
                    await self._hang(reader)
                    return
                if fault.kind in ("die", "die in an event", "no length"):
                    part = data[: len(data) // 2] if fault.kind == "die in an event" else b""
                    if part:
                        self._write(writer, part, is_chunked)
                    await writer.drain()
                    writer.transport.abort() if fault.kind == "die" else None
                    return
            if fault.kind == "crumbs":  # byte by byte
                for byte in data:
                    self._write(writer, bytes((byte,)), is_chunked)
                    await writer.drain()
            else:
                self._write(writer, data, is_chunked)
            await writer.drain()
        if fault.kind == "crumbs" or is_chunked:
            writer.write(b"0\r\n\r\n")
        await writer.drain()

    def _write(self, writer: asyncio.StreamWriter, data: bytes, is_chunked: bool) -> None:
        self.sent_bytes += len(data)
        writer.write(b"%x\r\n%s\r\n" % (len(data), data) if is_chunked else data)

    async def _send(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = (
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        writer.write(head.encode() + b"\r\nserver: fake\r\nx-node: yes\r\n\r\n" + body)
        await writer.drain()

    async def _hang(self, reader: asyncio.StreamReader) -> None:
        """Until the other side gives up."""
        while await reader.read(4096):
            pass
        self.num_lost += 1


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def prompt_in(body: Mapping[str, Any]) -> str:
    """Of completions, or the first message of a chat."""
    return str(body["prompt"] if "prompt" in body else body["messages"][0]["content"])


@dataclass
class Answer:
    """What a client got: `is_whole` unless the connection ended before the answer did."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)
    is_whole: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of every event; each must be whole."""
        assert not self.body or self.body.endswith(b"\n\n"), self.body[-80:]
        found = []
        for event in self.body.decode().split("\n\n")[:-1]:
            assert event.startswith("data: ") and "\n" not in event, event
            text = event.removeprefix("data: ")
            found.append(text if text == "[DONE]" else json.loads(text))
        return found


class Exchange:
    """One request of the client, read as slowly as the test likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT)
        self.answer = Answer()

    async def send(self, method: str, target: str, headers: Any, body: bytes) -> None:
        all_headers = [("host", "127.0.0.1:1"), ("content-length", str(len(body))), *headers]
        request = h11.Request(method=method, target=target, headers=all_headers)
        self._writer.write(self._http.send(request) or b"")
        self._writer.write(self._http.send(h11.Data(data=body)) or b"")
        self._http.send(h11.EndOfMessage())
        await self._writer.drain()

    async def read_some(self) -> bool:
        """Whether there may be more."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError:
                return False
            if event is h11.NEED_DATA:
                try:
                    self._http.receive_data(await self._reader.read(65536))
                except ConnectionError:
                    return False
                continue
            if isinstance(event, h11.Response):
                self.answer.status = event.status_code
                self.answer.headers = {k.decode(): v.decode() for k, v in event.headers}
            elif isinstance(event, h11.Data):
                self.answer.body += event.data
                return True
            elif isinstance(event, h11.EndOfMessage):
                self.answer.is_whole = True
                return False
            else:
                return False

    async def read_all(self) -> Answer:
        async with asyncio.timeout(WAIT_SECONDS):
            while await self.read_some():
                pass
        await self.leave()
        return self.answer

    async def leave(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


class Rig:
    """The router, its nodes, and a client."""

    def __init__(self, router: Router, port: int, prefill: list[FakeNode], decode: list[FakeNode]):
        self.router = router
        self.port = port
        self.prefill = prefill
        self.decode = decode
        self.server: Any = None

    async def open(
        self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Exchange:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=4096)
        exchange = Exchange(reader, writer)
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        given = {"content-type": "application/json", **(headers or {})}
        await exchange.send(method, target, list(given.items()), data)
        return exchange

    async def request(
        self, method: str, target: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        return await (await self.open(method, target, body, headers)).read_all()

    async def complete(self, prompt: Any = LONG, **fields: Any) -> Answer:
        return await self.request("POST", "/v1/completions", {"prompt": prompt, **fields})

    async def metric(self, leg: str, outcome: str) -> float:
        text = (await self.request("GET", "/metrics")).body.decode()
        name = f'stratakv_router_requests_total{{leg="{leg}",outcome="{outcome}"}} '
        [line] = [line for line in text.splitlines() if line.startswith(name)]
        return float(line.removeprefix(name))

    async def settle(self) -> None:
        """Wait until nothing is left of any request: no count, no connection, no task."""
        nodes = list(self.router.nodes)
        fakes = [*self.prefill, *self.decode]
        await until(lambda: self.router.num_open == 0, "requests are open")
        await until(lambda: not any(node.in_flight for node in nodes), "nodes are busy")
        await until(lambda: not any(node.transports for node in nodes), "connections to nodes")
        await until(lambda: not any(fake.num_open for fake in fakes), "nodes hold connections")
        await until(lambda: not self.server.server_state.connections, "clients are connected")
        await until(lambda: not self.server.server_state.tasks, "tasks of requests")
        assert self.router._held_bytes == 0


def make_config(**settings: Any) -> RouterConfig:
    """Settings for tests: health is looked at once, at the start."""
    defaults = {"port": 0, "health_seconds": 60.0, "drain_seconds": 20.0}
    return RouterConfig(**{**defaults, **settings})


@asynccontextmanager
async def rig(
    prefill: int = 0,
    decode: int = 1,
    *,
    choice: Choice | None = None,
    admin_key: str | None = None,
    tls: ssl.SSLContext | None = None,
    identities: Sequence[Any] = (),
    **settings: Any,
) -> AsyncIterator[Rig]:
    """A router in front of so many fake nodes, whose `identities` are in the order of the nodes.
    At its end nothing may be left open."""
    before = asyncio.all_tasks()
    fakes = [FakeNode() for _ in range(prefill + decode)]
    for fake, identity in zip(fakes, identities, strict=False):
        fake.identity = identity
    for fake in fakes:
        fake.tls = tls
        await fake.start()
    urls = [read_node("--node", fake.url) for fake in fakes]
    config = make_config(prefill=tuple(urls[:prefill]), decode=tuple(urls[prefill:]), **settings)
    router = Router(config, choice=choice, admin_key=admin_key)
    await router.start()
    sock = bind("127.0.0.1", 0)
    server = make_server(router, log_level="warning", shutdown_seconds=5)
    running = asyncio.ensure_future(server.serve(sockets=[sock]))
    it = Rig(router, sock.getsockname()[1], fakes[:prefill], fakes[prefill:])
    it.server = server
    try:
        await until(lambda: server.started, "the server runs")
        yield it
        for fake in fakes:
            fake.go_on.set()
        await it.settle()
    finally:
        server.should_exit = True
        router.end_requests()
        await running
        await router.close()
        for fake in fakes:
            await fake.stop()
        sock.close()
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, left


def check(answer: Answer, prompt: str = LONG, count: int = NUM_TOKENS) -> bool:
    """One answer or one error, and never a wrong, doubled or lost token. Whether it is complete."""
    right = tokens_of(prompt, count)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _check_events(answer, right)
    if not answer.is_whole:
        assert answer.status in (0, 200)
        return False
    if answer.status == 200:
        assert answer.json["choices"][0]["text"] == "".join(right)
        return True
    assert answer.json["error"]["message"]
    return False


def _check_events(answer: Answer, right: list[str]) -> bool:
    events = answer.events
    texts = [event["choices"][0]["text"] for event in events if "choices" in event]
    assert texts == right[: len(texts)], "a token is wrong, doubled or lost"
    errors = [event for event in events if "error" in event]
    if events and events[-1] == "[DONE]":
        assert texts == right and not errors and answer.is_whole
        return True
    assert len(errors) == 1 and events[-1] is errors[0], "a stream that ends early says why"
    assert answer.is_whole, "and ends as HTTP says"
    return False
