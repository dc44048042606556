# SPDX-License-Identifier: Apache-2.0
"""Least recently used: the key that was used longest ago goes first.

The order is an OrderedDict, because taking from the cold end of a plain dict walks over the holes
that earlier evictions left there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from .base import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """Every operation on a key is O(1); `victims` is linear in the number of keys it visits."""

    def __init__(self) -> None:
        self.order: OrderedDict[bytes, None] = OrderedDict()  # the coldest first

    def __len__(self) -> int:
        return len(self.order)

    def insert(self, keys: Iterable[bytes]) -> None:
        self.order.update(dict.fromkeys(keys))  # each is new, so it comes at the end

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
