# SPDX-License-Identifier: Apache-2.0
"""Nodes and clients that keep to the letter of HTTP only: what is framed twice, what ends behind
its end, text that is no text, and bodies whose length nobody tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stratakv.engine.router import router as app

from .fake_node import NUM_TOKENS, FakeNode, Fault, Seen, tokens_of
from .rig import Rig, check, rig, until

EVENT = b'data: {"choices": [{"text": "x"}]}\n\n'
DONE = b"data: [DONE]\n\n"
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@asynccontextmanager
async def saying(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    """A router in front of a node that answers so to everything, and closes."""

    async def play(
        self: FakeNode,
        fault: Fault,
        seen: Seen,
        method: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        writer.write(answer)
        await writer.drain()

    monkeypatch.setattr(FakeNode, "_play", play)
    async with rig(decode=1) as it:
        yield it


def test_a_length_beside_chunks_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n"
    said = head + b"transfer-encoding: chunked\r\n\r\n" + chunk(b'{"a":1}') + b"0\r\n\r\n"

    async def go() -> None:
        async with saying(said, monkeypatch) as it:
            answer = await it.complete("short")
            assert answer.is_whole and answer.json == {"a": 1}

    asyncio.run(go())


@pytest.mark.parametrize(
    "end",
    [
        b"transfer-encoding: chunked\r\n\r\n" + chunk(EVENT) + chunk(DONE),
        b"content-length: 9999\r\n\r\n" + EVENT + DONE,
    ],
    ids=["no last chunk", "a length that is too long"],
)
def test_no_error_follows_the_last_event(end: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def go() -> None:
        async with saying(EVENTS + end, monkeypatch) as it:
            answer = await it.complete("short", stream=True)
            assert answer.is_whole and answer.status == 200
            assert bytes(answer.body) == EVENT + DONE
            assert await it.metric("client", "ok") == 1
            assert await it.metric("client", "cut") == 0

    asyncio.run(go())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_text_that_is_no_utf8_goes_to_the_node_as_it_is(path: str) -> None:
    text = b'"' + b"\xff\xfe" * 2000 + b'"'
    prompt = b'{"prompt": ' + text + b"}"
    chat = b'{"messages": [{"role": "user", "content": ' + text + b"}]}"
    body = prompt if path == "/v1/completions" else chat

    async def go() -> None:
        async with rig(prefill=1, decode=1) as it:
            it.decode[0].script.append(Fault("status", status=400))
            answer = await it.request("POST", path, body)
            assert answer.status == 400
            assert [seen.raw for seen in it.decode[0].seen] == [body]
            assert not it.prefill[0].seen

    asyncio.run(go())


async def send_chunked(it: Rig) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body's length nobody tells."""
    reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    writer.write(head + chunk(b'{"prompt": "short"}') + b"0\r\n\r\n")
    return reader, writer


def test_bodies_of_unknown_length_take_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room is taken for what has not come."""
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 3000)

    async def go() -> None:
        async with rig(decode=1, max_body_bytes=2000) as it:
            it.decode[0].script.extend(Fault("wait") for _ in range(6))
            clients = []
            for number in range(6):
                clients.append(await send_chunked(it))
                await until(lambda n=number: len(it.decode[0].seen) > n, "it is at the node")  # type: ignore[misc]
            it.decode[0].go_on.set()
            for reader, writer in clients:
                assert tokens_of("short", NUM_TOKENS)[-1].encode() in await reader.read()
                writer.close()

    asyncio.run(go())


def test_a_body_that_may_be_longer_than_all_together_is_taken_alone() -> None:
    async def go() -> None:
        async with rig(decode=1, max_body_bytes=2 * app.MAX_HELD_BYTES) as it:
            reader, writer = await send_chunked(it)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()

    asyncio.run(go())


def test_too_many_bytes_are_not_called_too_many_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 100)

    async def go() -> None:
        async with rig(decode=1) as it:
            it.decode[0].script.append(Fault("wait"))
            first = await it.open("POST", "/v1/completions", {"prompt": "x" * 60})
            await until(lambda: it.decode[0].seen, "it is at the node")
            answer = await it.complete("y" * 60)
            assert answer.status == 429 and answer.headers["retry-after"]
            assert "bodies" in answer.json["error"]["message"]
            it.decode[0].go_on.set()
            assert check(await first.read_all(), "x" * 60)

    asyncio.run(go())
