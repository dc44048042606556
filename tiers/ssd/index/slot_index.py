# SPDX-License-Identifier: Apache-2.0
"""The index in memory: the block of each slot, the free slots, and the reads under way.

It answers every look-up of the store; the index on disk is its copy for the next start. A slot is
never written while a row on the disk or a reader refers to its earlier block. Its states:

    free → allocate → (written, row committed) → publish → in use ⇄ pin/unpin
      ↑                                                       │ forget (evicted, dropped, damaged)
      └── release: row gone from the disk, and no pins ←── leaving

A million blocks would take gigabytes as objects. So arrays, by slot number, hold the fields of the
slots, and one dict maps keys to slots.

The order of last use is always kept, because the disk stores it. It is also the order of eviction,
unless a policy chooses the victims (`choose_by`). A policy is told of each use, insert and removal.

In memory only; its owner calls it under one lock.
"""

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

# Most blocks forgotten by name whose records `wait_forgotten` erases.
_MOST_DROPPED = 16384
# Share of the slots that blocks under a hold may take.
HELD_SHARE = 0.5
LAST_GENERATION = 2**64 - 1  # the largest that fits into a row


class Entry(NamedTuple):
    """A block on the disk at the time of the call. `encoded_bytes` is as in its row."""

    key: bytes
    slot: int
    generation: int
    encoded_bytes: int = 0


class Commit(NamedTuple):
    """Rows to write, entries whose rows are to be removed, and the number of evicted blocks."""

    rows: list[Row]
    leaving: list[Entry]
    num_evicted: int


