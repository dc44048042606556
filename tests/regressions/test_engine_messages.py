# SPDX-License-Identifier: Apache-2.0
"""Faults between the front and the engine core that an audit found (E5, E7, U3): messages that
cannot be read, fronts that stop reading, ends that count as others, and the end of the server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from stratakv.engine.api.api_errors import ApiError
from stratakv.engine.api.metrics.engine_metrics import Metrics, Watch
from stratakv.engine.client.base import UNHEALTHY_FAILED_STEPS, EngineDead
from stratakv.engine.client.in_process import InProcessClient
from stratakv.engine.client.process_client import ProcessClient
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.loop import CoreLoop
from stratakv.engine.core.process import CoreServer
from stratakv.engine.request.core_messages import (
    AddRequest,
    Outputs,
    Reply,
    TokenOutput,
    encoder,
    refuse,
)
from stratakv.engine.request.request import pack_token_ids
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.text.output_processor import generate_text
from stratakv.engine.text.tokenizer import Tokenizer

from ..engine import conftest as engine_conftest
from ..engine.client.test_process import config_of
from ..engine.core.conftest import config_of as core_config_of
from ..engine.core.conftest import prompt_of, request
from ..nursery_site import nursery_client

pytestmark = pytest.mark.regression
tiny_model, long_model = engine_conftest.tiny_model, engine_conftest.long_model

WAIT_SECONDS = 20.0
NUM_STREAMS = 32


@asynccontextmanager
async def process_client(model: Path, **options: Any) -> AsyncIterator[ProcessClient]:
    client = await ProcessClient.start(config_of(model, **options), timeout_seconds=60)
    try:
        yield client
    finally:
        await client.close(10)


def asks(name: str, max_tokens: int = 8, **params: Any) -> AddRequest:
    given = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **params}
    return AddRequest(name, pack_token_ids(prompt_of(20)), SamplingParams(**given))


async def all_of(client: ProcessClient | InProcessClient, asked: AddRequest) -> list[TokenOutput]:
    async with asyncio.timeout(WAIT_SECONDS):
        return [output async for output in client.generate(asked)]


def test_e07_a_request_that_the_core_cannot_read(tiny_model: Path) -> None:
    """It was dropped, and its client waited for ever."""

    async def live() -> None:
        async with process_client(tiny_model, max_model_len=256) as client:
            mailbox = client._open_mailbox("unreadable")
            frame = ["add", "unreadable", "no bytes", {"of": "another version"}]
            await client._to_core.send(encoder.encode(frame))
            async with asyncio.timeout(WAIT_SECONDS):
                output = await mailbox.get()
            assert output.finish_reason == "error"
            assert "cannot read this request" in (output.error or "")
            assert len(await all_of(client, asks("good")))

    asyncio.run(live())


def test_e07_a_message_without_a_sender_ends_the_connection(tiny_model: Path) -> None:
    async def live() -> None:
        async with process_client(tiny_model, max_model_len=256) as client:
            await client._to_core.send(b"\xc1 is no msgpack")
            async with asyncio.timeout(WAIT_SECONDS):
                assert "cannot be read" in await client.wait_dead()
            with pytest.raises(EngineDead):
                await all_of(client, asks("late"))

    asyncio.run(live())


def test_e07_who_is_told_of_a_message_that_cannot_be_read() -> None:
    answer = refuse(encoder.encode(["add", "name", 7]), "7 is no prompt")
    assert isinstance(answer, Outputs)
    assert answer.outputs[0].request_id == "name"
    answer = refuse(encoder.encode(["call", 5]), "no name")
    assert isinstance(answer, Reply)
    assert answer.call_id == 5
    for frame in (b"", b"\xc1", encoder.encode(["abort", 7]), encoder.encode({"add": "x"})):
        assert refuse(frame, "no reason") is None


def test_e07_a_front_that_stops_reading_pauses_its_requests(
    long_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two minutes it killed the core for everybody. Here the queues hold one message each
    and the time after which it did so is over at once, and yet every token comes."""
    monkeypatch.setattr("stratakv.engine.core.process._SEND_SECONDS", 0.0, raising=False)
    monkeypatch.setattr("stratakv.engine.core.process._POLL_MILLISECONDS", 20)
    context = zmq.Context()
    outputs = context.socket(zmq.PULL)
    outputs.set_hwm(1)
    port = outputs.bind_to_random_port("tcp://127.0.0.1")
    server = CoreServer.__new__(CoreServer)
    server._context = zmq.Context()
    server._output = server._context.socket(zmq.PUSH)
    server._output.set_hwm(1)
    server._output.setsockopt(zmq.SNDBUF, 1024)
    server._output.setsockopt(zmq.LINGER, 0)
    server._output.connect(f"tcp://127.0.0.1:{port}")
    server._loop = None
    big = TokenOutput("r", [1] * 200_000)
    sent, failed = [0], list[BaseException]()

    def send() -> None:
        try:
            for _ in range(50):
                server._send_to_client(Outputs([big]))
                sent[0] += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    deadline = time.monotonic() + WAIT_SECONDS
    last = (-1, 0)
    while last[1] < 10:  # until it has sent nothing more for a while: it waits
        assert time.monotonic() < deadline
        last = (sent[0], last[1] + 1 if last[0] == sent[0] else 0)
        time.sleep(0.03)
    assert not failed
    assert sent[0] < 50, "the queues took all of it"
    received = 0
    while received < 50:
        assert outputs.poll(1000 * WAIT_SECONDS)
        outputs.recv()
        received += 1
    thread.join(WAIT_SECONDS)
    assert not (failed or thread.is_alive())
    for each in (server._output, outputs):
        each.close(0)
    server._context.term()
    context.term()


