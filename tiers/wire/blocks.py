# SPDX-License-Identifier: Apache-2.0
"""Functions to send and receive blocks on a socket, each as a payload with a trailer. Payloads are
hashed while their bytes are in the CPU cache. If the compiled library is available, one call
receives and hashes all blocks of a batch, and one call sends a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xxhash

from ..native.native_library import LEAST_BYTES
from ..tag import Hashed
from .sockets import Connection

# The bytes received or copied between two updates of the hash, which fit a core's cache.
PART_BYTES = 256 * 1024
SEND_BYTES = 16 * 1024**2  # bytes gathered for one system call


def receive_blocks(
    connection: Connection,
    payloads: Sequence[memoryview],
    keyed_hashers: Sequence[Any] | None,
    trailer_bytes: int,
    deadline: float,
    arrived: list[tuple[bytes, Any]],
) -> None:
    """Fill `payloads`, which have equal lengths. The trailer and hasher of each completely received
    payload are appended to `arrived`, even if a later payload fails. The hashers are
    `keyed_hashers`, or, if None, hashers of the plain digest. Raises ConnectionLost."""
    if not payloads:
        return
    if keyed_hashers is None and connection.can_digest and payloads[0].nbytes >= LEAST_BYTES:
        came: list[tuple[bytes, bytes]] = []
        try:
            connection.receive_and_digest(payloads, trailer_bytes, deadline, came)
        finally:
            arrived += [(trailer, Hashed(digest)) for trailer, digest in came]
        return
    for index, payload in enumerate(payloads):
        hasher = xxhash.xxh3_128() if keyed_hashers is None else keyed_hashers[index]
        trailer = _receive_block(connection, hasher, payload, trailer_bytes, deadline)
        arrived.append((trailer, hasher))


def _receive_block(
    connection: Connection, hasher: Any, payload: memoryview, trailer_bytes: int, deadline: float
) -> bytes:
    trailer = bytearray(trailer_bytes)
    left = payload.nbytes
    for start in range(0, payload.nbytes, PART_BYTES):
        part = payload[start : start + PART_BYTES]
        left -= part.nbytes
        # The trailer is read with the last part, which saves one system call.
        connection.receive_all([part] if left else [part, memoryview(trailer)], deadline)
        hasher.update(part)
    return bytes(trailer)


def send_blocks(
    connection: Connection,
    head: bytes,
    payloads: Sequence[memoryview],
    trailers: Sequence[bytes],
    deadline: float,
) -> None:
    """Send `head`, then each payload with its trailer. The payloads have equal lengths, and one
    system call sends many of them. Raises ConnectionLost."""
    if connection.can_digest and not any(payload.readonly for payload in payloads):
        connection.send_payloads(head, payloads, b"".join(trailers), deadline)
        return
    buffers: list[memoryview | bytes] = [head]
    gathered = 0
    for payload, trailer in zip(payloads, trailers, strict=True):
        buffers += (payload, trailer)
        gathered += payload.nbytes
        if gathered >= SEND_BYTES:
            connection.send(buffers, deadline)
            buffers, gathered = [], 0
    if buffers:
        connection.send(buffers, deadline)
