# SPDX-License-Identifier: Apache-2.0
"""LoadedRows: the rows of the index on disk, as the initial content of the index in memory. Rows
are processed as columns, in C wherever possible, because an index may have a million rows."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

from .index_file import RowBatch
from .slot_sets import FREE, SlotList, scatter

# The most numbers per block, between oldest and newest use, for a counting sort, which takes four
# bytes for each number; for more numbers an ordinary sort is used.
_MOST_NUMBERS_PER_BLOCK = 16
# The largest last use that the store writes; counting from a larger number would overflow the row.
_LARGEST_USE = 2**62


class LoadedRows:
    """The blocks in slots 0 to `num_slots - 1`. `batches` must be in the order of their slots; rows
    of later slots are ignored. The last batch is empty: the source has sent all rows and still
    checks them. During the check, the slots in use are added to the empty list `recency`, least
    recently used first."""

    def __init__(self, num_slots: int, batches: Iterable[RowBatch], recency: SlotList) -> None:
        self.slots: dict[bytes, int] = {}
        self.keys: list[bytes | None] = [None] * num_slots  # by slot; None: free
        self.generations = array("Q", bytes(8 * num_slots))
        self.encoded_bytes = array("Q", bytes(8 * num_slots))
        self.free_flags = bytearray(FREE * num_slots)
        self.leaving = array("I")  # slots whose rows must be removed
        self.last_use = 0
        self._recency = recency
        # The garbage collector is off, since millions of keys and numbers have no reference cycle.
        collects = gc.isenabled()
        gc.disable()
        try:
            self._take_batches(num_slots, batches)
        finally:
            if collects:
                gc.enable()

    def _take_batches(self, num_slots: int, batches: Iterable[RowBatch]) -> None:
        uses = array("Q", bytes(8 * num_slots))
        is_ordered = False
        for batch in batches:
            if batch.slots:
                self._take_batch(batch, uses)
            else:
                self._put_in_order(uses)
                is_ordered = True
        if not is_ordered:
            self._put_in_order(uses)

    def _put_in_order(self, uses: array[int]) -> None:
        """Fill `recency` in the order of last use, after the last row has arrived."""
        self._leave_older_rows(uses)
        order = _by_use(self.slots, uses)
        self._recency.extend(order)
        self.last_use = uses[order[-1]] if order else 0

    def _take_batch(self, batch: RowBatch, uses: array[int]) -> None:
        slots, keys, generations, last_uses, encoded_bytes = batch.columns(len(self.keys))
        if not slots:
            return
        self.slots.update(zip(keys, slots, strict=True))
        start, stop = slots[0], slots[-1] + 1
        if stop - start == len(slots):
            self.keys[start:stop] = keys
            self.generations[start:stop] = generations
            self.encoded_bytes[start:stop] = encoded_bytes
            uses[start:stop] = last_uses
            self.free_flags[start:stop] = bytes(len(slots))
            return
        scatter(self.keys, slots, keys)
        scatter(self.generations, slots, generations)
        if any(encoded_bytes):
            scatter(self.encoded_bytes, slots, encoded_bytes)
        scatter(uses, slots, last_uses)
        scatter(self.free_flags, slots, repeat(0))

    def _leave_older_rows(self, uses: array[int]) -> None:
        """Mark the older of two rows with one key for removal, since its earlier removal failed."""
        if self.free_flags.count(0) == len(self.slots):
            return
        rows = [(slot, key) for slot, key in enumerate(self.keys) if key is not None]
        for slot, key in rows:
            if self.generations[slot] > self.generations[self.slots[key]]:
                self.slots[key] = slot
        for slot, key in rows:
            if self.slots[key] != slot:
                self.leaving.append(slot)
                uses[slot] = 0


def _by_use(slots: Mapping[bytes, int], uses: array[int]) -> Sequence[int]:
    """Return the slots in use, least recently used first. `uses` is 0 for all other slots. Last
    uses are normally small distinct numbers, which a counting sort orders quickly. For large or
    equal numbers, as in damaged rows, an ordinary sort is used."""
    last, unused = max(uses, default=0), len(uses)
    if last > _LARGEST_USE:
        for slot in slots.values():
            uses[slot] %= _LARGEST_USE
        return sorted(slots.values(), key=uses.__getitem__)
    most = _MOST_NUMBERS_PER_BLOCK * len(slots)
    first = 0
    if last >= most:
        first = min(filter(None, uses), default=0)
        if last - first >= most:
            return sorted(slots.values(), key=uses.__getitem__)
    places = array("I", [unused]) * (last - first + 1)
    if first:
        for slot, use in enumerate(uses):
            if use:
                places[use - first] = slot
    else:
        scatter(places, uses, range(len(uses)))
        places[0] = unused  # 0 is the use of all unused slots
    order = [slot for slot in places if slot != unused]
    if len(order) == len(slots):
        return order
    return sorted(slots.values(), key=uses.__getitem__)
