# SPDX-License-Identifier: Apache-2.0
"""Connection: a connected socket with deadlines, which receives exact lengths and sends whole
buffers, without copies. On a plain socket the kernel waits for the whole length (`MSG_WAITALL`),
and one call sends many buffers; TLS moves records of 16 KiB. A call ends at its deadline, even if
the peer is slow."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence

from ..native.native_library import (
    PeerLeft,
    has_digests,
    receive_and_digest,
    send_payloads,
    send_proven,
)

_TIMEVAL = struct.Struct("ll")
_LEAST_SECONDS = 0.001  # a timeout of zero would not wait
_MOST_BUFFERS = 256  # of one sendmsg; the kernel's limit is 1,024
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class ConnectionLost(Exception):
    """The peer is gone or too slow, so that the connection cannot be used any more."""


class Connection:
    """A connected socket, which `close` closes. A call raises ConnectionLost if it fails or if its
    `deadline` (monotonic seconds) passes. Only one thread calls the methods, except `abort`."""

    def __init__(self, sock: socket.socket | ssl.SSLSocket) -> None:
        self._sock = sock
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._plain: socket.socket = sock  # not an SSLSocket, which has no sendmsg
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
        if not self._is_tls:
            sock.settimeout(None)  # MSG_WAITALL needs the kernel's own timeouts

    def receive(self, size: int, deadline: float) -> bytes:
        buffer = bytearray(size)
        self.receive_into(memoryview(buffer), deadline)
        return bytes(buffer)

    def receive_into(self, view: memoryview, deadline: float) -> None:
        self.receive_all([view], deadline)

    def receive_all(self, views: list[memoryview], deadline: float) -> None:
        """Receive bytes until all views are full, in order. Empties the list `views`."""
        _drop(views, 0)  # drop empty views, which need no wait
        while views:
            self._set_timeout(deadline, socket.SO_RCVTIMEO)
            try:
                if self._is_tls:
                    got = self._sock.recv_into(views[0])
                else:
                    got = self._plain.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
            except OSError as error:
                if _is_early(error, deadline):
                    continue
                raise _lost(error, "sent") from error
            if not got:
                raise ConnectionLost("the peer closed the connection")
            _drop(views, got)

    @property
    def can_digest(self) -> bool:
        """Whether the next four methods work, which need the library and a socket without TLS."""
        return not self._is_tls and has_digests()

    def receive_and_digest(
        self,
        payloads: Sequence[memoryview],
        trailer_bytes: int,
        deadline: float,
        arrived: list[tuple[bytes, bytes]],
    ) -> None:
        """Fill payloads of one length, LEAST_BYTES or more, in one call. Append trailer and digest
        of each complete payload to `arrived`, even if a later one fails."""
        came = receive_and_digest(self._sock.fileno(), payloads, trailer_bytes, deadline)
        arrived += zip(came.trailers, came.digests, strict=True)
        if came.lost is not None:
            # The error is in no variable, which would keep this frame and views of buffers alive.
            raise _lost(came.lost, "sent")

    def receive_named(
        self, payloads: Sequence[memoryview], names: bytes, trailer_bytes: int, deadline: float
    ) -> tuple[list[bytes], list[bytes], list[bytes]]:
        """Fill payloads as `receive_and_digest` does. Return their digests, the tags made from
        `names` and the digests, and the trailers that the peer sent."""
        came = receive_and_digest(self._sock.fileno(), payloads, trailer_bytes, deadline, names)
        if came.lost is not None:
            raise _lost(came.lost, "sent")
        return came.digests, came.tags, came.trailers

    def send_payloads(
        self, head: bytes, payloads: Sequence[memoryview], trailers: bytes, deadline: float
    ) -> None:
        """Send `head`, then writable payloads of one length, each with its part of `trailers`."""
        try:
            send_payloads(self._sock.fileno(), head, payloads, trailers, deadline)
        except OSError as error:
            raise _lost(error, "took") from None

    def send_proven(
        self,
        payloads: Sequence[memoryview],
        names: bytes,
        digests: Sequence[bytes | None],
        deadline: float,
    ) -> list[int]:
        """Send payloads of one length, LEAST_BYTES or more, each followed by its tag and digest
        (see `native_library.send_proven`). Return the positions of payloads whose digest differs
        from `digests`. The payloads must be writable."""
        try:
            return send_proven(self._sock.fileno(), payloads, names, digests, deadline)
        except OSError as error:
            raise _lost(error, "took") from None

    def send(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send the buffers in order."""
        if self._is_tls:
            self._send_tls(buffers, deadline)
            return
        for first in range(0, len(buffers), _MOST_BUFFERS):
            views = [memoryview(buffer) for buffer in buffers[first : first + _MOST_BUFFERS]]
            while views:
                self._set_timeout(deadline, socket.SO_SNDTIMEO)
                try:
                    sent = self._plain.sendmsg(views)
                except OSError as error:
                    if _is_early(error, deadline):
                        continue
                    raise _lost(error, "took") from error
                _drop(views, sent)

    def wait_readable(self, deadline: float, also: int | None = None) -> bool:
        """Wait until data arrives, the peer closes the connection, the descriptor `also` is
        readable or the deadline passes. Return True for data and for a closed connection."""
        if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
            return True
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            if also is not None:
                poll.register(also, select.POLLIN)
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            return any(fd != also for fd, _ in ready)
        except (OSError, ValueError) as error:
            raise ConnectionLost("the connection was closed") from error

    def receive_fd(self, size: int, deadline: float) -> tuple[bytes, int | None]:
        """Receive `size` bytes and a descriptor (or None); the caller closes it. Unix only."""
        self._set_timeout(deadline, socket.SO_RCVTIMEO)
        try:
            raw, fds, _, _ = socket.recv_fds(self._sock, size, 1, socket.MSG_WAITALL)
        except OSError as error:
            if _is_early(error, deadline):
                return self.receive_fd(size, deadline)
            raise _lost(error, "sent") from error
        if len(raw) != size:
            for fd in fds:
                socket.close(fd)
            raise ConnectionLost("the peer closed the connection")
        return raw, fds[0] if fds else None

    def send_fd(self, data: bytes, fd: int, deadline: float) -> None:
        """Send `data` together with a file descriptor. Unix sockets only."""
        self._set_timeout(deadline, socket.SO_SNDTIMEO)
        try:
            if socket.send_fds(self._sock, [data], [fd]) != len(data):
                raise ConnectionLost("the peer took only part of the first words")
        except OSError as error:
            raise _lost(error, "took") from error

    def abort(self) -> None:
        """Make running and later calls raise ConnectionLost. Any thread may call this method."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _send_tls(self, buffers: Sequence[memoryview | bytes], deadline: float) -> None:
        for buffer in buffers:
            self._set_timeout(deadline, 0)
            try:
                self._sock.sendall(buffer)
            except OSError as error:
                raise _lost(error, "took") from error

    def _set_timeout(self, deadline: float, option: int) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ConnectionLost("the deadline passed")
        micros = max(1, int(left * 1e6))
        timeout = _TIMEVAL.pack(*divmod(micros, 1_000_000))
        try:
            if self._is_tls:
                self._sock.settimeout(left)
            else:
                self._sock.setsockopt(socket.SOL_SOCKET, option, timeout)
        except OSError as error:
            raise ConnectionLost("the connection was closed") from error


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first address of `host` that accepts before the deadline. The timeout of the
    returned socket is the remaining time. Raises OSError."""
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(infos, 1):
        sock = socket.socket(family, kind, protocol)
        try:
            # Each address gets a share of the time, in case an address drops packets.
            left = max(_LEAST_SECONDS, deadline - time.monotonic())
            sock.settimeout(left / (len(infos) - number + 1))
            sock.connect(address)
            sock.settimeout(max(_LEAST_SECONDS, deadline - time.monotonic()))
        except BaseException as error:
            sock.close()
            if number < len(infos) and isinstance(error, OSError):
                continue
            raise
        return sock
    raise OSError(f"{host} has no address")


def _drop(views: list[memoryview], size: int) -> None:
    """Remove the first `size` bytes from `views`, and then empty views at the front."""
    while views and size >= views[0].nbytes:
        size -= views.pop(0).nbytes
    if size:
        views[0] = views[0][size:]


def _is_early(error: OSError, deadline: float) -> bool:
    """Whether a call timed out too early. The kernel counts timeouts in ticks of up to 10 ms, the
    first of which may end at once."""
    return isinstance(error, BlockingIOError) and time.monotonic() < deadline


def _lost(error: OSError, verb: str) -> ConnectionLost:
    if isinstance(error, PeerLeft):
        return ConnectionLost(str(error))
    if isinstance(error, TimeoutError | BlockingIOError):
        return ConnectionLost(f"the peer {verb} too little before the deadline")
    return ConnectionLost(f"the connection broke: {error}")
