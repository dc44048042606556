# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: clients that move blocks together, and far ends that they need.

All are started before anything is measured. Every wait has a deadline, and whatever goes wrong in a
process ends the run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

from ...engine.client.launcher import CORE_ENVIRONMENT
from ..harness.comparison import WrongWork
from . import client
from .client import Failed, Moved
from .transports import SECONDS, Plan

_EXIT_SECONDS = 10.0
_CPU_OF_ALL_THREADS = 2  # see clock_getcpuclockid(3)


class Round(NamedTuple):
    """What all clients did together."""

    bytes_per_second: float
    num_bytes: int
    cpu_seconds: float  # of the clients


class Clients:
    """So many clients, each with `count` blocks."""

    def __init__(self, clients: int, block_bytes: int, count: int) -> None:
        self.count = count
        self.block_bytes = block_bytes
        # Kept, for its semaphores go with it, and clients open them when they start.
        self._barrier = barrier = multiprocessing.get_context("spawn").Barrier(clients)
        self._clients = [
            start(client.serve, barrier, number, block_bytes, count) for number in range(clients)
        ]
        try:
            self._order("ready", [()] * clients)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._clients)

    @contextlib.contextmanager
    def transport(self, name: str, plans: Sequence[Plan]) -> Iterator[None]:
        """Have a transport open, by a plan for each client."""
        self._order("open", [(name, plan) for plan in plans])
        yield
        self._order("shut", [(name,)] * len(self))

    def move(self, name: str, verb: str, passes: int) -> Round:
        """All clients at once. Raises WrongWork."""
        moves: list[Moved] = self._order("move", [(name, verb, passes)] * len(self))
        seconds = max(move.ended for move in moves) - min(move.began for move in moves)
        num_bytes = len(self) * passes * self.count * self.block_bytes
        return Round(num_bytes / seconds, num_bytes, sum(move.cpu_seconds for move in moves))

    def look_up(self, name: str, calls: int, keys: int) -> list[float]:
        """Seconds of each call of the first client."""
        seconds: list[float]
        [seconds] = self._order("look_up", [(name, calls, keys)])
        return seconds

    def close(self) -> None:
        """End the processes. Idempotent."""
        for each in self._clients:
            each.close()

    def _order(self, order: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for each, given in zip(self._clients, arguments, strict=False):
            each.pipe.send((order, given))
        answers = [each.take() for each in self._clients[: len(arguments)]]
        for answer in answers:
            # Others had to give up because this one did.
            if isinstance(answer, Failed) and not answer.words.startswith("BrokenBarrierError"):
                raise WrongWork(answer.words)
        return answers


class Child:
    """A process and the pipe to it."""

    def __init__(self, process: BaseProcess, pipe: Pipe) -> None:
        self.process = process
        self.pipe = pipe

    def take(self) -> Any:
        """Its next answer. Raises WrongWork where none comes."""
        try:
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_EXIT_SECONDS)
            raise WrongWork(f"a process ended with code {self.process.exitcode}") from None
        raise WrongWork(f"a process did not answer in {SECONDS:g} s")

    def close(self) -> None:
        """Idempotent."""
        self.pipe.close()
        self.process.join(_EXIT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(_EXIT_SECONDS)


def start(target: Callable[..., None], *arguments: Any) -> Child:
    """A process that runs `target(pipe, *arguments)`, with the environment of an engine's core."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    with _environment(CORE_ENVIRONMENT):
        process.start()
    theirs.close()
    return Child(process, ours)


@contextlib.contextmanager
def far_ends(target: Callable[..., None], *arguments: Any, clients: int) -> Iterator[list[Any]]:
    """One such process for each client: what each of them says first, and the child."""
    children = [start(target, *arguments) for _ in range(clients)]
    try:
        yield [(child, child.take()) for child in children]
    finally:
        for child in children:
            child.close()


def cpu_seconds(pid: int) -> float:
    """What a process has taken of the processor, in all its threads."""
    return time.clock_gettime(~pid << 3 | _CPU_OF_ALL_THREADS)


@contextlib.contextmanager
def _environment(more: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({**more, **before})
    try:
        yield
    finally:
        for name in more.keys() - before.keys():
            del os.environ[name]