class SlotIndex:
    """Blocks by key, over slots 0 to `num_slots - 1`. `rows`: see `LoadedRows`."""

    def __init__(self, num_slots: int, rows: Iterable[RowBatch] = ()) -> None:
        self._recency = SlotList(num_slots)  # in use, the coldest first
        loaded = LoadedRows(num_slots, rows, self._recency)
        self.num_slots = num_slots
        self.free = FreeSlots(loaded.free_flags)
        self.learns = False  # whether `observe_chain` does anything
        self._slots = loaded.slots
        self._keys = loaded.keys  # None where free or only allocated
        self._generations = loaded.generations
        self._encoded_bytes = loaded.encoded_bytes
        self._pins = array("I", bytes(4 * num_slots))
        self._row_gone = bytearray(num_slots)  # 1: row gone; free when its last reader is done
        self._leaving = loaded.leaving
        self._dropped: deque[tuple[int, int]] = deque(maxlen=_MOST_DROPPED)  # slot, generation
        self._unsaved = SlotList(num_slots)  # used since their rows were written, in order of use
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
        """True while rows wait to be removed from the disk."""
        return bool(self._leaving)

    def choose_by(self, policy: EvictionPolicy) -> None:
        """Let this empty policy choose the victims from now on. Tell it all blocks by last use."""
        policy.insert(self._keys[slot] or b"" for slot in self._recency)
        self._policy = policy
        self.learns = policy.learns

    def observe_chain(self, chain: Sequence[bytes], now: float) -> None:
        if self._policy is not None:
            self._policy.observe(chain, now)

    def keys(self) -> list[bytes]:
        return list(self._slots)

    def retain_keys(self, keys: Sequence[bytes], until: float, now: float) -> int:
        """Keep known blocks, given head first, from eviction until `until` (seconds, monotonic).
        Return how many of the first blocks are kept. At most HELD_SHARE of the slots are held."""
        leading = list(takewhile(self._slots.__contains__, keys))
        held = self._holds.create_hold(leading, until, now).keys
        self.touch(held)  # so that the search for victims meets others first
        return len(held)

    def coldest_slots(self, limit: int) -> list[int]:
        """Up to `limit` slots in use, least recently used first."""
        return list(islice(self._recency, limit))

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note uses of keys, head first: a chain's tail is evicted first. Ignores unknown keys."""
        known = self._slots
        tail_first = [key for key in keys if key in known][::-1]
        slots = [known[key] for key in tail_first]
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
        """Hide an entry; False if it was hidden already. `by_name` notes it for `take_dropped`."""
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
        """Note a block forgotten by name whose allocated slot will not be published. Its record may
        be in the slot. See `take_dropped`."""
        self._keys[entry.slot], self._generations[entry.slot] = entry.key, entry.generation
        self._dropped.append((entry.slot, entry.generation))

    def forget_up_to(self, generation: int) -> None:
        """Hide all blocks written up to this generation."""
        generations = self._generations
        self._leave([slot for slot in self._slots.values() if generations[slot] <= generation])

    def has_leaving_after(self, generation: int) -> bool:
        """True while rows of a later generation wait to be removed from the disk."""
        return any(self._generations[slot] > generation for slot in self._leaving)

    def take_dropped(self, after: int) -> list[int]:
        """Return free slots that still hold the record of a block that was forgotten by name and
        written after that generation. Only the latest `_MOST_DROPPED` of these are known. Slots
        that are being read now are for a later call."""
        dropped, generations = list(self._dropped), self._generations
        there = [each for each in dropped if after < each[1] == generations[each[0]]]
        self._dropped.clear()
        self._dropped.extend(each for each in there if each[0] not in self.free)  # being read
        return [slot for slot, _ in there if slot in self.free]

    def dropped_keys(self) -> tuple[list[bytes], bool]:
        """Return the blocks forgotten by name whose rows or records may still be on the disk, and
        whether the list is complete (False: it was full and may have lost some)."""
        keys, generations = self._keys, self._generations
        found = [
            keys[slot] for slot, generation in self._dropped if generations[slot] == generation
        ]
        return [key for key in found if key is not None], len(self._dropped) < _MOST_DROPPED

    def make_room(self, count: int) -> int:
        """Evict until `count` slots are, or will be, free. Return the number of evicted blocks."""
        wanted = count - self.free.count
        for slot in self._leaving:
            if wanted <= 0:
                return 0
            wanted -= not self._pins[slot]
        victims = self._victims(max(0, wanted))
        self._leave(victims)
        return len(victims)

    def take_leaving(self, limit: int | None = None) -> list[Entry]:
        """Take entries whose rows must go; each ends with `free_entries` or `keep_leaving`."""
        slots = self._leaving[:limit]
        del self._leaving[:limit]
        return [self._entry(slot) for slot in slots]

    def keep_leaving(self, entries: Sequence[Entry]) -> None:
        """Mark entries for a later removal. Their rows could not be removed, or their commit failed
        and may have left rows on the disk."""
        for entry in entries:
            self._generations[entry.slot] = entry.generation
            self._leaving.append(entry.slot)

    def free_entries(self, entries: Iterable[Entry]) -> None:
        """Free the slots of entries whose rows are gone, at once or after their last reader."""
        row_gone, pins, keys = self._row_gone, self._pins, self._keys
        free = []
        for entry in entries:
            slot = entry.slot
            if pins[slot]:
                row_gone[slot] = 1  # and free when it is unpinned
            else:
                keys[slot] = None
                free.append(slot)
        self.free.add_these(free)

    def allocate(self, count: int) -> list[int]:
        """Take up to `count` free slots, the lowest, ascending, so that many are neighbours."""
        return self.free.pop_lowest(count)

    def give_back(self, slots: Sequence[int]) -> None:
        self.free.add_these(slots)

    def plan_commit(
        self, entries: Sequence[Entry], num_ahead: int, limit: int, *, with_uses: bool
    ) -> Commit:
        """The next commit: rows for entries about to be published, given head first, up to `limit`
        removals, and with `with_uses` up to `limit` last uses. Evicts until `num_ahead` slots will
        be free."""
        rows = self.touched_rows(limit) if with_uses else []
        last = self._next_use + len(entries)
        uses = range(last, self._next_use, -1)  # the head is used last
        self._next_use = last
        rows += [
            Row(slot, key, generation, use, encoded_bytes)
            for (key, slot, generation, encoded_bytes), use in zip(entries, uses, strict=True)
        ]
        num_evicted = self.make_room(num_ahead)
        return Commit(rows, self.take_leaving(limit) if rows else [], num_evicted)

    def publish(self, entries: Sequence[Entry]) -> None:
        """Make entries known, given head first. In a durable store their rows are on the disk."""
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
        """Up to `limit` rows with a last use that is not on the disk, oldest use first."""
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
        """Up to `count` slots to evict; none of them is being read or held."""
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
        """Hide these blocks. Their slots keep the keys until they are free."""
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
