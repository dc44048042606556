# SPDX-License-Identifier: Apache-2.0
"""Transports that move blocks from a client's memory and back: memcpy, connections, tiers.

For comparison with other software, there are raw sockets with or without TLS, Redis and Mooncake.
Each transport has memory for all blocks of the client and moves any blocks in any order. Raw
sockets are the limit of the host's loopback: each client has a far end, a process with its own warm
memory. Redis is measured over the same kind of sockets, without redis-py, which is slower than
Redis.

    client   verb, count, block indices      far end   the blocks, or a byte after receiving blocks
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import socket
import ssl
import struct
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from ...proto.v1 import cache_service_pb2 as messages
from ...tiers.base import Stored
from ...tiers.block import DIGEST_BYTES, BlockLayout, pack_key
from ...tiers.processes.python_command import python_command
from ...tiers.remote.credentials import Credentials
from ...tiers.remote.membership import ServerAddress, StaticMembership
from ...tiers.remote.remote_settings import RemoteSettings
from ...tiers.remote.remote_store import RemoteStore
from ...tiers.remote.server_link import ServerLink
from ...tiers.slab.shared_memory import SharedMemory
from ...tiers.wire.frames import MAX_BLOCKS, State, pack_keys
from ..harness.comparison import WrongWork
from ..tiers.scale import MIB, layout_of

SECONDS = 120.0  # limit of every wait
_QUEUE_BYTES = 2**40
STAMP_BYTES = 16


class Blocks:
    """Shared memory like an engine's slab, warm and with random bytes. `buffers[i]` is block i, of
    `layout.page_bytes`, at `addresses[i]`. Every block has a stamp at its beginning and end, which
    each store renews, so that a load of nothing, or of another block, is detected."""

    def __init__(self, block_bytes: int, count: int) -> None:
        self.layout: BlockLayout = layout_of(block_bytes)
        size = self.layout.slot_bytes
        shared = SharedMemory(
            "stratakv-bench", count * size, huge_pages=False, threads=1, progress=None
        )
        self._map = shared.map
        os.close(shared.fd)
        whole = memoryview(self._map)
        noise = os.urandom(MIB)
        for start in range(0, len(whole), MIB):
            part = whole[start : start + MIB]
            part[:] = noise[: len(part)]
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.size = len(whole)
        places = range(0, count * size, size)
        self.buffers = [whole[place : place + block_bytes] for place in places]
        self.addresses = [self.base + place for place in places]

    def __len__(self) -> int:
        return len(self.buffers)

    def stamp(self) -> list[bytes]:
        """Write a new stamp to each block; return the stamps."""
        stamps = [os.urandom(STAMP_BYTES) for _ in self.buffers]
        for buffer, stamp in zip(self.buffers, stamps, strict=True):
            buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = stamp
        return stamps

    def scrub(self) -> None:
        """Overwrite all stamps with zeros, so that old stamps are not taken for loaded ones."""
        none = bytes(STAMP_BYTES)
        for buffer in self.buffers:
            buffer[:STAMP_BYTES] = buffer[-STAMP_BYTES:] = none

    def check(self, stamps: Sequence[bytes]) -> None:
        """Raise WrongWork unless each block has its stamp at its beginning and end."""
        for index, (buffer, stamp) in enumerate(zip(self.buffers, stamps, strict=True)):
            if not buffer[:STAMP_BYTES] == buffer[-STAMP_BYTES:] == stamp:
                raise WrongWork(f"block {index} was loaded, but its buffer does not hold it")


@dataclass(frozen=True, slots=True)
class Plan:
    """The transport that a client opens, and its options."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


class Transport(ABC):
    """A method of moving blocks; `order` has block indices. Raises WrongWork for a missing
    block."""

    @abstractmethod
    def store(self, order: Sequence[int]) -> None:
        """Store the blocks of `order` under new keys."""

    @abstractmethod
    def load(self, order: Sequence[int]) -> None:
        """Load the blocks of `order` with the bytes of their last store."""

    def close(self) -> None:  # noqa: B027 - most transports have nothing to close
        """Close the transport. Must be the last call."""


class CopyTransport(Transport):
    """A transport that copies blocks to other memory of the same kind by memcpy."""

    def __init__(self, blocks: Blocks) -> None:
        self._near = blocks
        self._far = Blocks(blocks.layout.page_bytes, len(blocks))
        self._size = blocks.layout.page_bytes

    def store(self, order: Sequence[int]) -> None:
        self._copy(self._far.addresses, self._near.addresses, order)

    def load(self, order: Sequence[int]) -> None:
        self._copy(self._near.addresses, self._far.addresses, order)

    def _copy(self, targets: Sequence[int], sources: Sequence[int], order: Sequence[int]) -> None:
        copy, size = ctypes.memmove, self._size
        for index in order:
            copy(targets[index], sources[index], size)


