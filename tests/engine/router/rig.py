# SPDX-License-Identifier: Apache-2.0
"""A router on a real socket between fake nodes and a small client, all in one event loop.

    async with rig(prefill=1, decode=2) as it:
        it.decode[0].script.append(Fault("die", after=3))      what the next request there meets
        answer = await it.complete("a prompt", stream=True)
        check(answer, "a prompt")

The nodes: `fake_node.py`. Nothing here waits for time: `until` waits for what is to come true.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import h11

from stratakv.engine.api.http.http_server import make_server
from stratakv.engine.cli.serve import bind
from stratakv.engine.router.nodes import Choice
from stratakv.engine.router.router import Router
from stratakv.engine.router.router_settings import RouterConfig, read_node

from .fake_node import NUM_TOKENS, FakeNode, tokens_of

WAIT_SECONDS = 30.0
LONG = "a long prompt " * 200  # 700 tokens, as the router counts


async def until(is_true: Callable[[], object], what: str) -> None:
    """Wait for it to come true."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not is_true():
            await asyncio.sleep(0.005)
    assert is_true(), what


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

    def expect_answer(self) -> None:
        """The request is written by other means, and its answer is read here."""
        request = h11.Request(method="POST", target="/", headers=[("host", "127.0.0.1:1")])
        self._http.send(request)
        self._http.send(h11.EndOfMessage())

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
        assert self.router.held.num_bytes == 0


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
