# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: clients that move blocks concurrently, and far ends of transports.

All processes start before any measurement. A client opens transports, and on an order moves all its
blocks through one transport. Orders and answers are sent through a pipe, and all clients begin a
move at the same time, after a barrier. Waits have deadlines, and an error in any process ends the
run."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple
from unittest.mock import patch

from ...engine.client.launcher import CORE_ENVIRONMENT
from ...tiers.processes.python_command import spawn_context
from ..harness.comparison import WrongWork
from . import transports

_EXIT_SECONDS = 10.0
_CPU_OF_ALL_THREADS = 2  # the constant of clock_getcpuclockid(3)
TRANSPORTS: dict[str, Any] = {
    "copy": transports.CopyTransport,
    "connection": transports.ConnectionTransport,
    "tier": transports.TierTransport,
    "raw": transports.RawTransport,
    "redis": transports.RedisTransport,
    "mooncake": transports.MooncakeTransport,
}


class Moved(NamedTuple):
    """The begin and end of a client's moves (monotonic time), and their processor seconds."""

    began: float
    ended: float
    cpu_seconds: float


def serve(pipe: Pipe, barrier: Any, number: int, block_bytes: int, count: int) -> None:
    """Execute the orders from the pipe until the pipe is closed."""
    try:
        client = _Client(barrier, number, block_bytes, count)
    except Exception as error:  # noqa: BLE001 - the parent is told, whatever it is
        pipe.send(_failed(error))
        return
    while True:
        try:
            order, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = getattr(client, order)(*arguments)
        except Exception as error:  # noqa: BLE001 - the same
            barrier.abort()
            answer = _failed(error)
        pipe.send(answer)


def _failed(error: Exception) -> WrongWork:
    return WrongWork(f"{type(error).__name__}: {error}")


class _Client:
    """A client process; each public method is an order that the parent may send."""

    def __init__(self, barrier: Any, number: int, block_bytes: int, count: int) -> None:
        self._barrier = barrier
        self._random = random.Random(number)
        self._blocks = transports.Blocks(block_bytes, count)
        self._transports: dict[str, transports.Transport] = {}
        self._stamps: dict[str, list[bytes]] = {}

    def ready(self) -> None:
        """Do nothing; the answer means that the client's memory is ready."""

    def open(self, name: str, plan: transports.Plan) -> None:
        """Open a transport and store every block once. If a store fails, close the transport."""
        self._transports[name] = TRANSPORTS[plan.kind](self._blocks, **plan.options)
        try:
            self.move(name, "store", 1)
        except BaseException:
            self.shut(name)
            raise

    def shut(self, name: str) -> None:
        self._transports.pop(name).close()

    def move(self, name: str, verb: str, passes: int) -> Moved:
        """Store or load all blocks `passes` times, each time in another random order."""
        transport, blocks = self._transports[name], self._blocks
        orders = [self._random.sample(range(len(blocks)), len(blocks)) for _ in range(passes)]
        if verb == "store":
            self._stamps[name] = blocks.stamp()
        else:
            blocks.scrub()
        act = getattr(transport, verb)
        self._barrier.wait(transports.SECONDS)
        cpu = time.process_time()
        began = time.monotonic()
        for order in orders:
            act(order)
        moved = Moved(began, time.monotonic(), time.process_time() - cpu)
        if verb == "load":
            blocks.check(self._stamps[name])
        return moved

    def look_up(self, name: str, calls: int, keys: int) -> list[float]:
        """Return the seconds of each look-up of `keys` keys. The transport must be a
        ConnectionTransport."""
        transport = self._transports[name]
        assert isinstance(transport, transports.ConnectionTransport)
        return transport.look_up(calls, keys)


class Round(NamedTuple):
    """The bytes and the seconds of all clients together in a round."""

    bytes_per_second: float
    num_bytes: int
    cpu_seconds: float  # processor seconds of the client processes


class Clients:
    """The processes of all clients, each with `count` blocks."""

    def __init__(self, clients: int, block_bytes: int, count: int) -> None:
        self.count = count
        self.block_bytes = block_bytes
        # The barrier is kept, because clients open its semaphores when they start.
        with spawn_context() as context:
            self._barrier = barrier = context.Barrier(clients)
        self._clients = [
            start(serve, barrier, number, block_bytes, count) for number in range(clients)
        ]
        try:
            self._order("ready", [()] * clients)
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return len(self._clients)

    @contextlib.contextmanager
    def transport(self, name: str, plans: Sequence[transports.Plan]) -> Iterator[None]:
        """Keep a transport open inside the context, with a plan for each client."""
        self._order("open", [(name, plan) for plan in plans])
        yield
        self._order("shut", [(name,)] * len(self))

    def move(self, name: str, verb: str, passes: int) -> Round:
        """Let all clients move their blocks at the same time. Raises WrongWork."""
        moves: list[Moved] = self._order("move", [(name, verb, passes)] * len(self))
        seconds = max(move.ended for move in moves) - min(move.began for move in moves)
        num_bytes = len(self) * passes * self.count * self.block_bytes
        return Round(num_bytes / seconds, num_bytes, sum(move.cpu_seconds for move in moves))

    def look_up(self, name: str, calls: int, keys: int) -> list[float]:
        """Return the seconds of each look-up of `keys` keys by the first client."""
        return list(*self._order("look_up", [(name, calls, keys)]))

    def close(self) -> None:
        """End all client processes. Idempotent."""
        for each in self._clients:
            each.close()

    def _order(self, order: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        for each, given in zip(self._clients, arguments, strict=False):
            each.pipe.send((order, given))
        answers = [each.take() for each in self._clients[: len(arguments)]]
        for answer in answers:
            # A broken barrier is only a consequence of another client's error.
            if isinstance(answer, WrongWork) and not str(answer).startswith("BrokenBarrierError"):
                raise answer
        return answers


class Child:
    """A process, and the pipe to the process."""

    def __init__(self, process: BaseProcess, pipe: Pipe) -> None:
        self.process = process
        self.pipe = pipe

    def take(self) -> Any:
        """Return the process's next answer. Raises WrongWork if there is no answer in time."""
        try:
            if self.pipe.poll(transports.SECONDS):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(_EXIT_SECONDS)
            raise WrongWork(f"a process ended with code {self.process.exitcode}") from None
        raise WrongWork(f"a process did not answer in {transports.SECONDS:g} s")

    def close(self) -> None:
        """End the process. Idempotent."""
        self.pipe.close()
        self.process.join(_EXIT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(_EXIT_SECONDS)


def start(target: Callable[..., None], *arguments: Any) -> Child:
    """Start a process of `target(pipe, *arguments)`, with an engine core's environment."""
    with spawn_context() as context, patch.dict(os.environ, {**CORE_ENVIRONMENT, **os.environ}):
        ours, theirs = context.Pipe()
        process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        process.start()
    theirs.close()
    return Child(process, ours)


@contextlib.contextmanager
def far_ends(target: Callable[..., None], *arguments: Any, clients: int) -> Iterator[list[Any]]:
    """Start a far end for each client; yield all far ends, each with its first answer."""
    children = [start(target, *arguments) for _ in range(clients)]
    try:
        yield [(child, child.take()) for child in children]
    finally:
        for child in children:
            child.close()


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds that a process has used in all its threads."""
    return time.clock_gettime(~pid << 3 | _CPU_OF_ALL_THREADS)
