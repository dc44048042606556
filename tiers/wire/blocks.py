# SPDX-License-Identifier: Apache-2.0
"""Blocks through a connection: payload and what follows it, hashed while the bytes are warm.

Both ends use it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .sockets import Connection

# What is received or sent between two looks at the hash; fits a core's cache beside the socket's.
PART_BYTES = 256 * 1024
SEND_BYTES = 4 * 1024**2  # gathered for one call to the kernel


def receive_block(
    connection: Connection, hasher: Any, payload: memoryview, trailer_bytes: int, deadline: float
) -> bytes:
    """Fill `payload`, which `hasher` is given as it comes; the bytes behind it. Raises
    ConnectionLost."""
    trailer = bytearray(trailer_bytes)
    left = payload.nbytes
    for start in range(0, payload.nbytes, PART_BYTES):
        part = payload[start : start + PART_BYTES]
        left -= part.nbytes
        # The trailer comes with the last part: one call to the kernel less.
        connection.receive_all([part] if left else [part, memoryview(trailer)], deadline)
        hasher.update(part)
    return bytes(trailer)


def send_blocks(
    connection: Connection,
    head: bytes,
    blocks: Iterable[tuple[memoryview, bytes]],
    deadline: float,
) -> None:
    """Send `head`, then each payload with its trailer, many of them in one call to the kernel.
    Raises ConnectionLost."""
    buffers: list[memoryview | bytes] = [head]
    gathered = 0
    for payload, trailer in blocks:
        buffers += (payload, trailer)
        gathered += payload.nbytes
        if gathered >= SEND_BYTES:
            connection.send(buffers, deadline)
            buffers, gathered = [], 0
    if buffers:
        connection.send(buffers, deadline)