class ServiceTransport(Transport):
    """The base of transports to a cache server, which stores the key of each block's last store."""

    def __init__(self, blocks: Blocks, kind: str, ca_file: Path | None) -> None:
        self._blocks = blocks
        self._kind = kind
        self._keys = [b""] * len(blocks)
        self._settings = RemoteSettings(
            credentials=Credentials(ca_file=ca_file),
            attach_seconds=SECONDS,
            lookup_seconds=SECONDS,
            load_seconds=SECONDS,
            store_seconds=SECONDS,
            queue_bytes=_QUEUE_BYTES,
            shares_memory=kind == "memory",
        )

    def _renew(self, order: Sequence[int]) -> None:
        for index in order:
            self._keys[index] = pack_key(os.urandom(DIGEST_BYTES))

    def _parts(self, order: Sequence[int]) -> list[tuple[list[bytes], list[memoryview]]]:
        """Return keys and buffers, in the largest parts that the protocol allows."""
        buffers = self._blocks.buffers
        parts = [order[start : start + MAX_BLOCKS] for start in range(0, len(order), MAX_BLOCKS)]
        return [([self._keys[i] for i in part], [buffers[i] for i in part]) for part in parts]

    def _check_kind(self, found: str) -> None:
        """Raise WrongWork if `found`, the client's kind of connection, is not the intended kind: a
        client falls back to a slower kind if the intended kind fails."""
        if found != self._kind:
            raise WrongWork(f"blocks went through {found or 'nothing'}, not {self._kind}")


class ConnectionTransport(ServiceTransport):
    """A transport by a client's connection of one `kind` to a cache server."""

    def __init__(
        self, blocks: Blocks, *, address: ServerAddress, kind: str, ca_file: Path | None = None
    ) -> None:
        super().__init__(blocks, kind, ca_file)
        with ExitStack() as opened:
            self._link = ServerLink(address, blocks.layout, self._settings)
            opened.callback(self._link.close)
            if not self._link.wait_up(SECONDS):
                raise WrongWork(f"{address} cannot be reached")
            self._connection = self._link.connect(time.monotonic() + SECONDS)
            opened.callback(self._connection.close)
            self._check_kind(self._connection.kind)
            self._opened = opened.pop_all()

    def store(self, order: Sequence[int]) -> None:
        self._renew(order)
        for keys, buffers in self._parts(order):
            proofs = [None] * len(keys)
            deadline = time.monotonic() + SECONDS
            states = self._connection.store(keys, buffers, proofs, deadline)
            if states.count(State.KEPT) != len(keys):
                raise WrongWork("the server did not keep every block")

    def load(self, order: Sequence[int]) -> None:
        for keys, buffers in self._parts(order):
            if None in self._connection.load(keys, buffers, time.monotonic() + SECONDS):
                raise WrongWork("the server did not have every block")

    def look_up(self, calls: int, keys: int) -> list[float]:
        """Return the seconds of each call that looks up `keys` keys, which are all stored."""
        wanted = self._keys[:keys]
        states = bytes([State.HIT]) * keys
        seconds = []
        for _ in range(calls):
            began = time.perf_counter()
            request = messages.LookupRequest(keys=pack_keys(wanted))
            response = self._link.call_server("lookup", request, SECONDS)
            seconds.append(time.perf_counter() - began)
            if response.prefix != keys or response.states != states:
                raise WrongWork("the server did not find every block")
        return seconds

    def close(self) -> None:
        self._opened.close()


class TierTransport(ServiceTransport):
    """A transport by an engine's tier on a cache server, over the best possible connection."""

    def __init__(self, blocks: Blocks, *, address: ServerAddress) -> None:
        super().__init__(blocks, "memory", None)
        self._tier = RemoteStore(StaticMembership([address]), blocks.layout, self._settings)
        if not self._tier.wait_up(SECONDS):
            self._tier.close(SECONDS)
            raise WrongWork(f"{address} cannot be reached")

    def store(self, order: Sequence[int]) -> None:
        self._renew(order)
        for stored in [self._tier.store(*part) for part in self._parts(order)]:
            if any(outcome is not Stored.KEPT for outcome in stored.result(SECONDS)):
                raise WrongWork("the server did not keep every block")
        self._check_kind(",".join(self._tier.kinds()))

    def load(self, order: Sequence[int]) -> None:
        for loaded in [self._tier.load(*part) for part in self._parts(order)]:
            if None in loaded.result(SECONDS):
                raise WrongWork("the server did not have every block")
        self._check_kind(",".join(self._tier.kinds()))

    def close(self) -> None:
        self._tier.close(SECONDS)


_HEAD = struct.Struct("<BI")
_LOAD, _STORE = 1, 2
_DONE = b"k"


class RawTransport(Transport):
    """A transport by a raw socket, with or without TLS: the client's end."""

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


def serve_raw(pipe: Pipe, block_bytes: int, count: int, files: tuple[Path, Path] | None) -> None:
    """Run the far end of one client until it disconnects. `files` are certificate and key."""
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
    """Set the options of the service's own sockets: no timeout, no delay."""
    sock.settimeout(None)  # with a timeout, MSG_WAITALL would not wait
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def receive(sock: Any, view: memoryview, is_tls: bool) -> None:
    """Fill `view` from the socket. Raises EOFError if the peer has disconnected."""
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


AHEAD = 8  # commands sent before their replies are read
_OK = b"+OK\r\n"
_END = b"\r\n"


class RedisTransport(Transport):
    """A transport by a Redis connection: the client's end. `prefix` separates clients' keys."""

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
    """Return the reason why Mooncake cannot be measured on this machine; "" if there is none."""
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake-transfer-engine-non-cuda is not installed"
    # Mooncake is imported in another process, because the import may fail for missing libraries.
    done = subprocess.run(
        python_command("-c", "import mooncake.engine"),
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    return "" if not done.returncode else f"it cannot be imported: {done.stderr[-200:].strip()}"


class MooncakeTransport(Transport):
    """A transport by Mooncake's transfer engine over TCP: the client's end. Blocks move between
    registered memory of two processes, all blocks of a call in one batch. `target` and `addresses`
    are those of the far end, which only provides memory."""

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
    """Run the far end of Mooncake until the parent ends the process."""
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
