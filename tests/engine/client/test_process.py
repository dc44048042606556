# SPDX-License-Identifier: Apache-2.0
"""The engine core in its own process: same tokens, and an end that is noticed however it comes."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from stratakv.engine.client import launcher
from stratakv.engine.client.base import EngineDead
from stratakv.engine.client.process_client import ProcessClient
from stratakv.engine.config.engine_config import EngineConfig
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.offline.event_loop_thread import EventLoopThread
from stratakv.engine.request.core_messages import AddRequest, TokenOutput
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.tiers.settings.values import ConfigError

VOCAB = 257
LONG = 4000  # tokens: seconds, so that a request surely runs when it is looked at
Reference = Callable[[Sequence[int], int], list[int]]


def config_of(model: Path, **options: Any) -> EngineConfig:
    defaults = {"num_blocks": 300, "max_model_len": 4096, "dtype": "float64", "max_num_seqs": 16,
                "num_threads": 1}  # fmt: skip
    return engine_config(model, defaults | options)


@pytest.fixture(scope="module")
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("tests")
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def client(loop: EventLoopThread, long_model: Path) -> Iterator[ProcessClient]:
    """A core that several tests share."""
    started = loop.run(ProcessClient.start(config_of(long_model), timeout_seconds=60))
    yield started
    loop.run(started.close(20))


def prompt_of(seed: int, length: int = 20) -> list[int]:
    return random.Random(seed).choices(range(VOCAB - 1), k=length)


def request(request_id: str, prompt: Sequence[int], max_tokens: int = 8) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return AddRequest(request_id, pack_token_ids(prompt), params)


async def collect(client: ProcessClient, asked: AddRequest) -> list[TokenOutput]:
    return [output async for output in client.generate(asked)]


def tokens_of(outputs: Sequence[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


async def running(client: ProcessClient) -> float:
    stats = (await client.call("stats"))["scheduler"]
    return float(stats["num_running"] + stats["num_waiting"])


async def idle(client: ProcessClient, seconds: float = 10.0) -> bool:
    """Whether the core comes to hold no request within the time."""
    deadline = time.monotonic() + seconds
    while await running(client):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def gone(pid: int, seconds: float) -> bool:
    """Whether a process ends within the time; one that nobody has waited for counts as ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_many_at_once_get_their_own_tokens(
    loop: EventLoopThread, client: ProcessClient, greedy_reference: Reference
) -> None:
    prompts = [prompt_of(number, 5 + number) for number in range(32)]

    async def run() -> list[list[TokenOutput]]:
        asked = [request(f"many-{i}", prompt) for i, prompt in enumerate(prompts)]
        return await asyncio.gather(*[collect(client, each) for each in asked])

    for prompt, outputs in zip(prompts, loop.run(run()), strict=True):
        assert tokens_of(outputs) == greedy_reference(prompt, 8)
        assert [o.finish_reason for o in outputs][-1] == "length"
        assert outputs[0].num_cached_tokens is not None


def test_ready_tells_of_the_core(client: ProcessClient) -> None:
    assert client.is_alive
    assert (client.ready.max_model_len, client.ready.vocab_size) == (4096, VOCAB)
    assert (client.ready.num_blocks, client.ready.block_size) == (300, 16)
    assert client.ready.eos_token_ids == [256]


def test_a_bad_request_fails_alone(loop: EventLoopThread, client: ProcessClient) -> None:
    async def run() -> tuple[list[TokenOutput], list[TokenOutput]]:
        bad, good = request("bad", [VOCAB]), request("good", prompt_of(1))
        return await asyncio.gather(collect(client, bad), collect(client, good))

    bad, good = loop.run(run())
    assert [o.finish_reason for o in bad] == ["error"]
    assert "from 0 to 256" in (bad[0].error or "")
    assert len(tokens_of(good)) == 8


def test_closing_the_iterator_aborts(loop: EventLoopThread, client: ProcessClient) -> None:
    async def run() -> bool:
        stream = client.generate(request("closed", prompt_of(2), max_tokens=LONG))
        assert (await anext(stream)).new_token_ids
        assert await running(client) == 1
        await stream.aclose()
        return await idle(client)

    assert loop.run(run())


def test_a_cancelled_reader_aborts(loop: EventLoopThread, client: ProcessClient) -> None:
    async def run() -> bool:
        asked = request("cancelled", prompt_of(3), max_tokens=LONG)
        task = asyncio.ensure_future(collect(client, asked))
        while not await running(client):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await idle(client)

    assert loop.run(run())


def test_abort_ends_the_iterator(loop: EventLoopThread, client: ProcessClient) -> None:
    async def run() -> list[TokenOutput]:
        asked = request("aborted", prompt_of(4), max_tokens=LONG)
        task = asyncio.ensure_future(collect(client, asked))
        while not await running(client):
            await asyncio.sleep(0.01)
        await client.abort(["aborted", "unknown"])
        outputs = await task
        assert await idle(client)
        return outputs

    assert loop.run(run())[-1].finish_reason == "abort"


def test_a_slow_reader_holds_up_nobody_and_misses_nothing(
    loop: EventLoopThread, client: ProcessClient, greedy_reference: Reference
) -> None:
    async def run() -> list[TokenOutput]:
        slow = client.generate(request("slow", prompt_of(5), max_tokens=40))
        outputs = [await anext(slow)]
        for number in range(3):
            asked = request(f"fast-{number}", prompt_of(6 + number), max_tokens=40)
            assert len(tokens_of(await collect(client, asked))) == 40
        return outputs + [output async for output in slow]

    outputs = loop.run(run())
    assert tokens_of(outputs) == greedy_reference(prompt_of(5), 40)
    assert len(outputs) < 20, "what waited should have been merged"


