# SPDX-License-Identifier: Apache-2.0
"""gRPC calls by hand, for what no client library would send: calls that never go on, lengths that
are lies, streams without end.

    with RawConnection(("127.0.0.1", port)) as connection:
        stream = connection.call("/stratakv.cache.v1.CacheService/Lookup", token)
        connection.message(stream, b"...", length=2**30)

Reads nothing but to learn whether the server has ended the connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4
_END_STREAM, _END_HEADERS = 1, 4
_MOST_FRAME_BYTES = 16384
_SECONDS = 5.0


class RawConnection:
    """One connection, without TLS."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.sock = socket.create_connection(address, _SECONDS)
        self._stream = -1
        self.sock.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b""))

    def __enter__(self) -> RawConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def call(self, path: str, token: str | None = None) -> int:
        """Begin a call; the number of its stream. Nothing but its headers is sent."""
        self._stream += 2
        headers = [
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ]
        if token is not None:
            headers.append(("authorization", f"Bearer {token}"))
        block = b"".join(b"\0" + _string(name) + _string(value) for name, value in headers)
        self.sock.sendall(_frame(_HEADERS, _END_HEADERS, self._stream, block))
        return self._stream

    def message(self, stream: int, content: bytes, length: int | None = None) -> None:
        """A message, or a part of one that says it has `length` bytes."""
        size = len(content) if length is None else length
        raw = b"\0" + struct.pack(">I", size) + content
        for start in range(0, len(raw), _MOST_FRAME_BYTES):
            part = raw[start : start + _MOST_FRAME_BYTES]
            self.sock.sendall(_frame(_DATA, 0, stream, part))

    def is_open(self) -> bool:
        """Whether the server has left it open, as far as is known; takes in what it said."""
        self.sock.setblocking(False)
        try:
            while raw := self.sock.recv(65536):
                del raw
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            with contextlib.suppress(OSError):
                self.sock.settimeout(_SECONDS)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _string(text: str) -> bytes:
    """As HPACK has it, of fewer than 127 bytes, without Huffman."""
    raw = text.encode()
    return bytes([len(raw)]) + raw
