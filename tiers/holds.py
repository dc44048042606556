# SPDX-License-Identifier: Apache-2.0
"""Holds, which protect blocks of the slab from eviction until a given time, because a request will
need the blocks.

A hold lists keys, not slots. Therefore a block that is still being loaded is protected as soon as
it is in the slab. A block that never enters the slab occupies no slot. Every hold expires at its
time, and the number of held keys is limited. Times are monotonic seconds."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Holds that ended early stay in the heap, up to half of the heap's entries plus this number.
_MOST_DEAD = 64


@dataclass(slots=True, eq=False)
class Hold:
    """The protected keys, and the time at which the hold expires."""

    keys: Sequence[bytes]
    until: float
    is_over: bool = False


class Holds:
    """The holds of one slab, on at most `most_blocks` keys in all. A key is protected until the
    last hold with this key ends. Not thread-safe: the caller holds a lock."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.times: Counter[bytes] = Counter()  # number of holds of each key, at the last `expire`
        self._ends: list[tuple[float, int, Hold]] = []  # a heap by end time
        self._numbers = itertools.count()
        self._num_dead = 0

    def create_hold(self, keys: Sequence[bytes], until: float, now: float) -> Hold:
        """Protect `keys`, given in prompt order, up to the first key beyond `most_blocks`."""
        self.expire(now)
        room = self.most_blocks - len(self.times)
        taken: list[bytes] = []
        for key in dict.fromkeys(keys):
            if key not in self.times:
                if not room:
                    break
                room -= 1
            taken.append(key)
        hold = Hold(taken, until, is_over=not taken or until <= now)
        if not hold.is_over:
            self.times.update(taken)
            heapq.heappush(self._ends, (until, next(self._numbers), hold))
        return hold

    def end_hold(self, hold: Hold) -> None:
        """End a hold before its time. Does nothing if the hold has ended."""
        if hold.is_over:
            return
        self._release_hold(hold)
        self._num_dead += 1
        if self._num_dead > _MOST_DEAD + len(self._ends) // 2:
            self._ends = [entry for entry in self._ends if not entry[2].is_over]
            heapq.heapify(self._ends)
            self._num_dead = 0

    def expire(self, now: float) -> None:
        """End the holds whose end time is not later than `now`."""
        ends = self._ends
        while ends and ends[0][0] <= now:
            hold = heapq.heappop(ends)[2]
            if hold.is_over:
                self._num_dead -= 1
            else:
                self._release_hold(hold)

    def clear(self) -> None:
        """End all holds, before their times."""
        for _, _, hold in self._ends:
            hold.is_over = True
        self._ends.clear()
        self.times.clear()
        self._num_dead = 0

    def _release_hold(self, hold: Hold) -> None:
        hold.is_over = True
        times = self.times
        for key in hold.keys:
            if times[key] > 1:
                times[key] -= 1
            else:
                del times[key]