def test_an_id_that_is_running_is_refused(loop: EventLoopThread, client: ProcessClient) -> None:
    async def run() -> None:
        first = client.generate(request("same", prompt_of(9), max_tokens=LONG))
        await anext(first)
        with pytest.raises(ValueError, match="already running"):
            await collect(client, request("same", prompt_of(9)))
        assert (await anext(first)).new_token_ids
        await first.aclose()

    loop.run(run())


def test_calls(loop: EventLoopThread, client: ProcessClient) -> None:
    async def run() -> None:
        assert await idle(client)
        assert await client.call("reset_prefix_cache", "all") == {"done": True}
        with pytest.raises(ValueError, match="not 'nonsense'"):
            await client.call("nonsense")
        with pytest.raises(TimeoutError, match="'stats' within 0 s"):
            await client.call("stats", timeout_seconds=0)
        assert (await client.call("stats"))["connector"] is None

    loop.run(run())


def test_a_killed_core_is_noticed_by_everybody(loop: EventLoopThread, long_model: Path) -> None:
    async def run() -> float:
        client = await ProcessClient.start(config_of(long_model), timeout_seconds=60)
        asked = [request(str(i), prompt_of(i), max_tokens=LONG) for i in range(4)]
        tasks = [asyncio.ensure_future(collect(client, each)) for each in asked]
        while not await running(client):
            await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGKILL)
        began = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        seconds = time.monotonic() - began
        assert all(isinstance(result, EngineDead) for result in results), results
        assert "was ended by SIGKILL" in await client.wait_dead()
        assert not client.is_alive
        with pytest.raises(EngineDead):
            await collect(client, request("late", prompt_of(1)))
        with pytest.raises(EngineDead):
            await client.call("stats")
        await client.close(5)
        return seconds

    assert loop.run(run()) < 1.0


@pytest.mark.slow
def test_an_orderly_end(
    loop: EventLoopThread, long_model: Path, small_tiers: dict[str, str]
) -> None:
    """Running requests end, the tiers are written, the process and its directory are gone."""

    async def life(prompt: list[int], end: Callable[[ProcessClient], Any]) -> TokenOutput:
        client = await ProcessClient.start(config_of(long_model, **small_tiers), timeout_seconds=60)
        first = (await collect(client, request("done", prompt)))[0]
        hanging = asyncio.ensure_future(collect(client, request("hangs", prompt_of(3), LONG)))
        while not await running(client):
            await asyncio.sleep(0.01)
        await end(client)
        with pytest.raises(EngineDead):
            await hanging
        await client.close(20)
        await client.close(20)
        assert gone(client.pid, 0.5)
        assert not client._core.directory.exists()
        return first

    async def by_signal(client: ProcessClient) -> None:
        os.kill(client.pid, signal.SIGTERM)
        assert "ended with exit status 0" in await client.wait_dead()

    async def by_client(client: ProcessClient) -> None:
        await client.close(20)

    prompt = prompt_of(77, 100)
    assert loop.run(life(prompt, by_signal)).num_cached_tokens == 0
    assert loop.run(life(prompt, by_client)).cached_tokens_by_tier == {"pool": 0, "ssd": 96}


def test_a_setting_that_cannot_work_comes_back_as_one(
    loop: EventLoopThread, long_model: Path
) -> None:
    with pytest.raises(ConfigError, match="which takes 257 blocks"):
        loop.run(ProcessClient.start(config_of(long_model, num_blocks=9), timeout_seconds=60))


def test_a_start_that_takes_too_long_leaves_nothing(
    loop: EventLoopThread, long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "subprocess", subprocess)  # it imports torch, and so takes long
    with pytest.raises(TimeoutError, match=r"not up within 0\.05 s"):
        loop.run(ProcessClient.start(config_of(long_model), timeout_seconds=0.05))


PARENT = """
import asyncio, os, signal, sys
from pathlib import Path
from stratakv.engine.client.process_client import ProcessClient
from stratakv.engine.config.engine_options import engine_config
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.request.core_messages import AddRequest

async def run():
    config = engine_config(sys.argv[1], {"num_blocks": 600, "num_threads": 1})
    client = await ProcessClient.start(config)
    print(client.pid, flush=True)
    params = SamplingParams(max_tokens=8000, ignore_eos=True)
    await anext(client.generate(AddRequest("r", bytes(4), params)))
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(run())
"""


@pytest.mark.slow
def test_a_core_does_not_outlive_its_launcher(long_model: Path) -> None:
    # Who is killed leaves the folder of its sockets behind, and those of a test's own are too deep.
    with tempfile.TemporaryDirectory(prefix="stratakv-test-") as scratch:
        done = subprocess.run(
            [sys.executable, "-c", PARENT, str(long_model)],
            cwd="/",
            env={**os.environ, "TMPDIR": scratch},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert gone(int(done.stdout), 10.0)


def test_the_core_process_is_no_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stratakv.engine.core.process"],
        cwd="/",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert "use `stratakv serve`" in done.stderr
    assert "Traceback" not in done.stderr
