# SPDX-License-Identifier: Apache-2.0
"""Load on a server: sessions run one beside the other, closed loop or open.

    closed   a fixed number of users; each begins a session when the one before it has ended
    open     sessions begin at random times, however many still run; the gaps are exponential, so
             arrivals are a Poisson process of the rate asked for

A session's own requests follow each other at once. Requests that fail are kept and counted.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .http_stream import GREEDY, RequestFailed, StreamedAnswer, ask
from .workloads import Session


@dataclass(frozen=True, slots=True)
class Target:
    """The server, and what every request asks of it."""

    host: str
    port: int
    max_tokens: int
    timeout_seconds: float = 120.0


@dataclass(slots=True)
class LoadRun:
    """What came of it. A session whose request fails ends there."""

    by_session: list[list[StreamedAnswer]]
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0  # from the first request to the last token

    @property
    def answers(self) -> list[StreamedAnswer]:
        """Of all sessions."""
        return [answer for answers in self.by_session for answer in answers]


async def run_closed(target: Target, sessions: Sequence[Session], concurrency: int) -> LoadRun:
    """All sessions, `concurrency` at a time."""
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
    """All sessions, begun so that their requests come at this rate on average."""
    run = LoadRun([[] for _ in sessions])
    rng = random.Random(seed)
    turns = sum(session.num_turns for session in sessions) / len(sessions)
    running = []
    started = time.perf_counter()
    begin = started
    for session, answers in zip(sessions, run.by_session, strict=True):
        # By the clock, not by the gap: a late wake-up must not lower the rate.
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
