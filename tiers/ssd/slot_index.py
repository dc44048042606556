# SPDX-License-Identifier: Apache-2.0
"""The index in memory: which block is in which slot, which slots are free, who is read right now.

Every question the store is asked is answered here; the index on disk only repeats it for the next
start. A slot goes round like this, and is never written while a row on the disk or a reader still
means what it held before:

    free → allocate → (written, row committed) → publish → in use ⇄ pin/unpin
      ↑                                                       │ forget (evicted, dropped, damaged)
      └── release: row gone from the disk, and no pins ←── leaving

Knows nothing of files or threads: its owner calls it under one lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import islice

from ..policies.base import EvictionPolicy
from ..policies.lru import LruPolicy
from .index_file import Row


class Entry:
    """One block on the disk."""

    __slots__ = ("generation", "key", "pins", "row_gone", "slot")

    def __init__(self, key: bytes, slot: int, generation: int) -> None:
        self.key = key
        self.slot = slot
        self.generation = generation
        self.pins = 0
        self.row_gone = False


class SlotIndex:
    """Blocks by key, over slots 0 to `num_slots - 1`."""

    def __init__(self, num_slots: int, rows: Iterable[Row] = ()) -> None:
        self.num_slots = num_slots
        self._entries: dict[bytes, Entry] = {}
        self._policy: EvictionPolicy = LruPolicy()
        self._leaving: list[Entry] = []
        self._touched: dict[bytes, None] = {}  # used since their rows were written; in order
        self._next_use = 0
        taken = self._take_in(rows)
        self._free = [slot for slot in range(num_slots) if slot not in taken]  # a heap, as sorted

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    @property
    def has_leaving(self) -> bool:
        """True while rows wait to be removed from the disk."""
        return bool(self._leaving)

    def keys(self) -> list[bytes]:
        return list(self._entries)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the use of known keys, given head first: of a chain the tail is evicted first."""
        for key in reversed(list(keys)):
            self._policy.touch((key,))
            self._touched.pop(key, None)
            self._touched[key] = None

    def pin(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Entries whose slots stay as they are until `unpin`; None for unknown keys."""
        entries = [self._entries.get(key) for key in keys]
        for entry in entries:
            if entry is not None:
                entry.pins += 1
        self.touch(entry.key for entry in entries if entry is not None)
        return entries

    def unpin(self, entry: Entry) -> None:
        entry.pins -= 1
        if entry.row_gone and not entry.pins:
            heapq.heappush(self._free, entry.slot)

    def forget(self, entry: Entry) -> bool:
        """Take an entry out of sight; False if it already was."""
        if self._entries.get(entry.key) is not entry:
            return False
        del self._entries[entry.key]
        self._policy.remove((entry.key,))
        self._touched.pop(entry.key, None)
        self._leaving.append(entry)
        return True

    def forget_key(self, key: bytes) -> bool:
        """`forget` by name; False for an unknown key."""
        entry = self._entries.get(key)
        return entry is not None and self.forget(entry)

    def make_room(self, count: int) -> int:
        """Evict so that `count` slots become free once what is leaving has left; how many."""
        coming = sum(not entry.pins for entry in self._leaving)
        wanted = count - len(self._free) - coming
        victims = self._policy.victims(wanted, lambda key: not self._entries[key].pins)
        for key in victims:
            self.forget_key(key)
        return len(victims)

    def take_leaving(self, limit: int | None = None) -> list[Entry]:
        """Entries whose rows have to go; `release` or `keep_leaving` them afterwards."""
        leaving = self._leaving[:limit]
        del self._leaving[:limit]
        return leaving

    def keep_leaving(self, entries: Sequence[Entry]) -> None:
        """Their rows could not be removed; try again later."""
        self._leaving.extend(entries)

    def release(self, entries: Iterable[Entry]) -> None:
        """Their rows are gone: the slots are free, or will be after the last reader."""
        for entry in entries:
            entry.row_gone = True
            if not entry.pins:
                heapq.heappush(self._free, entry.slot)

    def allocate(self, count: int) -> list[int]:
        """Up to `count` free slots, the lowest, ascending: neighbours where there are any."""
        return [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]

    def give_back(self, slots: Iterable[int]) -> None:
        """Allocated slots that were not published."""
        for slot in slots:
            heapq.heappush(self._free, slot)

    def new_rows(self, entries: Sequence[Entry]) -> list[Row]:
        """Rows for entries about to be published, given head first, the head used last."""
        self._next_use += len(entries)
        last = self._next_use
        return [Row(e.slot, e.key, e.generation, last - i) for i, e in enumerate(entries)]

    def publish(self, entries: Sequence[Entry]) -> None:
        """Make entries known, given head first. Their rows are on the disk."""
        for entry in reversed(entries):
            self._entries[entry.key] = entry
            self._policy.insert((entry.key,))

    def touched_rows(self, limit: int) -> list[Row]:
        """Up to `limit` rows whose last use the disk does not know, the longest ago first."""
        rows = []
        for key in list(islice(self._touched, limit)):
            del self._touched[key]
            entry = self._entries[key]
            self._next_use += 1
            rows.append(Row(entry.slot, key, entry.generation, self._next_use))
        return rows

    def _take_in(self, rows: Iterable[Row]) -> set[int]:
        """Fill an empty index; the slots in use. Of two rows for a key the older one, left by a
        removal that failed, is to be removed again."""
        ordered = sorted(rows, key=lambda row: row.last_use)
        for row in ordered:
            known = self._entries.get(row.key)
            entry = Entry(row.key, row.slot, row.generation)
            if known is not None and known.generation > row.generation:
                self._leaving.append(entry)
                continue
            if known is not None:
                self.forget(known)
            self._entries[row.key] = entry
            self._policy.insert((row.key,))
        self._next_use = ordered[-1].last_use if ordered else 0
        return {row.slot for row in ordered}
