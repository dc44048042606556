# SPDX-License-Identifier: Apache-2.0
"""Nodes that fail in every way and at every point, and clients that leave: one answer or one error.

Each case runs for a stream and for an answer that comes whole. `check` looks at what the client
got, and the end of `rig` at what is left: no request, no connection, no task.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from stratakv.engine.router.nodes import Role

from .fake_node import NUM_TOKENS, FakeNode, Fault
from .rig import LONG, Rig, check, rig, until

# Before anything of an answer: nothing was sent to the client, so another node can answer.
SILENT = [
    Fault("reset"),
    Fault("close"),
    Fault("half a head"),
    Fault("half a head", after=1),
    Fault("garbage"),
    Fault("endless head"),
    Fault("status", status=429),
    Fault("status", status=502),
    Fault("status", status=503),
    Fault("die"),
    Fault("die in an event"),
]
# What the request itself is refused with, anywhere.
REFUSED = [Fault("status", status=status) for status in (400, 401, 404, 413, 500)]
# In the middle of a stream.
LATE = [
    Fault(kind, after)
    for kind in ("die", "die in an event", "no length")
    for after in (1, 3, NUM_TOKENS - 1, NUM_TOKENS)
]


def named(fault: Fault) -> str:
    return f"{fault.kind}-{fault.status if fault.kind == 'status' else fault.after}"


@pytest.mark.parametrize("fault", [*SILENT, *REFUSED, Fault("no length", 1)], ids=named)
def test_a_prefill_node_that_fails_costs_nothing(fault: Fault) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=1) as it:
            for stream in (False, True):
                it.prefill[0].script.append(fault)
                assert check(await it.complete(stream=stream))
            assert len(it.prefill[0].seen) == len(it.decode[0].seen) == 2

    asyncio.run(run())


def test_prefill_nodes_that_refuse_connections_or_hang() -> None:
    async def run() -> None:
        async with rig(prefill=2, decode=1, prefill_seconds=0.2) as it:
            for node in it.prefill:
                node.script.append(Fault("hang"))
            assert check(await it.complete(stream=True))
            assert await it.metric("prefill", "timeout") == 1
            for node in it.prefill:
                node.script.clear()
                await node.stop()
            for stream in (True, False, True):
                assert check(await it.complete(stream=stream))
            assert await it.metric("prefill", "unreachable") == 1
            assert await it.metric("prefill", "no_node") == 2, "they are known to be down"

    asyncio.run(run())


@pytest.mark.parametrize("fault", SILENT, ids=named)
def test_another_prefill_node_is_tried(fault: Fault) -> None:
    async def run() -> None:
        async with rig(prefill=2, decode=1) as it:
            it.prefill[0].script.append(fault)
            assert check(await it.complete(stream=True))
            assert [len(node.seen) for node in it.prefill] == [1, 1]
            assert await it.metric("prefill", "ok") == 1

    asyncio.run(run())


@pytest.mark.parametrize("fault", SILENT, ids=named)
def test_another_decode_node_answers(fault: Fault) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=3) as it:
            for stream in (False, True):
                for node in _next_two(it):
                    node.script.append(fault)
                assert check(await it.complete(stream=stream))
            assert await it.metric("client", "ok") == 2
            assert len(it.prefill[0].seen) == 2, "the prompt was prefilled once a request"

    asyncio.run(run())


def _next_two(it: Rig) -> list[FakeNode]:
    """The decode nodes that get the next request first and second: all are idle, so in turn."""
    nodes = it.router.nodes.of_role[Role.DECODE]
    in_turn = sorted(zip(nodes, it.decode, strict=True), key=lambda pair: pair[0].last_pick)
    return [fake for _, fake in in_turn[:2]]


@pytest.mark.parametrize("fault", SILENT, ids=named)
def test_all_decode_nodes_fail(fault: Fault) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2) as it:
            for stream in (False, True):
                for node in it.decode:
                    node.script.append(fault)
                answer = await it.complete(stream=stream)
                assert not check(answer)
                assert answer.status >= 400 and answer.is_whole
                assert not any(node.script for node in it.decode), "both were tried"
            assert await it.metric("client", "error") == 2

    asyncio.run(run())


@pytest.mark.parametrize("fault", REFUSED, ids=named)
def test_what_a_request_is_refused_for_is_told_as_it_is(fault: Fault) -> None:
    async def run() -> None:
        async with rig(decode=2) as it:
            for stream in (False, True):
                it.decode[stream].script.append(fault)
                answer = await it.complete(stream=stream)
                assert answer.status == fault.status
                assert answer.json["error"]["message"] == f"fault {fault.status}"
            assert [len(node.seen) for node in it.decode] == [1, 1]

    asyncio.run(run())


@pytest.mark.parametrize("fault", LATE, ids=named)
def test_a_stream_whose_node_dies_says_so(fault: Fault) -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2) as it:
            it.decode[0].script.append(fault)
            answer = await it.complete(stream=True)
            assert not check(answer)
            texts = [event for event in answer.events if "choices" in event]
            assert len(texts) <= fault.after
            assert answer.events[-1]["error"]["code"] == "node_lost"
            assert [len(node.seen) for node in it.decode] == [1, 0], "no token is made twice"
            assert await it.metric("decode", "lost") == await it.metric("client", "cut") == 1

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["no length", "short", "die"])
def test_an_answer_that_comes_in_part_is_made_again(kind: str) -> None:
    async def run() -> None:
        async with rig(decode=2) as it:
            it.decode[0].script.append(Fault(kind, after=1))
            assert check(await it.complete())
            assert [len(node.seen) for node in it.decode] == [1, 1]

    asyncio.run(run())


def test_decode_nodes_that_refuse_connections_and_come_back() -> None:
    async def run() -> None:
        async with rig(decode=2, health_seconds=0.1) as it:
            await it.decode[0].stop()
            for stream in (True, False):
                assert check(await it.complete(stream=stream))
            await until(lambda: it.router.nodes.num_up(Role.DECODE) == 1, "one is left")
            await it.decode[1].stop()
            answer = await it.complete(stream=True)
            assert answer.status == 503 and answer.headers["retry-after"] == "1"
            assert not check(answer)
            await until(lambda: it.router.nodes.num_up(Role.DECODE) == 0, "none is")
            assert (await it.request("GET", "/health")).status == 503
            await it.decode[0].start()
            await until(lambda: it.router.nodes.num_up(Role.DECODE) == 1, "it is back")
            assert check(await it.complete(stream=True))
            assert (await it.request("GET", "/health")).json == {"status": "ok"}

    asyncio.run(run())


def test_all_nodes_believed_down_are_tried_all_the_same() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2) as it:
            for node in it.router.nodes:
                node.mark_down("so the test says")
            assert check(await it.complete())
            assert not it.prefill[0].seen and await it.metric("prefill", "no_node") == 1

    asyncio.run(run())


def test_a_node_that_hangs_is_left_and_its_requests_go_elsewhere() -> None:
    """It answers neither requests nor looks at its health, and closes nothing."""

    async def run() -> None:
        async with rig(decode=2, health_seconds=0.1) as it:
            hung, well = it.decode
            hung.script.extend([Fault("hang"), Fault("hang", after=3)])
            waiting = [asyncio.ensure_future(it.complete()) for _ in range(1)]
            await until(lambda: hung.seen, "one waits for its answer")
            well.script.append(Fault("wait"))
            waiting.append(asyncio.ensure_future(it.complete()))
            await until(lambda: len(well.seen) == 1, "the other node is as busy")
            waiting.append(asyncio.ensure_future(it.complete(stream=True)))
            await until(lambda: len(hung.seen) + len(well.seen) == 3, "one more is under way")
            hung.is_hung = True
            await until(lambda: it.router.nodes.num_up(Role.DECODE) == 1, "it is left out")
            well.go_on.set()
            first, second, third = await asyncio.gather(*waiting)
            assert check(first) and check(second)
            assert check(third) or third.events[-1]["error"]["code"] == "node_lost"

    asyncio.run(run())


def test_an_ill_node_is_left_out_and_finishes_what_it_has() -> None:
    async def run() -> None:
        async with rig(decode=2, health_seconds=0.05) as it:
            it.decode[0].script.append(Fault("wait"))
            waiting = asyncio.ensure_future(it.complete(stream=True))
            await until(lambda: it.decode[0].seen, "it is under way")
            it.decode[0].health = 503
            looks = it.router.nodes
            await until(lambda: looks.num_up(Role.DECODE) == 1, "it is left out")
            for _ in range(3):
                assert check(await it.complete())
            assert len(it.decode[0].seen) == 1
            it.decode[0].go_on.set()
            assert check(await waiting)
            it.decode[0].health = 200
            await until(lambda: looks.num_up(Role.DECODE) == 2, "it is back")

    asyncio.run(run())


def test_a_node_that_is_drained_gets_nothing_and_finishes_what_it_has() -> None:
    async def run() -> None:
        async with rig(prefill=1, decode=2) as it:
            drained = it.decode[0]
            drained.script.append(Fault("wait"))
            waiting = asyncio.ensure_future(it.complete())
            await until(lambda: drained.seen, "it is under way")
            state = (await it.request("POST", f"/nodes/drain?url={drained.url}/")).json
            assert state["is_draining"] and state["in_flight"] == 1
            for _ in range(3):
                assert check(await it.complete())
            await it.request("POST", f"/nodes/drain?url={it.prefill[0].url}")
            assert check(await it.complete())
            assert [len(drained.seen), len(it.prefill[0].seen)] == [1, 4]
            drained.go_on.set()
            assert check(await waiting)
            await it.request("POST", f"/nodes/drain?url={it.decode[1].url}")
            assert (await it.complete()).status == 503
            await it.request("POST", f"/nodes/undrain?url={drained.url}")
            assert check(await it.complete()) and len(drained.seen) == 2

    asyncio.run(run())


def test_the_end_of_the_router_is_told() -> None:
    """What runs may end; what does not in time gets an error as its answer or last event."""

    async def run() -> None:
        async with rig(decode=2) as it:
            it.decode[0].script.append(Fault("hang", after=3))
            it.decode[1].script.append(Fault("hang"))
            stream = asyncio.ensure_future(it.complete(stream=True))
            whole = asyncio.ensure_future(it.complete())
            await until(lambda: all(node.seen for node in it.decode), "both run")
            it.server.should_exit = True
            await until(lambda: not it.server.servers[0].is_serving(), "no new connections")
            assert not stream.done() and not whole.done()
            it.router.end_requests()
            answer = await stream
            assert not check(answer)
            assert answer.events[-1]["error"]["code"] == "shutting_down"
            answer = await whole
            assert answer.status == 503 and answer.json["error"]["code"] == "shutting_down"

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(4))
def test_many_clients_and_nodes_that_fail_at_random(seed: int) -> None:
    """Faults in both legs, nodes that are killed, clients that leave: all of it at once."""
    rng = random.Random(seed)

    async def one(it: Rig, number: int) -> bool:
        stream = rng.random() < 0.7
        prompt = f"{LONG} {number}" if rng.random() < 0.5 else f"{number}"
        if rng.random() < 0.2:
            body = {"prompt": prompt, "stream": stream}
            gone = await it.open("POST", "/v1/completions", body)
            for _ in range(rng.randrange(3)):
                await gone.read_some()
            await gone.leave()
            return False
        return check(await it.complete(prompt, stream=stream), prompt)

    async def killer(it: Rig) -> None:
        while True:
            await asyncio.sleep(0.01)
            rng.choice([*it.prefill, *it.decode]).kill()

    async def run() -> None:
        async with rig(prefill=2, decode=3) as it:
            for node in (*it.prefill, *it.decode):
                for _ in range(30):
                    fault = rng.choice([*SILENT, *LATE, Fault("crumbs"), *[Fault("none")] * 20])
                    node.script.append(fault)
            killing = asyncio.ensure_future(killer(it))
            done = await asyncio.gather(*(one(it, number) for number in range(60)))
            killing.cancel()
            assert sum(done) > 20
            await it.settle()
            legs = ("ok", "error", "cut", "gone", "too_many")
            assert sum([await it.metric("client", each) for each in legs]) == 60

    asyncio.run(run())
