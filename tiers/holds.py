# SPDX-License-Identifier: Apache-2.0
"""Holds: blocks that are not evicted before a time, because a request will need them.

They are held by name, so that a block on its way in is held when it comes, and one that never comes
costs only its name. Every hold ends with its time at the latest, and the number of held names is
bounded. Time is monotonic.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Holds that were released early stay in the heap: at most this many more than half of its entries.
_MOST_DEAD = 64


@dataclass(slots=True, eq=False)
class Hold:
    """Blocks by name, until `until` seconds."""

    keys: Sequence[bytes]
    until: float
    is_over: bool = False


class Holds:
    """Holds on at most `most_blocks` names. A name in several holds counts once, and is held until
    the last of them ends. Called under its owner's lock."""

    def __init__(self, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.times: Counter[bytes] = Counter()  # holds of each name, as far as `expire` was called
        self._ends: list[tuple[float, int, Hold]] = []  # a heap
        self._numbers = itertools.count()
        self._num_dead = 0

    def create_hold(self, keys: Sequence[bytes], until: float, now: float) -> Hold:
        """Hold the leading keys of these, given head first, as far as there is room."""
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
        """End a hold before its time; one that has ended is ignored."""
        if hold.is_over:
            return
        self._release_hold(hold)
        self._num_dead += 1
        if self._num_dead > _MOST_DEAD + len(self._ends) // 2:
            self._ends = [entry for entry in self._ends if not entry[2].is_over]
            heapq.heapify(self._ends)
            self._num_dead = 0

    def expire(self, now: float) -> None:
        """End the holds whose time has come."""
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