def test_e07_a_send_around_the_death_of_a_core(long_model: Path) -> None:
    """It took up to a minute: nobody is left who would read, and nobody looked whether the core was
    known to be gone."""

    async def live() -> None:
        async with process_client(long_model) as client:
            os.kill(client.pid, signal.SIGSTOP)
            # More than the queue and the socket take, so that they wait.
            prompt = pack_token_ids([1] * 4000)
            params = SamplingParams(max_tokens=8, temperature=0.0)
            waiting = [
                asyncio.ensure_future(all_of(client, AddRequest(str(i), prompt, params)))
                for i in range(3000)
            ]
            while client._to_core.get(zmq.EVENTS) & zmq.POLLOUT:
                await asyncio.sleep(0.05)
            os.kill(client.pid, signal.SIGKILL)
            began = time.monotonic()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(result, EngineDead) for result in results)
            assert time.monotonic() - began < WAIT_SECONDS

    asyncio.run(live())


def test_e07_a_stop_string_is_an_end_of_its_own(tiny_model: Path) -> None:
    """It counted as aborted in the core, and its phases were in no histogram."""
    tokenizer = Tokenizer.load_if_present(tiny_model)
    assert tokenizer is not None

    async def live() -> tuple[dict[str, Any], Metrics]:
        client = InProcessClient(EngineCore(core_config_of(tiny_model)))
        metrics = Metrics("tiny")
        try:
            told = [output async for output in generate_text(client, asks("a", 40), tokenizer)]
            text = "".join(output.text for output in told)
            stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii())
            watch = Watch(metrics, time.monotonic(), 20)
            async for output in generate_text(client, asks("b", 60, stop=(stop,)), tokenizer):
                watch.record_output(output)
            watch.close()
            assert output.finish_reason == "stop"
            deadline = time.monotonic() + WAIT_SECONDS
            stats = await client.call("stats")
            while stats["scheduler"]["num_running"]:
                assert time.monotonic() < deadline
                stats = await client.call("stats")
            return stats["scheduler"], metrics
        finally:
            await client.close(10)

    counts, metrics = asyncio.run(live())
    assert (counts.get("ended_stop"), counts.get("ended_abort", 0)) == (1, 0)
    shown = metrics.exposition().decode()
    for phase in ("queue", "prefill", "decode", "inference"):
        assert re.search(rf"vllm:request_{phase}_time_seconds_count\{{.*\}} 1\.0", shown), phase


