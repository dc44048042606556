# SPDX-License-Identifier: Apache-2.0
"""The load client against a real socket: what is timed, what is counted, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from stratakv.benchmarks.harness import load_client
from stratakv.benchmarks.harness.load_client import (
    LoadRun,
    RequestFailed,
    StreamedAnswer,
    Target,
    ask,
    read_answer,
    run_closed,
    run_open,
)
from stratakv.benchmarks.harness.workloads import ChatSession, PromptSession

HOST = "127.0.0.1"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "prompt_tokens_details": {"cached_tokens": 32, "cached_tokens_by_tier": {"cpu": 32}},
}


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n" % len(data) + data + b"\r\n"


def whole_stream(texts: list[str]) -> list[bytes]:
    """The pieces in which a server writes: one event each."""
    events = [event(choices=[{"text": text}]) for text in texts]
    last = [event(choices=[], usage=USAGE | {"completion_tokens": len(texts)}), b"data: [DONE]\n\n"]
    return [HEAD, *map(chunk, events + last), b"0\r\n\r\n"]


Answerer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(answer: Answerer) -> AsyncIterator[int]:
    """A server on a free port that hands each request's body to `answer`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        with contextlib.suppress(ConnectionError):
            await answer(body, writer)
        writer.close()

    server = await asyncio.start_server(handle, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def ask_one(answer: Answerer, timeout_seconds: float = 10.0) -> StreamedAnswer:
    async def run() -> StreamedAnswer:
        async with serving(answer) as port:
            return await ask(HOST, port, "/v1/completions", {"prompt": [1]}, timeout_seconds)

    return asyncio.run(run())


def raw(*pieces: bytes) -> Answerer:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)

    return answer


def test_times_of_events() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        for index, piece in enumerate(whole_stream(["a", "b", "c"])):
            if index == 2:  # before the second token
                await asyncio.sleep(1.0)
            writer.write(piece)
            await writer.drain()

    got = ask_one(answer)
    assert (got.text, got.prompt_tokens, got.output_tokens) == ("abc", 40, 3)
    assert got.cached_by_tier == {"cpu": 32}
    assert len(got.event_seconds) == 3
    assert 0 < got.first_token_seconds <= got.event_seconds[1] - 0.5
    assert got.gaps_seconds[0] >= 0.5 > got.gaps_seconds[1]
    assert got.total_seconds >= got.event_seconds[-1]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pieces_may_be_cut_anywhere(size: int) -> None:
    data = b"".join(whole_stream(["one", " two", " three"]))
    marks = [(end, float(end)) for end in range(size, len(data) + size, size)]
    got = read_answer(data, marks)
    assert got.text == "one two three"
    # An event has come when its last byte has, and not a piece earlier or later.
    ends = [data.index(text) + len(text) + len(b'"}]}\n\n') for text in (b"one", b"two", b"three")]
    for seconds, end in zip(got.event_seconds, ends, strict=True):
        assert end <= seconds < end + len(b"\r\n") + size


def test_chats_and_events_over_chunks() -> None:
    first = event(choices=[{"delta": {"role": "assistant", "content": "hal"}}])
    second = event(choices=[{"delta": {"content": "lo"}}])
    rest = event(choices=[], usage=USAGE) + b"data: [DONE]\n\n"
    body = chunk(first[:9]) + chunk(first[9:] + second) + chunk(rest) + b"0\r\n\r\n"
    got = ask_one(raw(HEAD + body))
    assert got.text == "hallo" and len(got.event_seconds) == 2


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"], "HTTP 503: busy"),
        ([HEAD, chunk(event(error={"message": "the core died"}))], "ended with .*the core died"),
        (whole_stream(["a", "b"])[:-2], "ended early after 2 events"),
        ([HEAD, chunk(b"data: {]\n\n")], "cannot be read"),
        ([HEAD, b"data: plain\r\n\r\n"], "not chunked"),
        ([], "closed before an answer"),
    ],
)
def test_what_is_no_answer(pieces: list[bytes], words: str) -> None:
    with pytest.raises(RequestFailed, match=words):
        ask_one(raw(*pieces))


def test_a_server_that_is_silent() -> None:
    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)

    with pytest.raises(RequestFailed, match=r"no whole answer within 0.1 s"):
        ask_one(answer, timeout_seconds=0.1)


def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_client, "MAX_ANSWER_BYTES", 1000)
    with pytest.raises(RequestFailed, match="more than 1000 bytes"):
        ask_one(raw(HEAD, chunk(event(choices=[{"text": "x" * 2000}]))))


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
        with pytest.raises(RequestFailed, match="the connection failed"):
            asyncio.run(ask(HOST, port, "/", {}, 5.0))


class Counting:
    """Answers every request after a moment and counts how many it has at once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.arrivals: list[float] = []
        self.now = self.most = 0

    async def __call__(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        self.arrivals.append(time.monotonic())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.02)
        self.now -= 1
        if body.get("prompt") == [666]:
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\nno")
            return
        tokens = ["t"] * (1 if body.get("prompt") == [1] else body["max_tokens"])
        writer.writelines(whole_stream(tokens))


def load(counting: Counting, run: Callable[[Target], Awaitable[LoadRun]]) -> LoadRun:
    async def work() -> LoadRun:
        async with serving(counting) as port:
            return await run(Target(HOST, port, max_tokens=3, timeout_seconds=10.0))

    return asyncio.run(work())


def test_a_closed_loop_keeps_its_users_busy() -> None:
    counting = Counting()
    sessions = [PromptSession([10 + number]) for number in range(12)]
    run = load(counting, lambda target: run_closed(target, sessions, 4))
    assert counting.most == 4
    assert len(run.answers) == 12 and not run.errors
    assert run.seconds >= 3 * 0.02
    body = counting.bodies[0]
    assert (body["temperature"], body["ignore_eos"], body["stream"]) == (0, True, True)


def test_turns_follow_each_other_and_carry_the_answers() -> None:
    counting = Counting()
    sessions = [ChatSession("s", ["q1", "q2", "q3"])]
    run = load(counting, lambda target: run_closed(target, sessions, 4))
    assert counting.most == 1
    assert [len(body["messages"]) for body in counting.bodies] == [2, 4, 6]
    assert counting.bodies[2]["messages"][2] == {"role": "assistant", "content": "ttt"}
    assert [answer.text for answer in run.by_session[0]] == ["ttt"] * 3


def test_failures_are_counted_and_end_only_their_session() -> None:
    counting = Counting()
    sessions = [PromptSession([666]), PromptSession([5]), PromptSession([1])]
    run = load(counting, lambda target: run_closed(target, sessions, 1))
    assert run.errors == ["HTTP 400: no", "1 tokens came, not 3"]
    assert [len(answers) for answers in run.by_session] == [0, 1, 0]


def test_an_open_loop_waits_for_nobody() -> None:
    counting = Counting()
    sessions = [PromptSession([10 + number]) for number in range(40)]
    run = load(counting, lambda target: run_open(target, sessions, 200.0, seed=3))
    assert len(run.answers) == 40 and not run.errors
    assert counting.most > 1, "requests came while others ran"
    # 40 exponential gaps of 5 ms: 0.2 s on average, more than 0.1 s all but surely.
    assert counting.arrivals[-1] - counting.arrivals[0] > 0.1
