# SPDX-License-Identifier: Apache-2.0
"""Prompts in parts through the router: lines of a body and messages of a websocket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from stratakv.engine.router import router as app
from stratakv.tiers.settings.values import MIB

from .fake_node import NUM_TOKENS, Fault, tokens_of
from .rig import LONG, WAIT_SECONDS, Answer, Exchange, Rig, check, rig, until

PATH = "/v1/completions/parts"
PARTS = ["a prompt ", "in three ", "parts"]
WHOLE = "".join(PARTS)


class Parts:
    """One request of a client whose body grows."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._exchange = Exchange(reader, writer)

    async def send_head(self, kind: str) -> None:
        head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:1\r\ntransfer-encoding: chunked\r\n"
        self._writer.write(f"{head}content-type: {kind}\r\n\r\n".encode())
        # What reads the answer has to know of a request.
        self._exchange.expect_answer()

    async def send(self, *lines: Any) -> None:
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self._writer.drain()

    async def send_bytes(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%s\r\n" % (len(data), data))
        await self._writer.drain()

    async def end(self) -> Answer:
        self._writer.write(b"0\r\n\r\n")
        return await self._exchange.read_all()

    async def read_all(self) -> Answer:
        return await self._exchange.read_all()

    async def leave(self) -> None:
        await self._exchange.leave()


async def open_parts(it: Rig, kind: str = "application/x-ndjson") -> Parts:
    parts = Parts(*await asyncio.open_connection("127.0.0.1", it.port))
    await parts.send_head(kind)
    return parts


@asynccontextmanager
async def dial(it: Rig, **options: Any) -> AsyncIterator[ClientConnection]:
    url = f"ws://127.0.0.1:{it.port}{PATH}"
    async with asyncio.timeout(WAIT_SECONDS):
        async with connect(url, proxy=None, close_timeout=5, **options) as ws:
            yield ws


def lines(prompts: Sequence[str] = PARTS, **fields: Any) -> list[Any]:
    return [{**fields, "prompt": prompts[0]}, *({"prompt": each} for each in prompts[1:])]


async def hear_error(ws: ClientConnection) -> tuple[str, int | None]:
    """The code of the error that comes, and that of the close behind it."""
    code = json.loads(await ws.recv())["error"]["code"]
    with pytest.raises(ConnectionClosed):
        await ws.recv()
    return code, ws.close_code


@pytest.mark.parametrize("stream", [False, True])
def test_parts_reach_a_decode_node_as_they_come(stream: bool) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1) as it:
            client = await open_parts(it)
            sent = lines([LONG, *PARTS], stream=stream)
            for count, line in enumerate(sent, 1):
                await client.send(line)
                await until(lambda: sum(map(len, it.decode[0].parts)) == count, "a part")  # noqa: B023
            assert check(await client.end(), LONG + WHOLE)
            assert it.decode[0].parts == [sent]
            assert not it.prefill[0].seen and not it.prefill[0].parts
            [seen] = it.decode[0].seen
            assert seen.target == PATH
            assert await it.metric("decode", "ok") == await it.metric("client", "ok") == 1

    asyncio.run(run())


def test_a_node_is_chosen_by_the_first_line() -> None:
    async def run() -> None:
        async with rig(decode=2) as it:
            clients = [await open_parts(it) for _ in range(2)]
            for client in clients:
                await client.send(*lines())
            await until(lambda: all(len(node.parts) == 1 for node in it.decode), "both nodes")
            for client in clients:
                assert check(await client.end(), WHOLE)

    asyncio.run(run())


def test_another_node_is_asked_while_all_parts_are_at_hand() -> None:
    """One refuses the connection, and one is lost with the first part."""

    async def run() -> None:
        async with rig(decode=3) as it:
            await it.decode[0].stop()
            it.decode[1].script.append(Fault("lost", after=1))
            client = await open_parts(it)
            await client.send(lines()[0])
            await until(lambda: it.decode[2].parts, "the third node")
            await client.send(*lines()[1:])
            assert check(await client.end(), WHOLE)

    asyncio.run(run())


