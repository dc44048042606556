# SPDX-License-Identifier: Apache-2.0
"""PresenceCache: a client's record of the blocks that a server has.

It keeps the server's answers, which expire, and the look-ups without an answer. An answer is a
hint: if the server evicts the block later, a load of the block is a miss. The number of answers is
limited; the oldest answer is dropped first. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

from ..base import Answer

MOST = 1_000_000  # about 150 bytes each
HIT_SECONDS = 30.0  # `answers` uses a hit for this time; `to_ask` returns its key again sooner
FRESH_SECONDS = 1.0  # `to_ask` leaves out a key for this time after its answer


class PresenceCache:
    """The answers and unanswered look-ups about the blocks of one server."""

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._lock = threading.Lock()
        # The time of each answer, the oldest first: positive for a hit, negative for a miss.
        self._formed: dict[bytes, float] = {}
        self.hits = 0  # answers that are hits, of any age
        self._asked: dict[bytes, int] = {}  # unanswered look-ups and stores of each key

    def __len__(self) -> int:
        return len(self._formed)

    def answers(self, keys: Sequence[bytes]) -> list[Answer]:
        """HIT for a hit in the last HIT_SECONDS, PENDING during a look-up or store, else MISS."""
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
        """The keys to look up: each key once, without those being looked up or just answered."""
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
        """Record for each of these blocks whether the server has it."""
        now = self._clock()
        with self._lock:
            formed = self._formed
            for key, hit in zip(keys, hits, strict=True):
                self.hits += hit - (formed.pop(key, 0.0) > 0)
                formed[key] = now if hit else -now
            while len(formed) > self._most:
                self.hits -= formed.pop(next(iter(formed))) > 0

    def invalidate_keys(self, keys: Sequence[bytes]) -> int:
        """Forget the answers about these blocks. Return how many of the answers were hits."""
        with self._lock:
            known = sum(self._formed.pop(key, 0.0) > 0 for key in keys)
            self.hits -= known
            return known

    def clear(self) -> None:
        """Forget all answers. Unanswered look-ups stay recorded."""
        with self._lock:
            self._formed.clear()
            self.hits = 0
