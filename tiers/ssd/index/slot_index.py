# SPDX-License-Identifier: Apache-2.0
"""SlotIndex: in memory, the block in each slot, the free slots, and the slots being read.

Every look-up of the store uses this index; the index on disk is a copy for the next start. A slot
is never written while a row on the disk or a reader refers to its earlier block. A slot's states:

    free → allocate → (written, row committed) → publish → in use ⇄ pin/unpin
      ↑                                                       │ forget (evicted, dropped, damaged)
      └── release: row gone from the disk, and no pins ←── leaving

Arrays, indexed by slot, hold the fields of all blocks, and one dict maps keys to slots, because a
million Python objects would take gigabytes.

The index always keeps the order of last use, which the index on disk stores. The order of last use
is also the order of eviction, unless an eviction policy chooses the victims (`choose_by`). The
index passes each use, insert and removal to the policy.

The index does no I/O. Its owner calls all methods under one lock."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from ...holds import Holds
from ...policies.base import EvictionPolicy
from .index_file import Row, RowBatch
from .loaded_rows import LoadedRows
from .slot_sets import FreeSlots, SlotList

# The most dropped blocks whose records `wait_forgotten` can erase.
_MOST_DROPPED = 16384
# The largest share of the slots that held blocks may take.
HELD_SHARE = 0.5
LAST_GENERATION = 2**64 - 1  # the largest number that fits into a row


class Entry(NamedTuple):
    """A block on the disk when the entry was made. `encoded_bytes` is that of the block's row."""

    key: bytes
    slot: int
    generation: int
    encoded_bytes: int = 0


class Commit(NamedTuple):
    """A planned commit: rows to write, entries with rows to remove, number of evicted blocks."""

    rows: list[Row]
    leaving: list[Entry]
    num_evicted: int


