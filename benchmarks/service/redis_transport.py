# SPDX-License-Identifier: Apache-2.0
"""Redis over raw sockets: GET and SET of whole blocks, many commands on their way at once.

The client is ours, for redis-py is slower than the server.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ..harness.comparison import WrongWork
from .blocks import Blocks
from .raw_transport import prepare, receive
from .transports import SECONDS, Transport

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
