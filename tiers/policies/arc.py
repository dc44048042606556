# SPDX-License-Identifier: Apache-2.0
"""Adaptive replacement cache (Megiddo and Modha, FAST 2003): balances recency and frequency.

    evicted ── b1 ◄── t1 │ t2 ──► b2 ── evicted       t1: came once     b1, b2: keys of what was
                  cold   │   cold                     t2: used again    evicted from t1, t2

If a key is inserted again while it is in b1, t1 should have been larger, and `target`, the size
that t1 may have, grows. If the key is in b2, `target` shrinks.

Two details differ from the paper, because an owner evicts before it inserts the new key. A key that
comes back changes `target` after the eviction instead of before it. If the size of t1 equals
`target`, the new key does not decide which list loses a key. Keys that the owner removes for other
reasons than eviction go to b1 and b2 as well. b1 and b2 together never have more keys than the
capacity, nor do t1 and b1 together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import chain, islice

from .base import EvictionPolicy

Keys = OrderedDict[bytes, None]


class ArcPolicy(EvictionPolicy):
    """The ARC policy. An operation on a key takes O(1); `victims` is linear in the number of keys
    that it visits. Remembers at most `capacity` keys besides the keys of its owner."""

    def __init__(self, capacity: int) -> None:
        self.target = 0.0  # keys that t1 may hold before it loses keys first
        self._capacity = capacity
        self._t1: Keys = OrderedDict()
        self._t2: Keys = OrderedDict()
        self._b1: Keys = OrderedDict()
        self._b2: Keys = OrderedDict()

    def __len__(self) -> int:
        return len(self._t1) + len(self._t2)

    def insert(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._b1:
                self._move_target(max(1.0, len(self._b2) / len(self._b1)))
                del self._b1[key]
                self._t2[key] = None
            elif key in self._b2:
                self._move_target(-max(1.0, len(self._b1) / len(self._b2)))
                del self._b2[key]
                self._t2[key] = None
            else:
                self._t1[key] = None
        self._trim()

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._t1:
                del self._t1[key]
                self._t2[key] = None
            else:
                self._t2.move_to_end(key)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if key in self._t1:
                del self._t1[key]
                self._b1[key] = None
            elif key in self._t2:
                del self._t2[key]
                self._b2[key] = None
        self._trim()

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        chosen: list[bytes] = []
        first, second = filter(may_evict, self._t1), filter(may_evict, self._t2)
        left = len(self._t1)
        while len(chosen) < count:
            if left > self.target or not self._t2:
                key = next(first, None)
                if key is not None:
                    left -= 1
            else:
                key = next(second, None)
            if key is None:
                # One list has no more to give; the rest comes from the other.
                chosen += islice(chain(first, second), count - len(chosen))
                break
            chosen.append(key)
        return chosen

    def _move_target(self, step: float) -> None:
        self.target = min(float(self._capacity), max(0.0, self.target + step))

    def _trim(self) -> None:
        """Forget the oldest keys in b1 and b2 beyond the paper's bounds."""
        while self._b1 and len(self._t1) + len(self._b1) > self._capacity:
            self._b1.popitem(last=False)
        while self._b2 and len(self._b1) + len(self._b2) > self._capacity:
            self._b2.popitem(last=False)
