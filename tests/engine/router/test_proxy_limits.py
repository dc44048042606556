# SPDX-License-Identifier: Apache-2.0
"""Limits of the router: how many requests it takes, how large, for how long, and what a slow client
or one that leaves costs others."""

from __future__ import annotations

import asyncio

from .fake_node import WIDE, Fault
from .rig import LONG, check, rig, until

SHORT = "a short prompt"


def test_too_many_requests_are_told_to_come_back() -> None:
    async def run() -> None:
        async with rig(max_waiting=2) as it:
            it.decode[0].script.extend([Fault("wait"), Fault("wait")])
            waiting = [asyncio.ensure_future(it.complete(SHORT)) for _ in range(2)]
            await until(lambda: it.router.num_open == 2, "both are open")
            answer = await it.complete(SHORT)
            assert answer.status == 429 and answer.headers["retry-after"] == "1"
            assert answer.json["error"]["code"] == "too_many_requests"
            assert (await it.request("GET", "/health")).status == 200
            it.decode[0].go_on.set()
            assert all(check(each, SHORT) for each in await asyncio.gather(*waiting))
            assert await it.metric("client", "too_many") == 1

    asyncio.run(run())


def test_bodies_and_heads_have_limits() -> None:
    async def run() -> None:
        async with rig(max_body_bytes=1000) as it:
            answer = await it.complete("x" * 1000)
            assert answer.status == 413 and "1000 bytes" in answer.json["error"]["message"]
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(b"GET /v1/models HTTP/1.1\r\nx-large: " + b"y" * 100_000)
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            writer.close()
            assert not it.decode[0].seen

    asyncio.run(run())


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def run() -> None:
        async with rig(body_seconds=0.05) as it:
            reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
                b"content-type: application/json\r\n\r\n{"
            )
            assert (await reader.readline()).startswith(b"HTTP/1.1 408 ")
            writer.close()

    asyncio.run(run())


def test_every_wait_has_a_deadline() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2, prefill_seconds=0.05, answer_seconds=0.1) as it:
            it.prefill[0].script.append(Fault("hang"))
            assert check(await it.complete(stream=True))
            assert await it.metric("prefill", "timeout") == 1
            for node in it.decode:
                node.script.append(Fault("hang"))
            answer = await it.complete(SHORT)
            assert answer.status == 504 and answer.json["error"]["code"] == "node_timeout"
            assert len([node for node in it.decode if node.script]) == 1, "tried once"
            [fresh] = [node for node in it.decode if node.script]
            fresh.script.clear()
            for node in it.decode:
                node.script.append(Fault("hang", after=3))
            assert not check(await it.complete(SHORT, stream=True), SHORT)
            for node in it.decode:
                node.script.clear()
        async with rig(request_seconds=0.1) as it:
            it.decode[0].script.append(Fault("hang", after=2))
            answer = await it.complete(SHORT, stream=True)
            assert answer.events[-1]["error"]["code"] == "timeout"

    asyncio.run(run())


def test_an_answer_that_is_longer_than_what_is_held() -> None:
    async def run() -> None:
        async with rig() as it:
            answer = await it.complete(SHORT, max_tokens=200_000)
            assert check(answer, SHORT, 200_000)
            it.decode[0].script.append(Fault("die"))
            answer = await it.complete(SHORT, max_tokens=400_000)
            assert answer.status == 200 and not answer.is_whole, "cut, for half of it was sent"
            assert await it.metric("client", "cut") == 1

    asyncio.run(run())


def test_a_slow_client_holds_back_its_node_alone() -> None:
    """Nobody reads, so its node stops sending; others go on, and then it gets all of it."""

    async def run() -> None:
        count = 2000  # 20 MB of events, more than the kernel keeps for two connections
        async with rig(decode=2) as it:
            body = {"prompt": WIDE, "stream": True, "max_tokens": count}
            slow = await it.open("POST", "/v1/completions", body)
            assert await slow.read_some()
            [node] = [node for node in it.decode if node.seen]
            sent = [-3, -2, -1]
            while len(set(sent)) > 1:
                assert check(await it.complete(SHORT), SHORT), "others go on"
                sent = [*sent[1:], node.sent_bytes]
            assert node.num_open == 1 and await it.metric("decode", "ok") > 2
            assert check(await slow.read_all(), WIDE, count)
            assert node.sent_bytes > sent[0], "it had waited"

    asyncio.run(run())


def test_a_client_that_leaves_ends_both_legs() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1) as it:
            it.prefill[0].script.append(Fault("hang"))
            gone = await it.open("POST", "/v1/completions", {"prompt": LONG})
            await until(lambda: it.prefill[0].seen, "it is at the prefill node")
            await gone.leave()
            await until(lambda: it.prefill[0].num_lost == 1, "which is told")
            await it.settle()
            assert not it.decode[0].seen
            assert await it.metric("prefill", "gone") == await it.metric("client", "gone") == 1

            for after in (0, 3):
                it.decode[0].script.append(Fault("hang", after=after))
                seen, lost = len(it.decode[0].seen), it.decode[0].num_lost
                body = {"prompt": SHORT, "stream": True}
                gone = await it.open("POST", "/v1/completions", body)
                await until(lambda seen=seen: len(it.decode[0].seen) > seen, "it is there")  # type: ignore[misc]
                if after:
                    assert await gone.read_some()
                await gone.leave()
                await until(lambda lost=lost: it.decode[0].num_lost > lost, "it is told")  # type: ignore[misc]
            await it.settle()
            assert await it.metric("decode", "gone") == 2

    asyncio.run(run())
