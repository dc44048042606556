# SPDX-License-Identifier: Apache-2.0
"""PresenceCache: a client's record of the blocks that a server has.

The record has the server's answers, which expire, and the look-ups without an answer. An answer is
a hint: if the server evicts the block later, a load of the block is a miss. The number of answers
is limited; the oldest answer is dropped first. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ..base import Answer

MOST = 1_000_000  # answers of about 150 bytes
HIT_SECONDS = 30.0  # how long `answers` uses a hit
FRESH_SECONDS = 1.0  # how long `to_ask` omits a key after its answer


class PresenceCache:
    """The answers and unanswered look-ups about the blocks of one server."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        # The time of each answer, the oldest first: positive for a hit, negative for a miss.
        self._formed: dict[bytes, float] = {}
        self.hits = 0  # number of answers that are hits, of any age
        self._asked: dict[bytes, int] = {}  # unanswered look-ups and stores of each key

    def __len__(self) -> int:
        return len(self._formed)

    def answers(self, keys: Sequence[bytes]) -> list[Answer]:
        """Return HIT after a hit in HIT_SECONDS, PENDING during a look-up or store, else MISS."""
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
        """Return the keys to look up, each once, without keys being looked up or just answered."""
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
        """Record the start of a look-up or store of each key."""
        with self._lock:
            for key in keys:
                self._asked[key] = self._asked.get(key, 0) + 1

    def answered(self, keys: Sequence[bytes], hits: Sequence[bool] | None) -> None:
        """Record the end of a look-up or store. `hits` is None if the server did not answer."""
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
        """Record for each of `keys` whether the server has the block."""
        now = self._clock()
        with self._lock:
            formed = self._formed
            for key, hit in zip(keys, hits, strict=True):
                self.hits += hit - (formed.pop(key, 0.0) > 0)
                formed[key] = now if hit else -now
            while len(formed) > self._most:
                self.hits -= formed.pop(next(iter(formed))) > 0

    def invalidate_keys(self, keys: Sequence[bytes]) -> int:
        """Remove the answers about `keys`. Return how many of these answers were hits."""
        with self._lock:
            known = sum(self._formed.pop(key, 0.0) > 0 for key in keys)
            self.hits -= known
            return known

    def clear(self) -> None:
        """Remove all answers. Unanswered look-ups stay recorded."""
        with self._lock:
            self._formed.clear()
            self.hits = 0
