# SPDX-License-Identifier: Apache-2.0
"""The seal of a record: a checksum that only who has a key can make.

It stands where the plain checksum stands and covers the same bytes, so a record has one layout with
and without it. Knows nothing of keys in files or of what a record's fields mean.
"""

from __future__ import annotations

import hmac

SEAL_BYTES = 16

Buffer = bytes | bytearray | memoryview


class Seal:
    """The first 16 bytes of HMAC-SHA256 under one key. Thread-safe; hashing a payload releases the
    interpreter."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hmac.new(key, digestmod="sha256")  # copied, so the key is hashed once

    def digest(self, checked: Buffer, payload: Buffer) -> bytes:
        """Of a header without its checksum, and a payload, which is not copied."""
        hasher = self._keyed.copy()
        hasher.update(checked)
        hasher.update(payload)
        return hasher.digest()[:SEAL_BYTES]
