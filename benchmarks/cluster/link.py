# SPDX-License-Identifier: Apache-2.0
"""A link of a known rate between two processes on one machine: a TCP relay in its own process.

The relay listens at 127.0.0.2, at the same ports as the server at 127.0.0.1, so that connections to
ports which a server reports to its clients also go through the link. In each direction all
connections share one token bucket. Another process sends bare bytes, whose time through the link is
the limit for all other traffic through the link."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from ..harness.peer import Child, answerer
from ..harness.served import HOST, free_ports

LINK_HOST = "127.0.0.2"
PIECE_BYTES = 64 * 1024
_START_SECONDS = 30.0
# Unused time up to this length may be used later, so that a late wake-up does not lower the rate.
_BURST_SECONDS = 0.004
_COUNT_BYTES = 8
_BITS = 8


class Link:
    """The relay to `ports` and the byte source; a context manager. `bits_per_second` limits each
    direction; 0 means no limit."""

    def __init__(self, ports: Sequence[int], scratch: Path, bits_per_second: float = 0) -> None:
        [self._source_port] = free_ports(1)
        module = f"{__package__}.link"
        source = ["-m", module, "source", str(self._source_port)]
        relay = ["-m", module, "relay", *map(str, (*ports, self._source_port))]
        with ExitStack() as starting:
            self._source = starting.enter_context(Child(source, scratch / "source.log", "source"))
            self._relay = starting.enter_context(Child(relay, scratch / "relay.log", "relay"))
            self._source.read(_START_SECONDS)
            self._relay.read(_START_SECONDS)
            self._stack = starting.pop_all()
        self.set_rate(bits_per_second)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set_rate(self, bits_per_second: float) -> None:
        """Limit each direction to `bits_per_second` from now on; 0 means no limit."""
        self.bits_per_second = bits_per_second
        self._relay.send({"bits_per_second": bits_per_second})
        self._relay.read(_START_SECONDS)

    def bare_seconds(self, num_bytes: int) -> float:
        """Return the seconds of `num_bytes` through the link on one connection, from the request to
        the last byte. Raises OSError."""
        memory = memoryview(bytearray(PIECE_BYTES))
        with socket.create_connection((LINK_HOST, self._source_port), _START_SECONDS) as sock:
            began = time.perf_counter()
            sock.sendall(num_bytes.to_bytes(_COUNT_BYTES, "little"))
            left = num_bytes
            while left:
                got = sock.recv_into(memory[: min(left, PIECE_BYTES)])
                if not got:
                    raise ConnectionError(f"the source ended {left} bytes early")
                left -= got
            return time.perf_counter() - began


class Bucket:
    """The token bucket of one direction. A thread takes bytes before it sends them."""

    def __init__(self) -> None:
        self.bytes_per_second = 0.0
        self._lock = threading.Lock()
        self._free_at = 0.0  # monotonic time at which all bytes taken so far are sent

    def take(self, num_bytes: int) -> None:
        """Wait until the rate allows sending `num_bytes` more bytes."""
        with self._lock:
            if not self.bytes_per_second:
                return
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _BURST_SECONDS)
            self._free_at += num_bytes / self.bytes_per_second
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


def _pump(source: socket.socket, sink: socket.socket, bucket: Bucket) -> None:
    memory = memoryview(bytearray(PIECE_BYTES))
    with suppress(OSError):
        while count := source.recv_into(memory):
            bucket.take(count)
            sink.sendall(memory[:count])
    for sock, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with suppress(OSError):
            sock.shutdown(how)


def _carry(near: socket.socket, port: int, up: Bucket, down: Bucket) -> None:
    """Relay one connection until both sides have closed it."""
    with near:
        try:
            far = socket.create_connection((HOST, port), _START_SECONDS)
        except OSError:
            return
        with far:
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(far, near, down), daemon=True)
            back.start()
            _pump(near, far, up)
            back.join()


def _send_bytes(sock: socket.socket) -> None:
    noise = memoryview(os.urandom(PIECE_BYTES))
    with sock, suppress(OSError):
        left = int.from_bytes(sock.recv(_COUNT_BYTES, socket.MSG_WAITALL), "little")
        while left:
            left -= sock.send(noise[: min(left, PIECE_BYTES)])
        sock.recv(1)  # returns when the other side has read all bytes


def _accept(listener: socket.socket, serve: Callable[..., None], *more: Any) -> None:
    while True:
        sock, _ = listener.accept()
        threading.Thread(target=serve, args=(sock, *more), daemon=True).start()


def main() -> int:
    """Run the child process: listen, report readiness, and set rates until standard input ends."""
    tell = answerer()
    kind, *ports = sys.argv[1:]
    up, down = Bucket(), Bucket()
    for port in map(int, ports):
        listener = socket.create_server((LINK_HOST if kind == "relay" else HOST, port))
        args = (listener, _carry, port, up, down) if kind == "relay" else (listener, _send_bytes)
        threading.Thread(target=_accept, args=args, daemon=True).start()
    tell({"ready": True})
    for line in sys.stdin:
        for bucket in (up, down):
            bucket.bytes_per_second = json.loads(line)["bits_per_second"] / _BITS
        tell({"ready": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
