# SPDX-License-Identifier: Apache-2.0
"""LruPolicy: the least recently used key is evicted first.

The order is an OrderedDict, because the search for the first key of a plain dict visits all entries
that earlier evictions have emptied."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from .base import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """The LRU policy. An operation on a key takes O(1), `victims` O(1) for each visited key."""

    def __init__(self) -> None:
        self.order: OrderedDict[bytes, None] = OrderedDict()  # the coldest first

    def __len__(self) -> int:
        return len(self.order)

    def insert(self, keys: Iterable[bytes]) -> None:
        self.order.update(dict.fromkeys(keys))  # new keys come at the end

    def touch(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.order.move_to_end(key)

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.order.pop(key, None)

    def victims(self, count: int, may_evict: Callable[[bytes], bool]) -> list[bytes]:
        chosen: list[bytes] = []
        if count < 1:
            return chosen
        for key in self.order:
            if may_evict(key):
                chosen.append(key)
                if len(chosen) == count:
                    break
        return chosen
