# SPDX-License-Identifier: Apache-2.0
"""Sets of slots: a list in the order of use, and flags of the free slots."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import chain, repeat
from typing import TypeVar

_T = TypeVar("_T")
FREE = b"\1"
_NOWHERE = 2**32 - 1


class SlotList:
    """Some of the slots 0 to `num_slots - 1`, each at most once, in an order that changes with
    every use. A linked list in two arrays: eight bytes for each slot, listed or not, every change
    O(1), no memory allocated or freed. One thread at a time."""

    def __init__(self, num_slots: int) -> None:
        self._end = num_slots  # stands before the first slot and after the last one
        self._after = array("I", b"\xff" * 4 * (num_slots + 1))
        self._before = array("I", self._after)
        self._after[self._end] = self._before[self._end] = self._end

    def __contains__(self, slot: int) -> bool:
        return self._after[slot] != _NOWHERE

    def __iter__(self) -> Iterator[int]:
        """The slots from first to last; the list must not change meanwhile."""
        slot = self._after[self._end]
        while slot != self._end:
            yield slot
            slot = self._after[slot]

    def extend(self, slots: Sequence[int]) -> None:
        """Append slots that are not listed yet, without a Python loop: there may be a million."""
        end, last = [self._end], [self._before[self._end]]
        scatter(self._after, chain(last, slots), chain(slots, end))
        scatter(self._before, chain(slots, end), chain(last, slots))

    def move_all_to_end(self, slots: Iterable[int]) -> None:
        """Make each of the slots the last one, whether it is listed or not."""
        after, before, end = self._after, self._before, self._end
        for slot in slots:
            behind = after[slot]
            if behind != _NOWHERE:
                in_front = before[slot]
                after[in_front] = behind
                before[behind] = in_front
            last = before[end]
            after[last] = before[end] = slot
            before[slot] = last
            after[slot] = end

    def discard_all(self, slots: Iterable[int]) -> None:
        """Remove these slots from the list; ignore slots that are not listed."""
        after, before = self._after, self._before
        for slot in slots:
            behind = after[slot]
            if behind != _NOWHERE:
                in_front = before[slot]
                after[in_front] = behind
                before[behind] = in_front
                after[slot] = _NOWHERE


class FreeSlots:
    """Flags, one byte for each of the slots 0 to `num_slots - 1`: `FREE` or 0. The lowest free
    slots are given out first, so that many are neighbours. The search for a free byte runs at the
    speed of memory: a batch costs one pass over the taken slots below it (30 µs for a million
    slots), and a slot that comes back needs no sorting."""

    def __init__(self, flags: bytearray) -> None:
        self.count = flags.count(FREE)
        self._flags = flags
        self._lowest = 0  # no slot below is free

    def __contains__(self, slot: int) -> bool:
        return bool(self._flags[slot])

    def pop_lowest(self, count: int) -> list[int]:
        """Take up to `count` slots, the lowest, ascending."""
        slots: list[int] = []
        slot = self._lowest
        for _ in range(min(count, self.count)):
            slot = self._flags.find(FREE, slot)
            self._flags[slot] = 0
            slots.append(slot)
            slot += 1
        self._lowest = slot
        self.count -= len(slots)
        return slots

    def add_these(self, slots: Sequence[int]) -> None:
        """Free these slots, which were taken."""
        if slots:
            deque(map(self._flags.__setitem__, slots, repeat(1)), maxlen=0)
            self._lowest = min(self._lowest, *slots)
            self.count += len(slots)


def scatter(into: MutableSequence[_T], slots: Iterable[int], values: Iterable[_T]) -> None:
    """`into[slot] = value` for all of them, without a Python loop."""
    deque(map(into.__setitem__, slots, values), maxlen=0)
