# SPDX-License-Identifier: Apache-2.0
"""A client that sends load to a server over HTTP: concurrent sessions, in a closed or an open loop.

    closed   a fixed number of users; each user begins a session when the previous session has ended
    open     sessions begin at random times, whatever number of them runs; gaps are exponential, so
             arrivals are a Poisson process of the given rate

A session sends its next request as soon as the previous request is answered. Failed requests are
recorded and counted. During an answer, the client only stores the received pieces with their times,
and parses the pieces at the end. On the server's machine, parsing would count as latency."""

from __future__ import annotations

import asyncio
import random
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from .workloads import Session

MAX_ANSWER_BYTES = 64 * 2**20
_MAX_QUOTED_BYTES = 300
# The fields of every request: greedy sampling, and exactly as many tokens as requested.
GREEDY: dict[str, Any] = {
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}


class RequestFailed(RuntimeError):
    """The server refused the request, or its answer broke off."""


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer. Times are in seconds since just before the connection was opened."""

    text: str = ""
    event_seconds: list[float] = field(default_factory=list)  # times of the events with a choice
    total_seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)
    cached_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)  # if the request asked for token ids

    @property
    def first_token_seconds(self) -> float:
        return self.event_seconds[0]

    @property
    def gaps_seconds(self) -> list[float]:
        """The seconds between consecutive events. An event may have several tokens."""
        return [later - earlier for earlier, later in pairwise(self.event_seconds)]


async def ask(
    host: str, port: int, path: str, body: Mapping[str, Any], timeout_seconds: float
) -> StreamedAnswer:
    """Send a streaming request and wait for the end of the answer. Raises RequestFailed."""
    started = time.perf_counter()
    pieces = _Pieces()
    try:
        async with asyncio.timeout(timeout_seconds):
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: pieces, host, port)
            try:
                transport.write(_encode_request(host, port, path, body))
                await pieces.end
            finally:
                transport.abort()
    except TimeoutError:
        raise RequestFailed(f"no whole answer within {timeout_seconds:g} s") from None
    except OSError as error:
        raise RequestFailed(f"the connection failed ({error})") from error
    return read_answer(pieces.data, [(end, at - started) for end, at in pieces.marks])


class _Pieces(asyncio.Protocol):
    """The bytes of a response and their times, until the server closes the connection."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.marks: list[tuple[int, float]] = []  # number of bytes so far, and the time
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.data += data
        self.marks.append((len(self.data), time.perf_counter()))
        if len(self.data) > MAX_ANSWER_BYTES:
            self._finish(RequestFailed(f"the answer has more than {MAX_ANSWER_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(exc)

    def _finish(self, error: Exception | None) -> None:
        if self.end.done():
            return
        if error is None:
            self.end.set_result(None)
        else:
            self.end.set_exception(error)


class _Delta(msgspec.Struct):
    content: str = ""


class _Choice(msgspec.Struct):
    text: str = ""  # for completions
    token_ids: list[int] | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)  # for chats


class _Details(msgspec.Struct):
    cached_tokens: int = 0
    cached_tokens_by_tier: dict[str, int] = msgspec.field(default_factory=dict)


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _Details = msgspec.field(default_factory=_Details)


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)
_PREFIX, _DONE = b"data: ", b"[DONE]"


def read_answer(data: bytes | bytearray, marks: list[tuple[int, float]]) -> StreamedAnswer:
    """Return the answer in `data`, a whole HTTP response. `marks` are ascending byte counts, each
    with the time at which so many bytes had been received. Raises RequestFailed."""
    head, separator, rest = bytes(data).partition(b"\r\n\r\n")
    status = head.split(b"\r\n", 1)[0].split(b" ")
    if not separator or len(status) < 2:
        raise RequestFailed("the connection was closed before an answer")
    if status[1] != b"200":
        raise RequestFailed(f"HTTP {status[1].decode()}: {_shown(rest)}")
    counts = [count for count, _ in marks]
    answer = StreamedAnswer()
    texts: list[str] = []
    usage: _Usage | None = None
    is_done = False
    for end, line in _event_lines(rest, len(head) + len(separator)):
        if line == _DONE:
            is_done = True
            answer.total_seconds = marks[bisect_left(counts, end)][1]
            break
        event = _decode(line)
        if event.choices:
            answer.event_seconds.append(marks[bisect_left(counts, end)][1])
            for choice in event.choices:
                texts.append(choice.text or choice.delta.content)
                answer.token_ids += choice.token_ids or ()
        usage = event.usage or usage
    if not is_done or usage is None or not answer.event_seconds:
        raise RequestFailed(f"the stream ended early after {len(answer.event_seconds)} events")
    answer.text = "".join(texts)
    answer.prompt_tokens, answer.output_tokens = usage.prompt_tokens, usage.completion_tokens
    details = usage.prompt_tokens_details
    answer.cached_tokens, answer.cached_by_tier = (
        details.cached_tokens,
        details.cached_tokens_by_tier,
    )
    return answer