class SlotIndex:
    """The blocks in slots 0 to `num_slots - 1`, by key. `LoadedRows` explains `rows`."""

    def __init__(self, num_slots: int, rows: Iterable[RowBatch] = ()) -> None:
        self._recency = SlotList(num_slots)  # slots in use, the coldest first
        loaded = LoadedRows(num_slots, rows, self._recency)
        self.num_slots = num_slots
        self.free = FreeSlots(loaded.free_flags)
        self.learns = False  # whether `observe_chain` has an effect
        self._slots = loaded.slots
        self._keys = loaded.keys  # by slot; None: free or only allocated
        self._generations = loaded.generations
        self._encoded_bytes = loaded.encoded_bytes
        self._pins = array("I", bytes(4 * num_slots))
        self._row_gone = bytearray(num_slots)  # 1: row removed, slot free after its last read
        self._leaving = loaded.leaving
        self._dropped: deque[tuple[int, int]] = deque(maxlen=_MOST_DROPPED)  # slot, generation
        self._unsaved = SlotList(num_slots)  # used after their rows were written
        self._next_use = loaded.last_use
        self._policy: EvictionPolicy | None = None  # None: the order of last use
        self._holds = Holds(int(HELD_SHARE * num_slots))

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: object) -> bool:
        return key in self._slots

    def known(self, keys: Iterable[bytes]) -> list[bytes]:
        slots = self._slots
        return [key for key in keys if key in slots]

    @property
    def has_leaving(self) -> bool:
        """Whether rows of evicted or dropped blocks must still be removed from the disk."""
        return bool(self._leaving)

    def choose_by(self, policy: EvictionPolicy) -> None:
        """Evict by `policy`, which is empty, from now on. Insert all blocks by last use."""
        policy.insert(self._keys[slot] or b"" for slot in self._recency)
        self._policy = policy
        self.learns = policy.learns

    def observe_chain(self, chain: Sequence[bytes], now: float) -> None:
        if self._policy is not None:
            self._policy.observe(chain, now)

    def keys(self) -> list[bytes]:
        return list(self._slots)

    def retain_keys(self, keys: Sequence[bytes], until: float, now: float) -> int:
        """Protect known blocks, given head first, from eviction until `until` (monotonic seconds).
        Return how many leading blocks are protected. At most HELD_SHARE of the slots are held."""
        leading = list(takewhile(self._slots.__contains__, keys))
        held = self._holds.create_hold(leading, until, now).keys
        self.touch(held)  # other blocks are then searched first for victims
        return len(held)

    def coldest_slots(self, limit: int) -> list[int]:
        return list(islice(self._recency, limit))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Record uses, given head first, so that a tail is evicted first. Ignores unknown keys."""
        known = self._slots
        tail_first = [key for key in keys if key in known][::-1]
        slots = [known[key] for key in tail_first]
        self._recency.move_all_to_end(slots)
        self._unsaved.move_all_to_end(slots)
        if self._policy is not None:
            self._policy.touch(tail_first)

    def pin(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return each key's entry, or None, and keep its slot from reuse until `unpin`."""
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
        """Hide a block; False if it was hidden. With `by_name`, `take_dropped` returns it."""
        slot = self._slots.get(entry.key)
        if slot != entry.slot or self._generations[slot] != entry.generation:
            return False
        if by_name:
            self._dropped.append((slot, entry.generation))
        self._leave((slot,))
        return True

    def forget_key(self, key: bytes) -> bool:
        """Hide a block from look-ups; `take_dropped` returns it later. False for an unknown key."""
        slot = self._slots.get(key)
        if slot is None:
            return False
        self._dropped.append((slot, self._generations[slot]))
        self._leave((slot,))
        return True

    def note_dropped(self, entry: Entry) -> None:
        """Record for `take_dropped` a dropped block whose slot will not be published. The slot may
        hold the block's record."""
        self._keys[entry.slot], self._generations[entry.slot] = entry.key, entry.generation
        self._dropped.append((entry.slot, entry.generation))

    def forget_up_to(self, generation: int) -> None:
        """Hide from look-ups all blocks of `generation` and of earlier generations."""
        generations = self._generations
        self._leave([slot for slot in self._slots.values() if generations[slot] <= generation])

    def has_leaving_after(self, generation: int) -> bool:
        """Whether rows later than `generation` must still be removed from the disk."""
        return any(self._generations[slot] > generation for slot in self._leaving)

    def take_dropped(self, after: int) -> list[int]:
        """Return the free slots that still hold the record of a dropped block of a generation later
        than `after`. Only the latest `_MOST_DROPPED` dropped blocks are recorded. Slots that are
        being read are left for a later call."""
        dropped, generations = list(self._dropped), self._generations
        there = [each for each in dropped if after < each[1] == generations[each[0]]]
        self._dropped.clear()
        self._dropped.extend(each for each in there if each[0] not in self.free)  # slots being read
        return [slot for slot, _ in there if slot in self.free]

    def dropped_keys(self) -> tuple[list[bytes], bool]:
        """Return the keys of dropped blocks whose rows or records may still be on the disk, and
        whether the list is complete. A list of `_MOST_DROPPED` blocks may lack older blocks."""
        keys, generations = self._keys, self._generations
        found = [
            keys[slot] for slot, generation in self._dropped if generations[slot] == generation
        ]
        return [key for key in found if key is not None], len(self._dropped) < _MOST_DROPPED

    def make_room(self, count: int) -> int:
        """Evict until `count` slots are free or leaving. Return the number of evicted blocks."""
        wanted = count - self.free.count
        for slot in self._leaving:
            if wanted <= 0:
                return 0
            wanted -= not self._pins[slot]
        victims = self._victims(max(0, wanted))
        self._leave(victims)
        return len(victims)

    def take_leaving(self, limit: int | None = None) -> list[Entry]:
        """Take entries whose rows must be removed, and must be passed to `free_entries` or
        `keep_leaving`."""
        slots = self._leaving[:limit]
        del self._leaving[:limit]
        return [self._entry(slot) for slot in slots]

    def keep_leaving(self, entries: Sequence[Entry]) -> None:
        """Mark entries whose rows must be removed later, because the removal failed, or the commit
        of the entries failed and may have left rows on the disk."""
        for entry in entries:
            self._generations[entry.slot] = entry.generation
            self._leaving.append(entry.slot)

    def free_entries(self, entries: Iterable[Entry]) -> None:
        """Free the slots of entries with removed rows: at once, or after the last read."""
        row_gone, pins, keys = self._row_gone, self._pins, self._keys
        free = []
        for entry in entries:
            slot = entry.slot
            if pins[slot]:
                row_gone[slot] = 1  # the slot is free when unpinned
            else:
                keys[slot] = None
                free.append(slot)
        self.free.add_these(free)

    def allocate(self, count: int) -> list[int]:
        """Take up to `count` free slots, the lowest first, so that many are neighbours."""
        return self.free.pop_lowest(count)

    def give_back(self, slots: Sequence[int]) -> None:
        self.free.add_these(slots)

    def plan_commit(
        self, entries: Sequence[Entry], num_ahead: int, limit: int, *, with_uses: bool
    ) -> Commit:
        """Plan the next commit: rows for entries about to be published, given head first; up to
        `limit` removals of rows; and with `with_uses` up to `limit` last uses. Evicts blocks until
        `num_ahead` slots will be free."""
        rows = self.touched_rows(limit) if with_uses else []
        last = self._next_use + len(entries)
        uses = range(last, self._next_use, -1)  # the head has the latest use
        self._next_use = last
        rows += [
            Row(slot, key, generation, use, encoded_bytes)
            for (key, slot, generation, encoded_bytes), use in zip(entries, uses, strict=True)
        ]
        num_evicted = self.make_room(num_ahead)
        return Commit(rows, self.take_leaving(limit) if rows else [], num_evicted)

    def publish(self, entries: Sequence[Entry]) -> None:
        """Let look-ups find entries, given head first. If durable, their rows are on the disk."""
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
        """Return up to `limit` rows of blocks with last uses not on the disk, oldest first."""
        rows = []
        slots = list(islice(self._unsaved, limit))
        self._unsaved.discard_all(slots)
        for slot in slots:
            self._next_use += 1
            rows.append(self._row(slot, self._next_use))
        return rows

    def iter_by_use(self) -> Iterator[Row]:
        """Yield a row for every block, least recently used first, with last uses 1, 2, 3, ..."""
        for use, slot in enumerate(self._recency, 1):
            yield self._row(slot, use)

    def _entry(self, slot: int) -> Entry:
        key = self._keys[slot] or b""
        return Entry(key, slot, self._generations[slot], self._encoded_bytes[slot])

    def _row(self, slot: int, use: int) -> Row:
        key = self._keys[slot] or b""
        return Row(slot, key, self._generations[slot], use, self._encoded_bytes[slot])

    def _victims(self, count: int) -> list[int]:
        """Return up to `count` slots to evict, without slots that are being read or held."""
        if self._holds.times:
            self._holds.expire(time.monotonic())
        if self._policy is None:
            pins, keys, held = self._pins, self._keys, self._holds.times
            unread = (s for s in self._recency if not pins[s] and keys[s] not in held)
            return list(islice(unread, count))
        return [self._slots[key] for key in self._policy.victims(count, self._is_unread)]

    def _is_unread(self, key: bytes) -> bool:
        return not self._pins[self._slots[key]] and key not in self._holds.times

    def _leave(self, slots: Sequence[int]) -> None:
        """Hide the blocks in `slots` from look-ups. A slot keeps its key until it is free."""
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
            self.free.add_these((slot,))
