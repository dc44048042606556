# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO (Yang, Zhang, Qiu, Yue and Vinayak, SOSP 2023): eviction with three FIFO queues.

    new ──► small ──(used more than once)──► main ──► again, while it was used
              └──► ghost: a key only; a key that comes back while it is there goes to main

A use only raises the key's count, up to three, and moves no key. In the paper, keys move between
queues at an eviction; in this module, when the owner removes the victims that `victims` has
returned. Until then the moves are a plan, which an insert or a use discards. A key that is removed
without a plan only leaves its queue; a key from the small queue goes to ghost. When main is full,
the paper also evicts from main; this module evicts only as many keys as requested."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

from .base import EvictionPolicy

SMALL_SHARE = 0.1
MAX_COUNT = 3


class S3FifoPolicy(EvictionPolicy):
    """The S3-FIFO policy. A key costs O(1) over its life; `victims` is linear in the number of
    visits, at most four for each key. Remembers up to `capacity` evicted keys."""

    def __init__(self, capacity: int) -> None:
        self._small_size = max(1, int(capacity * SMALL_SHARE))
        self._ghost_size = max(1, capacity - self._small_size)
        # Use counts by key, the first in first.
        self._small: OrderedDict[bytes, int] = OrderedDict()
        self._main: OrderedDict[bytes, int] = OrderedDict()
        self._ghost: OrderedDict[bytes, None] = OrderedDict()
        # By victim: the keys that go to the end of main before the victim goes, with their counts.
        self._plan: dict[bytes, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def insert(self, keys: Iterable[bytes]) -> None:
        self._plan = {}
        for key in keys:
            if key in self._ghost:
                del self._ghost[key]
                self._main[key] = 0
            else:
                self._small[key] = 0

    def touch(self, keys: Iterable[bytes]) -> None:
        self._plan = {}
        for key in keys:
            queue = self._small if key in self._small else self._main
            queue[key] = min(MAX_COUNT, queue[key] + 1)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            for moved, count in self._plan.pop(key, ()):
                if moved in self._small or moved in self._main:
                    self._small.pop(moved, None)
                    self._main[moved] = count
                    self._main.move_to_end(moved)
            if self._small.pop(key, None) is not None:
                self._ghost[key] = None
                if len(self._ghost) > self._ghost_size:
                    self._ghost.popitem(last=False)
            else:
                self._main.pop(key, None)

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        self._plan = {}
        chosen: list[bytes] = []
        moves: list[tuple[bytes, int]] = []  # since the last victim
        again: deque[tuple[bytes, int]] = deque()  # behind the keys in main
        small = (item for item in self._small.items() if may_evict(item[0]))
        main = (item for item in self._main.items() if may_evict(item[0]))
        num_small = len(self._small)
        while len(chosen) < count:
            item = next(small, None) if num_small >= self._small_size else None
            from_small = item is not None
            if item is None:
                item = next(main, None) or (again.popleft() if again else None)
            if item is None:
                item = next(small, None)
                from_small = item is not None
            if item is None:
                break
            key, uses = item
            num_small -= from_small
            if uses > (1 if from_small else 0):
                moves.append((key, uses if from_small else uses - 1))
                again.append(moves[-1])
            else:
                chosen.append(key)
                self._plan[key], moves = moves, []
        return chosen