def test_e07_a_priority_is_refused_until_there_is_one(tiny_model: Path) -> None:
    """It was taken, and nothing followed from it."""
    core = EngineCore(core_config_of(tiny_model))
    try:
        (output,) = core.add(request("r", prompt_of(20), priority=1))
        assert output.finish_reason == "error"
        assert "priority must be 0" in (output.error or "")
        assert core.add(request("s", prompt_of(20), priority=0)) == []
    finally:
        core.shutdown(5.0)


class FailingCore:
    """Fails steps until it is told not to, and says so."""

    num_failed_steps = 0
    fails = True

    def step(self) -> list[TokenOutput]:
        self.num_failed_steps = self.num_failed_steps + 1 if self.fails else 0
        return []

    def has_work(self) -> bool:
        return True

    def idle_seconds(self) -> float:
        return 0.01

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        pass

    def enter_thread(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def test_e05_health_looks_at_the_last_good_step() -> None:
    """It said ok as long as there was a process."""
    from types import SimpleNamespace

    from stratakv.engine.api.app import _health

    core, told = FailingCore(), list[int]()

    def emit(message: Any) -> None:
        told.append(message.num_failed_steps)
        core.fails = len(told) < 5
        if len(told) == 6:
            loop.stop()

    loop = CoreLoop(core, emit)  # type: ignore[arg-type]
    assert loop.run()
    assert told == [1, 2, 3, 4, 5, 0]

    client = SimpleNamespace(is_alive=True, num_failed_steps=0)
    front: Any = SimpleNamespace(client=client)
    for failed in range(UNHEALTHY_FAILED_STEPS):
        client.num_failed_steps = failed
        asyncio.run(_health(front, None))  # type: ignore[arg-type]
    client.num_failed_steps = UNHEALTHY_FAILED_STEPS
    with pytest.raises(ApiError, match="steps failed") as refusal:
        asyncio.run(_health(front, None))  # type: ignore[arg-type]
    assert refusal.value.status == 503


@pytest.fixture
def served(long_model: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server on the long model, and its port."""
    process = nursery_client.popen(
        [sys.executable, "-m", "stratakv.engine.cli.main", "serve", str(long_model),
         "--served-model-name", "tiny", "--port", "0", "--num-threads", "1", "--num-blocks",
         "17000", "--max-num-seqs", "64", "--max-model-len", "8192"],
        cwd="/",
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "log").open("w"),
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        ready = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert ready, (tmp_path / "log").read_text()
        yield process, int(ready[1])
    finally:
        process.kill()
        process.communicate()


def test_u03_an_end_with_open_streams(
    served: tuple[subprocess.Popen[str], int], tmp_path: Path
) -> None:
    """A traceback for each of them, and no last event."""
    process, port = served
    body = {"prompt": "x", "max_tokens": 8000, "stream": True, "ignore_eos": True}
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(json.dumps(body))}"
    )
    sockets = [socket.create_connection(("127.0.0.1", port), WAIT_SECONDS) for _ in range(32)]
    for sock in sockets:
        sock.sendall(f"{head}\r\n\r\n{json.dumps(body)}".encode())
    said = [bytearray(sock.recv(1)) for sock in sockets]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/load", timeout=WAIT_SECONDS) as answer:
        assert json.load(answer)["server_load"] == NUM_STREAMS
    process.send_signal(signal.SIGINT)

    def read(sock: socket.socket, into: bytearray) -> None:
        while data := sock.recv(65536):
            into += data

    readers = [threading.Thread(target=read, args=pair) for pair in zip(sockets, said, strict=True)]
    for reader in readers:
        reader.start()
    for reader, sock in zip(readers, sockets, strict=True):
        reader.join(3 * WAIT_SECONDS)
        assert not reader.is_alive()
        sock.close()
    assert process.wait(WAIT_SECONDS) == 0
    for whole in said:
        last = json.loads(bytes(whole).split(b"data: ")[-1].split(b"\n\n")[0])
        assert last["error"]["code"] == "shutting_down"
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log
    about = [line for line in log.splitlines() if "shutting down; 32 requests" in line]
    assert len(about) == 1
