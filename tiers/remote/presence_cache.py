# SPDX-License-Identifier: Apache-2.0
"""A client's record of the blocks that a server has: answers, which age, and open questions.

An answer is a hint: if the server evicts the block later, a load of the block is a miss. The number
of answers is bounded; the oldest answer is dropped first. Thread-safe.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ..base import Answer

MOST = 1_000_000  # about 150 bytes each
HIT_SECONDS = 30.0  # `answers` uses a hit for this time; `to_ask` returns its key again sooner
FRESH_SECONDS = 1.0  # `to_ask` leaves out a key for this time after its answer


class PresenceCache:
    """The answers and open questions about the blocks of one server."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        # The time of each answer, the oldest first: positive for a hit, negative for a miss.
        self._formed: dict[bytes, float] = {}
        self.hits = 0  # answers that are hits, of any age
        self._asked: dict[bytes, int] = {}  # open questions about each key

    def __len__(self) -> int:
        return len(self._formed)

    def answers(self, keys: Sequence[bytes]) -> list[Answer]:
        """HIT for a hit of the last HIT_SECONDS, else PENDING for an open question, else MISS."""
        oldest = max(0.0, self._clock() - HIT_SECONDS)
        with self._lock:
            formed, asked = self._formed, self._asked
            return [
                Answer.HIT
                if formed.get(key, 0.0) > oldest
                else Answer.PENDING
                if key in asked
                else Answer.MISS
                for key in keys
            ]

    def to_ask(self, keys: Sequence[bytes]) -> list[bytes]:
        """The keys without an open question or a fresh answer, each once."""
        now = self._clock()
        with self._lock:
            formed, asked = self._formed, self._asked
            return [
                key
                for key in dict.fromkeys(keys)
                if key not in asked
                and (key not in formed or now - abs(formed[key]) > FRESH_SECONDS)
            ]

    def asked(self, keys: Iterable[bytes]) -> None:
        """Note one more open question about each key."""
        with self._lock:
            for key in keys:
                self._asked[key] = self._asked.get(key, 0) + 1

    def answered(self, keys: Sequence[bytes], hits: Sequence[bool] | None) -> None:
        """Close one question about each key. `hits` is None if the server will not answer."""
        with self._lock:
            for key in keys:
                left = self._asked.get(key, 1) - 1
                if left:
                    self._asked[key] = left
                else:
                    self._asked.pop(key, None)
        if hits is not None:
            self.learn(keys, hits)

    def learn(self, keys: Sequence[bytes], hits: Sequence[bool]) -> None:
        """Note which of these blocks the server has."""
        now = self._clock()
        with self._lock:
            formed = self._formed
            for key, hit in zip(keys, hits, strict=True):
                self.hits += hit - (formed.pop(key, 0.0) > 0)
                formed[key] = now if hit else -now
            while len(formed) > self._most:
                self.hits -= formed.pop(next(iter(formed))) > 0

    def invalidate_keys(self, keys: Sequence[bytes]) -> int:
        """Forget the answers about these blocks; return how many of them were hits."""
        with self._lock:
            known = sum(self._formed.pop(key, 0.0) > 0 for key in keys)
            self.hits -= known
            return known

    def clear(self) -> None:
        """Forget all answers. Open questions stay open."""
        with self._lock:
            self._formed.clear()
            self.hits = 0
