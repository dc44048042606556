# SPDX-License-Identifier: Apache-2.0
"""Blocks through a connection: payload and tag, hashed while the bytes are warm.

Both ends use it. Knows nothing of what the blocks are for.
"""

from __future__ import annotations

from collections.abc import Iterable

from .sockets import Connection
from .wire import TAG_BYTES, Tagger

# What is received or sent between two looks at the hash; fits a core's cache beside the socket's.
PART_BYTES = 256 * 1024
SEND_BYTES = 4 * 1024**2  # gathered for one call to the kernel


def receive_block(
    connection: Connection, key: bytes, tagger: Tagger, payload: memoryview, deadline: float
) -> bytes | None:
    """Fill `payload`; the block's tag, or None where the bytes do not match it. Raises
    ConnectionLost."""
    hasher = tagger.begin(key)
    tag = bytearray(TAG_BYTES)
    left = payload.nbytes
    for start in range(0, payload.nbytes, PART_BYTES):
        part = payload[start : start + PART_BYTES]
        left -= part.nbytes
        # The tag comes with the last part: one call to the kernel less.
        connection.receive_all([part] if left else [part, memoryview(tag)], deadline)
        hasher.update(part)
    return bytes(tag) if tag == hasher.digest() else None


def send_blocks(
    connection: Connection,
    head: bytes,
    blocks: Iterable[tuple[memoryview, bytes]],
    deadline: float,
) -> None:
    """Send `head`, then each payload with its tag, many of them in one call to the kernel. Raises
    ConnectionLost."""
    buffers: list[memoryview | bytes] = [head]
    gathered = 0
    for payload, tag in blocks:
        buffers += (payload, tag)
        gathered += payload.nbytes
        if gathered >= SEND_BYTES:
            connection.send(buffers, deadline)
            buffers, gathered = [], 0
    if buffers:
        connection.send(buffers, deadline)