def _decode(line: bytes) -> _Event:
    try:
        event = _decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise RequestFailed(f"an event cannot be read ({error}): {_shown(line)}") from error
    if event.error is not None:
        raise RequestFailed(f"the stream ended with {_shown(line)}")
    return event


def _event_lines(body: bytes, offset: int) -> list[tuple[int, bytes]]:
    """Return the data of each event, with the position of its end in the response; the body starts
    at `offset`. The body is in HTTP chunks; an event may be in several chunks."""
    found: list[tuple[int, bytes]] = []
    pending, place = b"", 0
    while (line_end := body.find(b"\r\n", place)) >= 0:
        try:
            size = int(body[place:line_end].split(b";")[0], 16)
        except ValueError as error:
            raise RequestFailed(f"the body is not chunked: {_shown(body[place:])}") from error
        if size == 0:
            break
        place = line_end + 2 + size
        pending += body[line_end + 2 : place]
        *lines, pending = pending.split(b"\n")
        at = offset + min(place, len(body))
        found += ((at, text[len(_PREFIX) :]) for text in lines if text.startswith(_PREFIX))
        place += 2
    return found


def _encode_request(host: str, port: int, path: str, body: Mapping[str, Any]) -> bytes:
    content = msgspec.json.encode(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def _shown(data: bytes) -> str:
    return data[:_MAX_QUOTED_BYTES].decode(errors="replace").strip()


@dataclass(frozen=True, slots=True)
class Target:
    """The address of the server, and the settings of every request."""

    host: str
    port: int
    max_tokens: int
    timeout_seconds: float = 120.0


@dataclass(slots=True)
class LoadRun:
    """The answers and errors of a run. A session ends when one of its requests fails."""

    by_session: list[list[StreamedAnswer]]
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0  # from the first request to the last token

    @property
    def answers(self) -> list[StreamedAnswer]:
        return [answer for answers in self.by_session for answer in answers]


async def run_closed(target: Target, sessions: Sequence[Session], concurrency: int) -> LoadRun:
    """Run all sessions, `concurrency` at a time."""
    run = LoadRun([[] for _ in sessions])
    waiting = iter(zip(sessions, run.by_session, strict=True))

    async def user() -> None:
        for session, answers in waiting:
            await _run_session(target, session, answers, run.errors)

    started = time.perf_counter()
    await asyncio.gather(*(user() for _ in range(min(concurrency, len(sessions)))))
    run.seconds = time.perf_counter() - started
    return run


async def run_open(
    target: Target, sessions: Sequence[Session], requests_per_second: float, seed: int
) -> LoadRun:
    """Run all sessions, which begin at random times so that the mean rate of requests is
    `requests_per_second`."""
    run = LoadRun([[] for _ in sessions])
    rng = random.Random(seed)
    turns = sum(session.num_turns for session in sessions) / len(sessions)
    running = []
    started = time.perf_counter()
    begin = started
    for session, answers in zip(sessions, run.by_session, strict=True):
        # The sleep is until a time, not for a gap, so that a late wake-up does not lower the rate.
        begin += rng.expovariate(requests_per_second / turns)
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        work = _run_session(target, session, answers, run.errors)
        running.append(asyncio.ensure_future(work))
    await asyncio.gather(*running)
    run.seconds = time.perf_counter() - started
    return run


async def _run_session(
    target: Target, session: Session, answers: list[StreamedAnswer], errors: list[str]
) -> None:
    while len(answers) < session.num_turns:
        body = session.body([answer.text for answer in answers]) | GREEDY
        body["max_tokens"] = target.max_tokens
        try:
            answer = await ask(target.host, target.port, session.path, body, target.timeout_seconds)
        except RequestFailed as error:
            errors.append(str(error))
            return
        if answer.output_tokens != target.max_tokens:
            errors.append(f"{answer.output_tokens} tokens came, not {target.max_tokens}")
            return
        answers.append(answer)
