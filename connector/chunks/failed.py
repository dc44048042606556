# SPDX-License-Identifier: Apache-2.0
"""Chunks whose load has failed: for a while they are not found, unless they are stored anew.

A host asks again at once for chunks that it was told are there, so without this it would try for
ever to load a chunk that never comes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

FORGET_SECONDS = 10.0
MAX_FORGOTTEN = 65536


class FailedChunks:
    """The keys of such chunks. The owner's lock is held for every call. `version` changes with each
    call that adds some."""

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
