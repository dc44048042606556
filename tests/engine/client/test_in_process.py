# SPDX-License-Identifier: Apache-2.0
"""The engine core in a thread: a broken core is told of, a full queue is waited for."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from stratakv.engine.client.base import EngineDead
from stratakv.engine.client.in_process import InProcessClient
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.core import loop as core_loop
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.request.core_messages import AddRequest, TokenOutput, share_prompt
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams


@asynccontextmanager
async def running(model: Path) -> AsyncIterator[tuple[EngineCore, InProcessClient]]:
    core = EngineCore(engine_config(model, {"num_blocks": 600, "num_threads": 1}))
    client = InProcessClient(core)
    try:
        yield core, client
    finally:
        await client.close(10)


def request(request_id: str, max_tokens: int) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return AddRequest(request_id, pack_token_ids([1, 2, 3]), params)


async def count(client: InProcessClient, asked: AddRequest) -> int:
    return sum([len(output.new_token_ids) async for output in client.generate(asked)])


async def rest_of(stream: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    return [output async for output in stream]


def test_a_core_that_breaks_is_the_end_of_its_client(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a fault of the scheduler")

    async def run() -> None:
        async with running(long_model) as (core, client):
            task = asyncio.ensure_future(count(client, request("r", 4000)))
            while not (await client.call("stats"))["scheduler"]["num_running"]:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(core.scheduler, "schedule", broken)
            began = time.monotonic()
            with pytest.raises(EngineDead, match="a fault of the scheduler"):
                await task
            assert time.monotonic() - began < 20.0
            assert not client.is_alive
            with pytest.raises(EngineDead):
                await client.call("stats")

    asyncio.run(run())


def test_more_messages_than_the_queue_holds(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_loop, "QUEUE_MESSAGES", 2)

    async def run() -> list[int]:
        async with running(long_model) as (_, client):
            tasks = [count(client, request(str(number), 3)) for number in range(40)]
            return await asyncio.gather(*tasks)

    assert asyncio.run(run()) == [3] * 40


def test_running_requests_end_with_the_client(long_model: Path) -> None:
    async def run() -> None:
        async with running(long_model) as (_, client):
            stream = client.generate(request("r", 4000))
            assert (await anext(stream)).new_token_ids
            await client.close(10)
            with pytest.raises(EngineDead, match="was closed"):
                await rest_of(stream)

    asyncio.run(run())


def test_the_thread_of_a_closed_engine_has_ended(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the thread has of its own goes last, its workspace among it. Python must not end then:
    torch frees memory without the GIL, and cannot be unwound there."""
    own = threading.local()
    gone: list[str] = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.05)
            gone.append(threading.current_thread().name)

    async def run() -> None:
        async with running(tiny_model) as (core, _):
            shutdown = core.shutdown

            def shut_down() -> None:
                own.workspace = Slow()
                shutdown()

            monkeypatch.setattr(core, "shutdown", shut_down)
        assert gone, "the engine was closed before its thread had ended"

    asyncio.run(run())


def family(*names: str, max_tokens: int = 5, length: int = 3) -> list[AddRequest]:
    """Answers to one prompt, the first of which brings the others."""
    requests = [request(name, max_tokens) for name in names]
    for each in requests:
        each.prompt_token_ids = pack_token_ids(range(1, length + 1))
    share_prompt(requests)
    return requests


def test_one_message_brings_all_answers_to_a_prompt(long_model: Path) -> None:
    async def run() -> None:
        async with running(long_model) as (core, client):
            requests = family("a", "b", "c", length=100)
            assert await asyncio.gather(*(count(client, each) for each in requests)) == [5] * 3
            counts = core.scheduler.counts
            assert counts["forks"] == 2
            assert counts["scheduled_tokens"] == 100 + 3 * 4
            assert not client._mailboxes
            assert not client._brought

    asyncio.run(run())


def test_who_reads_late_sends_a_request_of_its_own(long_model: Path) -> None:
    """What was made of it meanwhile is aborted with the one that brought it."""

    async def run() -> None:
        async with running(long_model) as (core, client):
            first, second = family("a", "b")
            assert await count(client, first) == 5
            assert not client._brought
            assert await count(client, second) == 5
            assert core.scheduler.counts["ended_length"] >= 2
            assert not core.scheduler.requests

    asyncio.run(run())


def test_a_request_that_is_given_up_before_it_was_sent_leaves_its_forks_to_themselves(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with running(long_model) as (_, client):
            first, second = family("a", "b")
            send, is_stuck = client._send_to_core, asyncio.Event()

            async def stuck(message: object) -> None:
                if message is first:
                    is_stuck.set()
                    await asyncio.sleep(600)
                await send(message)  # type: ignore[arg-type]

            monkeypatch.setattr(client, "_send_to_core", stuck)
            one = asyncio.ensure_future(count(client, first))
            await is_stuck.wait()
            other = asyncio.ensure_future(count(client, second))
            await asyncio.sleep(0)
            one.cancel()
            assert await other == 5
            assert not client._mailboxes
            assert not client._brought

    asyncio.run(run())


def test_an_id_in_use_ends_the_request_that_brings_it_and_no_other(long_model: Path) -> None:
    async def run() -> None:
        async with running(long_model) as (_, client):
            stream = client.generate(request("b", 4000))
            await anext(stream)
            first, *_ = family("a", "c", "b")
            with pytest.raises(ValueError, match="'b' is already running"):
                await count(client, first)
            assert (await anext(stream)).new_token_ids
            await stream.aclose()
            assert not client._mailboxes
            assert not client._brought

    asyncio.run(run())
