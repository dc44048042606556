# SPDX-License-Identifier: Apache-2.0
"""What others do between two processes: raw sockets, with TLS or without, Redis and Mooncake.

    client   verb, count, numbers of blocks      far end   the blocks, or (having got them) a byte

Raw sockets are the most that the host's loopback does: one far end for each client, in a process of
its own, with warm memory of its own. Redis is measured over the same sockets: redis-py is slower
than the server.
"""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import ssl
import struct
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from ..harness.comparison import WrongWork
from .transports import SECONDS, Blocks, Transport

_HEAD = struct.Struct("<BI")
_LOAD, _STORE = 1, 2
_DONE = b"k"


class RawTransport(Transport):
    """The client's end."""

    def __init__(self, blocks: Blocks, *, port: int, ca_file: Path | None = None) -> None:
        self._blocks = blocks
        self._sock: Any = socket.create_connection(("127.0.0.1", port), SECONDS)
        self._is_tls = ca_file is not None
        if ca_file is not None:
            context = ssl.create_default_context(cafile=ca_file)
            self._sock = context.wrap_socket(self._sock, server_hostname="127.0.0.1")
        prepare(self._sock)

    def store(self, order: Sequence[int]) -> None:
        self._ask(_STORE, order)
        for index in order:
            self._sock.sendall(self._blocks.buffers[index])
        receive(self._sock, memoryview(bytearray(len(_DONE))), self._is_tls)

    def load(self, order: Sequence[int]) -> None:
        self._ask(_LOAD, order)
        for index in order:
            receive(self._sock, self._blocks.buffers[index], self._is_tls)

    def close(self) -> None:
        self._sock.close()

    def _ask(self, verb: int, order: Sequence[int]) -> None:
        self._sock.sendall(_HEAD.pack(verb, len(order)) + struct.pack(f"<{len(order)}I", *order))


def serve(pipe: Pipe, block_bytes: int, count: int, files: tuple[Path, Path] | None) -> None:
    """The far end's process: one client, until it leaves. `files` are certificate and key."""
    blocks = Blocks(block_bytes, count)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(SECONDS)
        pipe.send(listener.getsockname()[1])
        sock: Any = listener.accept()[0]
    if files is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*files)
        sock = context.wrap_socket(sock, server_side=True)
    prepare(sock)
    with sock, contextlib.suppress(EOFError):
        while True:
            _answer(sock, blocks, files is not None)


def prepare(sock: socket.socket) -> None:
    """As the service has its own."""
    sock.settimeout(None)  # with a timeout MSG_WAITALL does not wait
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(sock: Any, view: memoryview, is_tls: bool) -> None:
    """Fill `view`. Raises EOFError where the peer has left."""
    while view.nbytes:
        got = sock.recv_into(view) if is_tls else sock.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            raise EOFError("the other end has left")
        view = view[got:]


def _answer(sock: Any, blocks: Blocks, is_tls: bool) -> None:
    head = bytearray(_HEAD.size)
    receive(sock, memoryview(head), is_tls)
    verb, count = _HEAD.unpack(head)
    raw = bytearray(4 * count)
    receive(sock, memoryview(raw), is_tls)
    order = struct.unpack(f"<{count}I", raw)
    if verb == _LOAD:
        for index in order:
            sock.sendall(blocks.buffers[index])
        return
    for index in order:
        receive(sock, blocks.buffers[index], is_tls)
    sock.sendall(_DONE)


AHEAD = 8  # commands that are sent before their replies are read
_OK = b"+OK\r\n"
_END = b"\r\n"


class RedisTransport(Transport):
    """The client's end. `prefix` keeps the keys of clients apart."""

    def __init__(self, blocks: Blocks, *, port: int, prefix: str) -> None:
        self._blocks = blocks
        self._sock = socket.create_connection(("127.0.0.1", port), SECONDS)
        prepare(self._sock)
        size = blocks.layout.page_bytes
        keys = [f"{prefix}:{index:08}".encode() for index in range(len(blocks))]
        named = [b"$%d\r\n%b\r\n" % (len(key), key) for key in keys]
        self._gets = [b"*2\r\n$3\r\nGET\r\n" + key for key in named]
        self._sets = [b"*3\r\n$3\r\nSET\r\n%b$%d\r\n" % (key, size) for key in named]
        self._head = b"$%d\r\n" % size

    def store(self, order: Sequence[int]) -> None:
        for start in range(0, len(order), AHEAD):
            part = order[start : start + AHEAD]
            for index in part:
                self._send([self._sets[index], self._blocks.buffers[index], _END])
            self._expect(_OK * len(part))

    def load(self, order: Sequence[int]) -> None:
        for start in range(0, len(order), AHEAD):
            part = order[start : start + AHEAD]
            self._send([self._gets[index] for index in part])
            for index in part:
                self._expect(self._head)
                receive(self._sock, self._blocks.buffers[index], False)
                self._expect(_END)

    def close(self) -> None:
        self._sock.close()

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        sent = self._sock.sendmsg(parts)
        for part in parts:
            if sent < len(part):
                self._sock.sendall(memoryview(part)[sent:])
            sent = max(0, sent - len(part))

    def _expect(self, words: bytes) -> None:
        got = bytearray(len(words))
        receive(self._sock, memoryview(got), False)
        if got != words:
            raise WrongWork(f"redis answered {bytes(got)!r}, not {words!r}")


def why_no_mooncake() -> str:
    """Why Mooncake cannot be measured here; empty if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    # Apart, for it may want libraries that are not here.
    done = subprocess.run(
        [sys.executable, "-c", "import mooncake.engine"],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    return "" if not done.returncode else f"it cannot be imported: {done.stderr[-200:].strip()}"


class MooncakeTransport(Transport):
    """The client's end of Mooncake's transfer engine over TCP: blocks between registered memory of
    two processes, all of a call as one batch. `target` and `addresses` are the far end's, which
    does nothing but hold memory."""

    def __init__(self, blocks: Blocks, *, target: str, addresses: list[int]) -> None:
        self._engine = _mooncake(blocks)
        self._target = target
        self._near = blocks.addresses
        self._far = addresses
        self._size = blocks.layout.page_bytes

    def store(self, order: Sequence[int]) -> None:
        self._move(self._engine.batch_transfer_sync_write, order)

    def load(self, order: Sequence[int]) -> None:
        self._move(self._engine.batch_transfer_sync_read, order)

    def _move(self, move: Any, order: Sequence[int]) -> None:
        near = [self._near[index] for index in order]
        far = [self._far[index] for index in order]
        if move(self._target, near, far, [self._size] * len(order)):
            raise WrongWork("mooncake did not move the blocks")


def serve_mooncake(pipe: Pipe, block_bytes: int, count: int) -> None:
    """The far end's process, until the parent has had enough."""
    blocks = Blocks(block_bytes, count)
    engine = _mooncake(blocks)
    pipe.send((f"127.0.0.1:{engine.get_rpc_port()}", blocks.addresses))
    with contextlib.suppress(EOFError):
        pipe.recv()


def _mooncake(blocks: Blocks) -> Any:
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""):
        raise WrongWork("mooncake's transfer engine did not start")
    if engine.register_memory(blocks.base, blocks.size):
        raise WrongWork("mooncake did not take the memory")
    return engine
