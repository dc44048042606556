# SPDX-License-Identifier: Apache-2.0
"""The index in memory: which block is in which slot, which slots are free, who is read right now.

Every question the store is asked is answered here; the index on disk only repeats it for the next
start. A slot goes round like this, and is never written while a row on the disk or a reader still
means what it held before:

    free → allocate → (written, row committed) → publish → in use ⇄ pin/unpin
      ↑                                                       │ forget (evicted, dropped, damaged)
      └── release: row gone from the disk, and no pins ←── leaving

A million blocks would be gigabytes as objects, so what is known of a slot lies in arrays by its
number, and one dict leads from keys to slots.

The order of last use is always kept, since the disk repeats it. It is the order of eviction too,
unless a policy chooses the victims (`choose_by`), which is told of every block that is used, comes
in or goes.

In memory only; its owner calls it under one lock.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from ...holds import Holds
from ...policies.base import EvictionPolicy
from .index_file import Row, RowBatch
from .slot_sets import FreeSlots, SlotList, scatter

# Counting sort of the uses at the start takes four bytes for each number between the oldest and
# the newest one; beyond this many numbers a block, an ordinary sort does.
_MOST_NUMBERS_PER_BLOCK = 16
# Blocks forgotten by name whose records are erased for those who wait for that.
_MOST_DROPPED = 16384
# Of the slots, for blocks that are held until somebody asks for them.
HELD_SHARE = 0.5
LAST_GENERATION = 2**64 - 1  # that a row can say
# A last use beyond it was never written by us; counting on from it would overflow the row.
_LARGEST_USE = 2**62


class Entry(NamedTuple):
    """One block on the disk, as it was when it was asked for. `encoded_bytes` is as in its row."""

    key: bytes
    slot: int
    generation: int
    encoded_bytes: int = 0


class SlotIndex:
    """Blocks by key, over slots 0 to `num_slots - 1`. `rows` come in the order of their slots;
    what is beyond the last slot is left out. An empty batch among them is the last one: whoever
    gives them has all rows, and is about to say whether they are good."""

    def __init__(self, num_slots: int, rows: Iterable[RowBatch] = ()) -> None:
        self.num_slots = num_slots
        self._slots: dict[bytes, int] = {}
        self._keys: list[bytes | None] = [None] * num_slots  # None where free or only allocated
        self._generations = array("Q", bytes(8 * num_slots))
        self._encoded_bytes = array("Q", bytes(8 * num_slots))
        self._pins = array("I", bytes(4 * num_slots))
        self._row_gone = bytearray(num_slots)  # 1: free as soon as nobody reads it
        self._free = FreeSlots(num_slots)
        self._leaving = array("I")
        self._dropped: deque[tuple[int, int]] = deque(maxlen=_MOST_DROPPED)  # slot, generation
        self._recency = SlotList(num_slots)  # in use, the coldest first
        self._unsaved = SlotList(num_slots)  # used since their rows were written, in that order
        self._next_use = 0
        self._policy: EvictionPolicy | None = None  # None: the order of last use
        self._holds = Holds(int(HELD_SHARE * num_slots))
        self._take_in(rows)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        """Those of the keys that it has."""
        slots = self._slots
        return [key for key in keys if key in slots]

    @property
    def num_free(self) -> int:
        """Slots that `allocate` would give out."""
        return len(self._free)

    @property
    def has_leaving(self) -> bool:
        """True while rows wait to be removed from the disk."""
        return bool(self._leaving)

    @property
    def learns(self) -> bool:
        """Whether `observe_chain` does anything."""
        return self._policy is not None and self._policy.learns

    def choose_by(self, policy: EvictionPolicy) -> None:
        """Have this policy, which holds nothing yet, choose the victims from now on. It begins with
        the order of last use."""
        policy.insert(self._keys[slot] or b"" for slot in self._recency)
        self._policy = policy

    def observe_chain(self, chain: Sequence[bytes], now: float) -> None:
        """Tell the policy of a prompt, see `EvictionPolicy.observe`."""
        if self._policy is not None:
            self._policy.observe(chain, now)

    def keys(self) -> list[bytes]:
        return list(self._slots)

    def retain_keys(self, keys: Sequence[bytes], until: float, now: float) -> int:
        """Keep known blocks, given head first, from being evicted until then (seconds, monotonic):
        how many, from the first on. At most HELD_SHARE of the slots are held."""
        leading = list(takewhile(self._slots.__contains__, keys))
        held = self._holds.create_hold(leading, until, now).keys
        self.touch(held)  # so that they are not in the way of victims
        return len(held)

    def coldest_slots(self, limit: int) -> list[int]:
        """Up to `limit` slots in use, those first whose last use is longest ago."""
        return list(islice(self._recency, limit))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the use of known keys, given head first: of a chain the tail is evicted first."""
        tail_first = list(keys)[::-1]
        slots = list(map(self._slots.__getitem__, tail_first))
        self._recency.move_all_to_end(slots)
        self._unsaved.move_all_to_end(slots)
        if self._policy is not None:
            self._policy.touch(tail_first)

    def pin(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Entries whose slots stay as they are until `unpin`; None for unknown keys."""
        entries: list[Entry | None] = []
        for key in keys:
            slot = self._slots.get(key)
            if slot is None:
                entries.append(None)
                continue
            self._pins[slot] += 1
            entries.append(self._entry(slot))
        self.touch(entry.key for entry in entries if entry is not None)
        return entries

    def unpin(self, entry: Entry) -> None:
        self._pins[entry.slot] -= 1
        self._free_if_left(entry.slot)

    def remove_entry(self, entry: Entry, *, by_name: bool = False) -> bool:
        """Take an entry out of sight; False if it already was. `by_name`: as by `forget_key`."""
        slot = self._slots.get(entry.key)
        if slot != entry.slot or self._generations[slot] != entry.generation:
            return False
        if by_name:
            self._dropped.append((slot, entry.generation))
        self._leave((slot,))
        return True

    def forget_key(self, key: bytes) -> bool:
        """`remove_entry` by name; False for an unknown key. See `take_dropped`."""
        slot = self._slots.get(key)
        if slot is None:
            return False
        self._dropped.append((slot, self._generations[slot]))
        self._leave((slot,))
        return True

    def note_dropped(self, entry: Entry) -> None:
        """A block in an allocated slot, which will not be published, was forgotten by name; its
        record may be there. See `take_dropped`."""
        self._keys[entry.slot], self._generations[entry.slot] = entry.key, entry.generation
        self._dropped.append((entry.slot, entry.generation))

    def forget_up_to(self, generation: int) -> None:
        """Take out of sight what was written up to this generation."""
        generations = self._generations
        self._leave([slot for slot in self._slots.values() if generations[slot] <= generation])

    def has_leaving_after(self, generation: int) -> bool:
        """True while rows of a later generation wait to be removed from the disk."""
        return any(self._generations[slot] > generation for slot in self._leaving)

    def take_dropped(self, after: int) -> list[int]:
        """Free slots that still hold the record of a block forgotten by name, if it was written
        after that generation; of the latest `_MOST_DROPPED`. Those that somebody still reads come
        another time."""
        dropped, generations = list(self._dropped), self._generations
        there = [each for each in dropped if after < each[1] == generations[each[0]]]
        self._dropped.clear()
        self._dropped.extend(each for each in there if each[0] not in self._free)  # being read
        return [slot for slot, _ in there if slot in self._free]

    def dropped_keys(self) -> tuple[list[bytes], bool]:
        """Blocks forgotten by name whose rows or records may still be on the disk; False: of more
        than that nobody knows any more."""
        keys, generations = self._keys, self._generations
        found = [
            keys[slot] for slot, generation in self._dropped if generations[slot] == generation
        ]
        return [key for key in found if key is not None], len(self._dropped) < _MOST_DROPPED

    def make_room(self, count: int) -> int:
        """Evict until `count` slots will be free once what is leaving has left; return how many."""
        wanted = count - len(self._free)
        for slot in self._leaving:
            if wanted <= 0:
                return 0
            wanted -= not self._pins[slot]
        victims = self._victims(max(0, wanted))
        self._leave(victims)
        return len(victims)

    def take_leaving(self, limit: int | None = None) -> list[Entry]:
        """Entries whose rows have to go; `free_entries` or `keep_leaving` them afterwards."""
        slots = self._leaving[:limit]
        del self._leaving[:limit]
        return [self._entry(slot) for slot in slots]

    def keep_leaving(self, entries: Sequence[Entry]) -> None:
        """Their rows could not be removed, or may be on the disk though their commit failed; try
        again later."""
        for entry in entries:
            self._generations[entry.slot] = entry.generation
            self._leaving.append(entry.slot)

    def free_entries(self, entries: Iterable[Entry]) -> None:
        """Their rows are gone: the slots are free, or will be after the last reader."""
        row_gone, pins, keys = self._row_gone, self._pins, self._keys
        free = []
        for entry in entries:
            slot = entry.slot
            if pins[slot]:
                row_gone[slot] = 1  # and free when it is unpinned
            else:
                keys[slot] = None
                free.append(slot)
        self._free.add_these(free)

    def allocate(self, count: int) -> list[int]:
        """Up to `count` free slots, the lowest, ascending: neighbours where there are any."""
        return self._free.pop_lowest(count)

    def give_back(self, slots: Iterable[int]) -> None:
        """Allocated slots that were not published."""
        self._free.add_these(list(slots))

    def new_rows(self, entries: Sequence[Entry]) -> list[Row]:
        """Rows for entries about to be published, given head first, the head used last."""
        last = self._next_use + len(entries)
        uses = range(last, self._next_use, -1)
        self._next_use = last
        return [
            Row(slot, key, generation, use, encoded_bytes)
            for (key, slot, generation, encoded_bytes), use in zip(entries, uses, strict=True)
        ]

    def publish(self, entries: Sequence[Entry]) -> None:
        """Make entries known, given head first. Their rows are on the disk."""
        tail_first = entries[::-1]
        for key, slot, generation, encoded_bytes in tail_first:
            self._slots[key] = slot
            self._keys[slot] = key
            self._generations[slot] = generation
            self._encoded_bytes[slot] = encoded_bytes
        self._recency.move_all_to_end([entry.slot for entry in tail_first])
        if self._policy is not None:
            self._policy.insert(entry.key for entry in tail_first)

    def touched_rows(self, limit: int) -> list[Row]:
        """Up to `limit` rows whose last use the disk does not know, the longest ago first."""
        rows = []
        slots = list(islice(self._unsaved, limit))
        self._unsaved.discard_all(slots)
        for slot in slots:
            self._next_use += 1
            rows.append(self._row(slot, self._next_use))
        return rows

    def iter_by_use(self) -> Iterator[Row]:
        """A row for every block, numbered anew in the order of their uses."""
        for use, slot in enumerate(self._recency, 1):
            yield self._row(slot, use)

    def _entry(self, slot: int) -> Entry:
        key = self._keys[slot] or b""
        return Entry(key, slot, self._generations[slot], self._encoded_bytes[slot])

    def _row(self, slot: int, use: int) -> Row:
        key = self._keys[slot] or b""
        return Row(slot, key, self._generations[slot], use, self._encoded_bytes[slot])

    def _victims(self, count: int) -> list[int]:
        """Up to `count` slots to evict, none of which is being read."""
        if self._holds:
            self._holds.expire(time.monotonic())
        if self._policy is None:
            pins, keys, holds = self._pins, self._keys, self._holds
            unread = (s for s in self._recency if not pins[s] and keys[s] not in holds)
            return list(islice(unread, count))
        return [self._slots[key] for key in self._policy.victims(count, self._is_unread)]

    def _is_unread(self, key: bytes) -> bool:
        return not self._pins[self._slots[key]] and key not in self._holds

    def _leave(self, slots: Sequence[int]) -> None:
        """Out of sight, but not free: their keys are needed until the slots are."""
        keys = [self._keys[slot] or b"" for slot in slots]
        for key in keys:
            del self._slots[key]
        if self._policy is not None:
            self._policy.remove(keys)
        self._recency.discard_all(slots)
        self._unsaved.discard_all(slots)
        self._leaving.extend(slots)

    def _free_if_left(self, slot: int) -> None:
        if self._row_gone[slot] and not self._pins[slot]:
            self._row_gone[slot] = 0
            self._keys[slot] = None
            self._free.add(slot)

    def _take_in(self, rows: Iterable[RowBatch]) -> None:
        """Fill an empty index. In C wherever that can be, for a million rows."""
        uses = array("Q", bytes(8 * self.num_slots))
        # Millions of keys and numbers, and not a cycle among them for the collector to look for.
        collects = gc.isenabled()
        gc.disable()
        try:
            is_ordered = False
            for batch in rows:
                if batch.slots:
                    self._take_batch(batch, uses)
                else:
                    self._put_in_order(uses)
                    is_ordered = True
            if not is_ordered:
                self._put_in_order(uses)
        finally:
            if collects:
                gc.enable()

    def _put_in_order(self, uses: array[int]) -> None:
        """All rows were taken in."""
        self._leave_older_rows(uses)
        order = _by_use(self._slots, uses)
        self._recency.extend(order)
        self._next_use = uses[order[-1]] if order else 0

    def _take_batch(self, batch: RowBatch, uses: array[int]) -> None:
        slots, keys, generations, last_uses, encoded_bytes = batch.columns(self.num_slots)
        if not slots:
            return
        self._slots.update(zip(keys, slots, strict=True))
        start, stop = slots[0], slots[-1] + 1
        if stop - start == len(slots):
            self._keys[start:stop] = keys
            self._generations[start:stop] = generations
            self._encoded_bytes[start:stop] = encoded_bytes
            uses[start:stop] = last_uses
            self._free.take_range(start, stop)
            return
        scatter(self._keys, slots, keys)
        scatter(self._generations, slots, generations)
        if any(encoded_bytes):
            scatter(self._encoded_bytes, slots, encoded_bytes)
        scatter(uses, slots, last_uses)
        self._free.take_these(slots)

    def _leave_older_rows(self, uses: array[int]) -> None:
        """The older of two rows for a key, left by a removal that failed, is to be removed
        again."""
        if self.num_slots - len(self._free) == len(self._slots):
            return
        rows = [(slot, key) for slot, key in enumerate(self._keys) if key is not None]
        for slot, key in rows:
            if self._generations[slot] > self._generations[self._slots[key]]:
                self._slots[key] = slot
        for slot, key in rows:
            if self._slots[key] != slot:
                self._leaving.append(slot)
                uses[slot] = 0


def _by_use(slots: Mapping[bytes, int], uses: array[int]) -> Sequence[int]:
    """The slots, those first whose last use is longest ago; 0 is the use of all other slots.

    Last uses are small different numbers, so they are laid out by number instead of compared; what
    a damaged row says may be neither, and then they are compared.
    """
    last, nobody = max(uses, default=0), len(uses)
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
    places = array("I", [nobody]) * (last - first + 1)
    if first:
        for slot, use in enumerate(uses):
            if use:
                places[use - first] = slot
    else:
        scatter(places, uses, range(len(uses)))
        places[0] = nobody  # where all that are not in use went
    order = [slot for slot in places if slot != nobody]
    if len(order) == len(slots):
        return order
    return sorted(slots.values(), key=uses.__getitem__)
