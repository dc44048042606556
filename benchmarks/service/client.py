# SPDX-License-Identifier: Apache-2.0
"""A client's process: opens transports, and moves all its blocks through one when told to.

Orders and answers go through a pipe; clients begin a move together, at a barrier.
"""

from __future__ import annotations

import random
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any, NamedTuple

from .blocks import Blocks
from .mooncake_transport import MooncakeTransport
from .raw_transport import RawTransport, RedisTransport
from .transports import (
    SECONDS,
    ConnectionTransport,
    CopyTransport,
    Plan,
    TierTransport,
    Transport,
)

TRANSPORTS: dict[str, Any] = {
    "copy": CopyTransport,
    "connection": ConnectionTransport,
    "tier": TierTransport,
    "raw": RawTransport,
    "redis": RedisTransport,
    "mooncake": MooncakeTransport,
}


class Moved(NamedTuple):
    """When a client moved its blocks (monotonic), and what that took of the processor."""

    began: float
    ended: float
    cpu_seconds: float


class Failed(NamedTuple):
    """An order that went wrong."""

    words: str


def serve(pipe: Pipe, barrier: Any, number: int, block_bytes: int, count: int) -> None:
    """Do what comes through the pipe until it is closed."""
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


def _failed(error: Exception) -> Failed:
    return Failed(f"{type(error).__name__}: {error}")


class _Client:
    """The orders that a parent may give."""

    def __init__(self, barrier: Any, number: int, block_bytes: int, count: int) -> None:
        self._barrier = barrier
        self._random = random.Random(number)
        self._blocks = Blocks(block_bytes, count)
        self._transports: dict[str, Transport] = {}
        self._stamps: dict[str, list[bytes]] = {}

    def ready(self) -> None:
        """Said when the memory is there."""

    def open(self, name: str, plan: Plan) -> None:
        """Open a transport, and store every block once; where that fails it is closed again."""
        self._transports[name] = TRANSPORTS[plan.kind](self._blocks, **plan.options)
        try:
            self.move(name, "store", 1)
        except BaseException:
            self.shut(name)
            raise

    def shut(self, name: str) -> None:
        """Close a transport."""
        self._transports.pop(name).close()

    def move(self, name: str, verb: str, passes: int) -> Moved:
        """Store or load all blocks so many times, each time in another order."""
        transport, blocks = self._transports[name], self._blocks
        orders = [self._random.sample(range(len(blocks)), len(blocks)) for _ in range(passes)]
        if verb == "store":
            self._stamps[name] = blocks.stamp()
        else:
            blocks.scrub()
        act = getattr(transport, verb)
        self._barrier.wait(SECONDS)
        cpu = time.process_time()
        began = time.monotonic()
        for order in orders:
            act(order)
        moved = Moved(began, time.monotonic(), time.process_time() - cpu)
        if verb == "load":
            blocks.check(self._stamps[name])
        return moved

    def look_up(self, name: str, calls: int, keys: int) -> list[float]:
        """Seconds of each call."""
        transport = self._transports[name]
        assert isinstance(transport, ConnectionTransport)
        return transport.look_up(calls, keys)
