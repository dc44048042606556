# SPDX-License-Identifier: Apache-2.0
"""Slots in an order that changes with every use: a linked list that lies in two arrays.

Eight bytes a slot whether it is listed or not, every change O(1), no memory taken or given back.
Knows nothing of what the order means.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

_NOWHERE = 2**32 - 1


class SlotList:
    """Some of the slots 0 to `num_slots - 1`, each at most once. One thread at a time."""

    def __init__(self, num_slots: int) -> None:
        self._end = num_slots  # stands before the first slot and after the last one
        self._after = array("I", b"\xff" * 4 * (num_slots + 1))
        self._before = array("I", self._after)
        self._after[self._end] = self._before[self._end] = self._end

    def __contains__(self, slot: int) -> bool:
        return self._after[slot] != _NOWHERE

    def __iter__(self) -> Iterator[int]:
        """From the first to the last one; the list must not change meanwhile."""
        slot = self._after[self._end]
        while slot != self._end:
            yield slot
            slot = self._after[slot]

    def extend(self, slots: Iterable[int]) -> None:
        """Append slots that are not listed yet."""
        after, before, last = self._after, self._before, self._before[self._end]
        for slot in slots:
            after[last] = slot
            before[slot] = last
            last = slot
        after[last] = self._end
        before[self._end] = last

    def move_to_end(self, slot: int) -> None:
        """Make a slot the last one, whether it is listed or not."""
        self.discard(slot)
        last = self._before[self._end]
        self._after[last] = self._before[self._end] = slot
        self._before[slot] = last
        self._after[slot] = self._end

    def discard(self, slot: int) -> None:
        """Remove a slot if it is listed."""
        after = self._after[slot]
        if after != _NOWHERE:
            before = self._before[slot]
            self._after[before] = after
            self._before[after] = before
            self._after[slot] = _NOWHERE
