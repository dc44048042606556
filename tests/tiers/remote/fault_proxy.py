# SPDX-License-Identifier: Apache-2.0
"""A proxy that does to connections what networks do to them, at the word of a test.

    with FaultProxy(("127.0.0.2", port), ("127.0.0.1", port), seed=1) as proxy:
        proxy.freeze(), proxy.thaw()     nothing moves for a while, then all of it does
        proxy.swallow(True)              new connections are taken and never answered
        proxy.vanish()                   those there are stay open and say nothing any more
        proxy.reset()                    those there are end with RST
        proxy.pace(bytes, seconds)       so much at a time, so long apart; `pace()`: at once
        proxy.refuse(True)               nobody listens
        proxy.damage = Damage(...)       chunks are changed on their way

The second address of the loopback lets a client believe that everything it is told to connect to is
on the proxy's host.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from stratakv.tiers.wire.frames import GREETING, WELCOME

_READ_BYTES = 65536
_WAIT_SECONDS = 30.0
_RST = struct.pack("ii", 1, 0)  # SO_LINGER: on, for no time

KINDS = ("flip", "drop", "duplicate", "reorder", "truncate")
Address = tuple[str, int] | str


@dataclass
class Damage:
    """Of every `one_in` chunks of up to `chunk_bytes` one is damaged. Chunks are those of one
    direction of one connection."""

    rng: random.Random
    one_in: float
    kinds: Sequence[str] = KINDS
    chunk_bytes: int = 1500
    done: collections.Counter[str] = field(default_factory=collections.Counter)

    def pass_on(self, data: bytes, held: list[bytes]) -> bytes:
        """What becomes of `data`; `held` keeps what comes later than it should."""
        result = []
        start = 0
        while start < len(data):
            size = self.rng.randint(1, self.chunk_bytes)
            result += self._chunk(data[start : start + size], held)
            start += size
        return b"".join(result)

    def _chunk(self, chunk: bytes, held: list[bytes]) -> list[bytes]:
        late = [held.pop()] if held else []
        if self.rng.random() * self.one_in >= 1:
            return [chunk, *late]
        kind = self.rng.choice(self.kinds)
        self.done[kind] += 1
        if kind == "flip":
            changed = bytearray(chunk)
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
            return [bytes(changed), *late]
        if kind == "drop":
            return late
        if kind == "duplicate":
            return [chunk, chunk, *late]
        if kind == "truncate":
            return [chunk[: self.rng.randrange(len(chunk))], *late]
        held.append(chunk)
        return late


@dataclass(eq=False)
class _Link:
    """Both ends of one connection."""

    client: socket.socket
    server: socket.socket | None = None
    is_mute: bool = False

    def close(self, reset: bool) -> None:
        for sock in (self.client, self.server):
            if sock is not None:
                with contextlib.suppress(OSError):
                    if reset and sock.family == socket.AF_INET:
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
                    sock.close()


class FaultProxy:
    """Listens at one address (a port, or a path of a Unix socket) for another."""

    def __init__(self, listen: Address, target: Address) -> None:
        self.address = listen
        self.target = target
        self.damage: Damage | None = None
        self.num_connections = 0  # that ever came
        self._links: dict[_Link, list[asyncio.Task[None]]] = {}
        self._swallows = False
        self._pace = (0, 0.0)
        self._listener: socket.socket | None = None
        self._acceptor: asyncio.Task[None] | None = None
        self._loop = asyncio.new_event_loop()
        self._moving = asyncio.Event()
        self._moving.set()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        self._do(self._listen)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def freeze(self) -> None:
        """Hold everything that comes."""
        self._do(self._moving.clear)

    def thaw(self) -> None:
        """Let go of it."""
        self._do(self._moving.set)

    def swallow(self, on: bool) -> None:
        """Take new connections, and never answer them, not even after this ends."""
        self._swallows = on

    def vanish(self) -> None:
        """Nothing more comes out of the connections that there are, and nothing ends them."""

        def mute() -> None:
            for link in self._links:
                link.is_mute = True

        self._do(mute)

    def black_hole(self, on: bool) -> None:
        """Nothing gets through, and nothing comes back."""
        self.swallow(on)
        if on:
            self.freeze()
        else:
            self.thaw()

    def leave(self) -> None:
        """Nobody listens any more, and no connection is left."""
        self.refuse(True)
        self.reset()

    def reset(self) -> None:
        """End the connections that there are with RST."""

        def end() -> None:
            for link, tasks in list(self._links.items()):
                for task in tasks:
                    task.cancel()
                link.close(reset=True)
            self._links.clear()

        self._do(end)

    def pace(self, num_bytes: int = 0, seconds: float = 0.0) -> None:
        """So many bytes at a time (0: all there are), each so many seconds after the last."""
        self._pace = num_bytes, seconds

    def refuse(self, on: bool) -> None:
        """Do not listen, or listen again."""
        self._do(self._stop_listening if on else self._listen)

    def close(self) -> None:
        """Idempotent."""
        if not self._thread.is_alive():
            return

        async def end() -> None:
            self._stop_listening()
            tasks = [task for of_link in self._links.values() for task in of_link]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for link in self._links:
                link.close(reset=False)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(_WAIT_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_WAIT_SECONDS)
        self._loop.close()
        if isinstance(self.address, str):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _do(self, work: Callable[[], None]) -> None:
        """On the loop, and wait for it."""

        async def on_loop() -> None:
            work()

        asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result(_WAIT_SECONDS)

    def _listen(self) -> None:
        if self._listener is not None:
            return
        is_path = isinstance(self.address, str)
        listener = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
        if not is_path:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(self.address)
        listener.listen(1024)
        listener.setblocking(False)
        if not isinstance(self.address, str):
            self.address = listener.getsockname()
        self._listener = listener
        self._acceptor = self._loop.create_task(self._accept(listener))

    def _stop_listening(self) -> None:
        if self._listener is not None and self._acceptor is not None:
            self._acceptor.cancel()
            self._listener.close()
            self._listener = None

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            client, _ = await self._loop.sock_accept(listener)
            client.setblocking(False)
            self.num_connections += 1
            link = _Link(client, is_mute=self._swallows)
            self._links[link] = []
            self._begin(link, self._serve(link))

    def _begin(self, link: _Link, work: Coroutine[Any, Any, None]) -> None:
        self._links[link].append(self._loop.create_task(work))

    async def _serve(self, link: _Link) -> None:
        """Connect the other end, then pump one direction; the other has a task of its own."""
        if link.is_mute:
            await self._drain(link.client)
            return
        is_path = isinstance(self.target, str)
        server = socket.socket(socket.AF_UNIX if is_path else socket.AF_INET)
        server.setblocking(False)
        link.server = server
        try:
            await self._moving.wait()
            await self._loop.sock_connect(server, self.target)
            if is_path:
                await asyncio.to_thread(_introduce, link.client, server)
        except OSError:
            self._end(link, reset=True)
            return
        for sock in (link.client, server):
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._begin(link, self._pump(link, server, link.client))
        await self._pump(link, link.client, server)

    async def _pump(self, link: _Link, source: socket.socket, target: socket.socket) -> None:
        held: list[bytes] = []
        try:
            while True:
                size, pause = self._pace
                data = await self._loop.sock_recv(source, size or _READ_BYTES)
                if link.is_mute:
                    await self._drain(source)
                    return
                if not data:
                    break
                if pause:
                    await self._pause(pause)
                await self._moving.wait()
                if link.is_mute:
                    continue
                if self.damage is not None:
                    data = self.damage.pass_on(data, held)
                await self._loop.sock_sendall(target, data)
        except OSError:
            if not link.is_mute:
                self._end(link, reset=True)
            return
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    async def _pause(self, seconds: float) -> None:
        """As long as the pace is what it was."""
        pace = self._pace
        end = self._loop.time() + seconds
        while self._pace == pace and self._loop.time() < end:
            await asyncio.sleep(min(0.01, seconds))

    async def _drain(self, source: socket.socket) -> None:
        """Take what comes, for nobody. The connection stays as it is after its end too."""
        with contextlib.suppress(OSError):
            while await self._loop.sock_recv(source, _READ_BYTES):
                pass

    def _end(self, link: _Link, *, reset: bool) -> None:
        for task in self._links.pop(link, []):
            if task is not asyncio.current_task():
                task.cancel()
        link.close(reset)


def _introduce(client: socket.socket, server: socket.socket) -> None:
    """The first words of a Unix socket, with the descriptor that comes beside the welcome."""
    for sock in (client, server):
        sock.settimeout(_WAIT_SECONDS)
    server.sendall(client.recv(GREETING.size, socket.MSG_WAITALL))
    welcome, fds, _, _ = socket.recv_fds(server, WELCOME.size, 1, socket.MSG_WAITALL)
    socket.send_fds(client, [welcome], fds)
    for fd in fds:
        os.close(fd)
    for sock in (client, server):
        sock.setblocking(False)