def test_a_node_that_is_lost_between_parts_is_an_error() -> None:
    async def run() -> None:
        async with rig(decode=2) as it:
            for node in it.decode:
                node.script.append(Fault("lost", after=2))
            client = await open_parts(it)
            for line in lines()[:2]:
                await client.send(line)
                await until(lambda: any(it.decode[i].parts for i in (0, 1)), "a node")
            answer = await client.read_all()
            assert answer.status == 502 and answer.json["error"]["code"] == "node_lost"
            assert "again from the first one" in answer.json["error"]["message"]
            assert sum(len(node.parts) for node in it.decode) == 1, "parts are sent once"
            async with dial(it) as ws:
                for line in lines()[:2]:
                    await ws.send(json.dumps(line))
                    await until(lambda: all(node.parts for node in it.decode), "the other node")
                assert await hear_error(ws) == ("node_lost", 1011)

    asyncio.run(run())


def test_a_refusal_between_parts_is_passed_on() -> None:
    async def run() -> None:
        async with rig(decode=1) as it:
            it.decode[0].script.append(Fault("status", after=2, status=404))
            client = await open_parts(it)
            await client.send(*lines()[:2])
            answer = await client.read_all()
            assert answer.status == 404 and answer.json["error"]["code"] == "bad"
            it.decode[0].script.append(Fault("status", after=2, status=503))
            async with dial(it) as ws:
                for line in lines():
                    await ws.send(json.dumps(line))
                assert await hear_error(ws) == ("bad", 1013)

    asyncio.run(run())


@pytest.mark.parametrize("is_socket", [False, True])
def test_a_client_that_leaves_between_parts_is_gone_from_the_node(is_socket: bool) -> None:
    async def run() -> None:
        async with rig(decode=1) as it:
            if is_socket:
                async with dial(it) as ws:
                    await ws.send(json.dumps(lines()[0]))
                    await until(lambda: it.decode[0].parts, "a part")
            else:
                client = await open_parts(it)
                await client.send(lines()[0])
                await until(lambda: it.decode[0].parts, "a part")
                await client.leave()
            await until(lambda: it.decode[0].num_lost == 1, "the node knows")
            await until(lambda: it.router.num_open == 0, "the router too")
            assert await it.metric("decode", "gone") == await it.metric("client", "gone") == 1

    asyncio.run(run())


def test_the_line_that_says_so_is_the_last_of_a_body() -> None:
    """Nothing is waited for behind it, however long the answer takes."""

    async def run() -> None:
        async with rig(decode=1, body_seconds=0.3) as it:
            client = await open_parts(it)
            sent = lines()
            sent[-1]["is_last"] = True
            data = b"".join(json.dumps(line).encode() + b"\n" for line in sent)
            for start in range(0, len(data), 7):
                await client.send_bytes(data[start : start + 7])
            answer = await client.read_all()  # the body is open
            assert check(answer, WHOLE)
            assert it.decode[0].parts == [sent]

    asyncio.run(run())


def test_parts_have_their_limits() -> None:
    async def run() -> None:
        async with rig(decode=1, body_seconds=0.3, max_body_bytes=1000) as it:
            late = await open_parts(it)
            assert (await late.read_all()).status == 408
            late = await open_parts(it)
            await late.send(lines()[0])
            await late.send_bytes(b'{"prompt": ')  # and no end
            answer = await late.read_all()
            assert answer.status == 408 and answer.json["error"]["code"] == "body_timeout"
            assert "--body-seconds" in answer.json["error"]["message"]
            long = await open_parts(it)
            await long.send_bytes(b'{"prompt": "' + b"a" * 2000)
            assert (await long.read_all()).status == 413
            blank = await open_parts(it)
            for _ in range(20):
                await blank.send_bytes(b"\n" * 500)
            await blank.send_bytes(b'{"prompt": "' + b"a" * 400)
            await blank.send_bytes(b"a" * 1000)  # blank lines are no part of it
            assert (await blank.read_all()).status == 413
            other = await open_parts(it, "application/json")
            assert (await other.read_all()).status == 415
            async with dial(it) as ws:
                assert await hear_error(ws) == ("body_timeout", 1008)
            async with dial(it) as ws:
                await ws.send(json.dumps(lines()[0]))
                begin_message(ws, 200)
                assert await hear_error(ws) == ("body_timeout", 1008)
            async with dial(it) as ws:
                await ws.send(json.dumps({"prompt": "a" * 2000}))
                assert await hear_error(ws) == ("body_too_large", 1009)
            async with dial(it) as ws:
                await ws.send("")
                assert await hear_error(ws) == ("invalid_json", 1007)
            async with dial(it) as ws:
                await ws.send(b"{}")
                assert await hear_error(ws) == ("binary_message", 1003)

    asyncio.run(run())


