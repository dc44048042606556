# SPDX-License-Identifier: Apache-2.0
"""Chunks whose load has failed. For a while, look-ups miss these chunks unless they are stored
again. Without this record a host would find such a chunk at once and load it again without end."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

FORGET_SECONDS = 10.0
MAX_FORGOTTEN = 65536


class FailedChunks:
    """The keys of chunks whose load failed. Each `add` changes `version`. Callers hold a lock."""

    def __init__(self) -> None:
        self.version = 0
        self._until: OrderedDict[bytes, float] = OrderedDict()  # monotonic

    def __contains__(self, key: bytes) -> bool:
        until = self._until.get(key)
        if until is None:
            return False
        if until > time.monotonic():
            return True
        del self._until[key]
        return False

    def add(self, keys: Iterable[bytes]) -> None:
        """Record that the load of these chunks failed."""
        until = time.monotonic() + FORGET_SECONDS
        self.version += 1
        for key in keys:
            self._until[key] = until
            self._until.move_to_end(key)
        while len(self._until) > MAX_FORGOTTEN:
            self._until.popitem(last=False)

    def discard_stored(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._until.pop(key, None)
