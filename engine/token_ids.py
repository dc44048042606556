# SPDX-License-Identifier: Apache-2.0
"""Token ids as bytes: little-endian int32, as they travel to the core and are hashed.

whether an id is in range is for the core to say.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

BYTES_PER_TOKEN = 4


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Raises ValueError for an id that is no integer of 32 bits."""
    try:
        return struct.pack(f"<{len(token_ids)}i", *token_ids)
    except struct.error as error:
        raise ValueError(
            "token ids must be integers from 0 up to the vocabulary size; one of them is not even "
            "a 32-bit integer"
        ) from error


def unpack_token_ids(packed: bytes) -> list[int]:
    """Raises ValueError for a length that is no multiple of four bytes."""
    if len(packed) % BYTES_PER_TOKEN:
        raise ValueError(f"packed token ids take 4 bytes each, and {len(packed)} bytes came")
    return list(struct.unpack(f"<{len(packed) // BYTES_PER_TOKEN}i", packed))