@pytest.mark.parametrize(("status", "body", "closed"), [
    (502, b"<html>Bad Gateway</html>", 1011), (404, b"not here", 1011), (503, b"", 1013),
    (429, b"later", 1013), (500, b'{"detail": "no"}', 1011), (500, b'{"error": "\xff"}', 1011),
    (200, b"<html>Welcome</html>", 1011), (200, b"", 1011), (200, b'"\xff"', 1011),
])  # fmt: skip
def test_a_node_that_answers_with_no_json_is_an_error_of_the_server(
    status: int, body: bytes, closed: int
) -> None:
    async def run() -> None:
        async with rig(decode=1) as it, dial(it) as ws:
            it.decode[0].script.append(Fault("body", status=status, body=body))
            await ws.send(json.dumps({"prompt": WHOLE, "is_last": True}))
            error = json.loads(await ws.recv())["error"]
            with pytest.raises(ConnectionClosed):
                await ws.recv()
            assert (error["type"], error["code"]) == ("node_error", "bad_answer")
            assert str(status) in error["message"]
            assert (ws.close_code, ws.close_reason) == (closed, "bad_answer")

    asyncio.run(run())


def begin_message(ws: ClientConnection, size: int) -> None:
    """Send all of a message but its last byte."""
    ws.transport.write(b"\x81\xfe" + (size + 1).to_bytes(2, "big") + bytes(4) + b"a" * size)


@pytest.mark.parametrize("is_socket", [False, True])
def test_how_long_a_prompt_may_pause_is_its_nodes_to_say(is_socket: bool) -> None:
    """It pauses longer than a part may take, and than a whole request."""

    async def run() -> None:
        async with rig(decode=1, body_seconds=0.2, request_seconds=0.3) as it:
            first, second, last = lines()
            if is_socket:
                async with dial(it) as ws:
                    for line in (first, second, {**last, "is_last": True}):
                        await ws.send(json.dumps(line))
                        await asyncio.sleep(0.5)
                    answer = json.loads(await ws.recv())
                assert answer["choices"][0]["text"] == "".join(tokens_of(WHOLE))
                return
            client = await open_parts(it)
            for line in (first, second, last):
                await client.send(line)
                await asyncio.sleep(0.5)
            assert check(await client.end(), WHOLE)

    asyncio.run(run())


def test_the_node_that_ends_a_prompt_ends_it_for_the_client() -> None:
    async def run() -> None:
        async with rig(decode=1) as it:
            it.decode[0].script.append(Fault("status", after=1, status=408))
            async with dial(it) as ws:
                await ws.send(json.dumps(lines()[0]))
                assert await hear_error(ws) == ("bad", 1008)

    asyncio.run(run())


@pytest.mark.parametrize("with_parts", [False, True])
def test_the_time_of_a_prompt_in_parts_begins_with_its_last_one(with_parts: bool) -> None:
    async def run() -> None:
        async with rig(decode=1, request_seconds=0.3) as it, dial(it) as ws:
            it.decode[0].script.append(Fault("wait"))
            if with_parts:
                await ws.send(json.dumps(lines()[0]))
            await ws.send(json.dumps({"prompt": "end", "is_last": True}))
            assert await hear_error(ws) == ("timeout", 1011)

    asyncio.run(run())


def test_clients_that_say_nothing_take_no_room() -> None:
    """The longest bodies of as many clients are together as long as the router takes."""

    async def run() -> None:
        async with rig(decode=1) as it, AsyncExitStack() as idle:
            for number in range(72):
                if number % 3 == 0:
                    await idle.enter_async_context(dial(it))
                else:
                    _, writer = await asyncio.open_connection("127.0.0.1", it.port)
                    length = ["transfer-encoding: chunked", f"content-length: {16 * MIB}"]
                    head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\n{length[number % 2]}\r\n"
                    writer.write(f"{head}content-type: application/x-ndjson\r\n\r\n".encode())
                    idle.callback(writer.close)
            await until(lambda: it.router.num_open == 72, "all are open")
            assert it.router.held.num_bytes == 0
            assert check(await it.complete("a prompt"), "a prompt")

    asyncio.run(run())


def test_what_has_come_counts_before_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", 3000)

    async def run() -> None:
        async with rig(decode=1) as it, dial(it) as first, dial(it) as second:
            await first.send(json.dumps(lines()[0]))
            await until(lambda: it.decode[0].parts, "a part")
            held = it.router.held.num_bytes
            assert 0 < held < 100
            begin_message(first, 1800)
            await until(lambda: it.router.held.num_bytes >= held + 1800, "what has come is held")
            second.transport.write(b"\x01\xfe" + (900).to_bytes(2, "big") + bytes(4) + b"a" * 900)
            await until(lambda: it.router.held.num_bytes >= held + 2700, "a fragment is held")
            second.transport.write(b"\x00\xfe" + (900).to_bytes(2, "big") + bytes(4) + b"a" * 800)
            with pytest.raises(ConnectionClosed):
                await second.recv()
            assert (second.close_code, second.close_reason) == (1013, "too_many_requests")
            line = await open_parts(it)
            await line.send(lines()[0])
            await line.send_bytes(b'{"prompt": "' + b"a" * 1800)
            assert (await line.read_all()).status == 429
            answer = await it.complete("y" * 1800)
            assert answer.status == 429 and answer.json["error"]["code"] == "too_many_requests"
            assert check(await it.complete("short"), "short")
            first.transport.write(b"a")
            await until(lambda: it.router.held.num_bytes < 1800 + held, "it was taken")

    asyncio.run(run())


def test_too_many_clients_are_asked_to_come_later() -> None:
    async def run() -> None:
        async with rig(decode=1, max_waiting=1) as it, dial(it) as first:
            await first.send(json.dumps(lines()[0]))
            await until(lambda: it.decode[0].parts, "a part")
            async with dial(it) as ws:
                assert await hear_error(ws) == ("too_many_requests", 1013)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_socket_goes_through_the_router(stream: bool) -> None:
    async def run() -> None:
        async with rig(decode=1) as it, dial(it, additional_headers={"X-Request-ID": "r1"}) as ws:
            first, *others = lines(stream=stream)
            await ws.send(json.dumps(first, indent=1))  # of several lines
            for each in others:
                await ws.send(json.dumps(each))
            await ws.send(json.dumps({"is_last": True}))
            answers = [json.loads(each) async for each in ws]
            assert ws.close_code == 1000
            texts = [each["choices"][0]["text"] for each in answers]
            assert len(texts) == (NUM_TOKENS if stream else 1)
            assert "".join(texts) == "".join(tokens_of(WHOLE))
            [seen] = it.decode[0].seen
            assert seen.headers["x-request-id"] == "r1"
            assert "upgrade" not in seen.headers and "sec-websocket-key" not in seen.headers

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["die", "die in an event"])
def test_a_stream_whose_node_is_lost_ends_with_an_error(fault: str) -> None:
    async def run() -> None:
        async with rig(decode=1) as it, dial(it) as ws:
            it.decode[0].script.append(Fault(fault, after=3))
            await ws.send(json.dumps({"prompt": WHOLE, "stream": True, "is_last": True}))
            for token in tokens_of(WHOLE)[:3]:
                assert json.loads(await ws.recv())["choices"][0]["text"] == token
            assert await hear_error(ws) == ("node_lost", 1011)
            await until(lambda: it.router.num_open == 0, "nothing is open")
            assert await it.metric("client", "cut") == 1

    asyncio.run(run())


def test_a_message_behind_the_last_part_is_an_error() -> None:
    async def run() -> None:
        async with rig(decode=1) as it, dial(it) as ws:
            it.decode[0].script.append(Fault("wait"))
            await ws.send(json.dumps({"prompt": WHOLE, "is_last": True}))
            await ws.send("{}")
            assert await hear_error(ws) == ("prompt_ended", 1008)

    asyncio.run(run())


def test_pages_of_other_origins_may_not_open_sockets() -> None:
    async def run() -> None:
        async with rig(decode=1) as it:
            with pytest.raises(InvalidStatus) as refused:
                async with dial(it, origin="https://elsewhere.example"):
                    pass
            assert refused.value.response.status_code == 403

    asyncio.run(run())


def test_the_end_of_the_router_ends_prompts_in_parts() -> None:
    async def run() -> None:
        async with rig(decode=1) as it, dial(it) as early, dial(it) as late:
            await late.send(json.dumps(lines()[0]))
            await until(lambda: it.decode[0].parts and it.router.num_open == 2, "both are open")
            it.router.end_requests()
            assert await hear_error(early) == ("shutting_down", 1012)
            assert await hear_error(late) == ("shutting_down", 1012)

    asyncio.run(run())
