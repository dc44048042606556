# SPDX-License-Identifier: Apache-2.0
"""SlabIndex: a slab's index in shared memory, for a process that serves the slab to other engines.

    engine   SlabIndex    publish, retract ──► records, journal ──► SlabReader    server
             is_held      ◄── times until which slots are kept ◄── hold

The engine and the server never wait for each other. The engine writes a few bytes for each block
that is committed or removed, and evicts no block before the end of its hold. A hold ends at a given
time, so a server that dies leaves no lasting hold. A block may be evicted after the server has read
its record and before the server holds its slot. So the server reads the record again once it holds
the slot, and the engine that loads the block compares the digest.

    header    magic, slots, journal entries; epoch; number of journal entries written
    journal   a ring: the slot whose record has changed, or _ALL
    records   sequence (odd while it changes), epoch, key, tag, digest
    holds     a time for each slot, of CLOCK_MONOTONIC, which all processes of a host share"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..block import KEY_BYTES
from ..errors import TierConfigError
from ..tag import TAG_BYTES, Proof
from .shared_memory import SharedMemory

# The longest hold that the engine respects, equal to the longest lease. The engine ignores longer
# holds, which the serving process could write.
MAX_HOLD_SECONDS = 3600.0

_MAGIC = 0x5354524B564C4958
_HEADER = struct.Struct("=QQQ")  # magic, slots, journal entries
_COUNT = struct.Struct("=Q")
_EPOCH_AT, _HEAD_AT, _HEADER_BYTES = 24, 32, 64
_RECORD = struct.Struct(f"=QQ{KEY_BYTES}s{TAG_BYTES}s{TAG_BYTES}s")
_LEAST_JOURNAL = 1024
_ALL = 2**32 - 1  # a journal entry: records of earlier epochs are void
_VOID = (bytes(KEY_BYTES), bytes(TAG_BYTES), bytes(TAG_BYTES))


class _Shape:
    """The byte offsets of the parts of the shared memory."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        # A power of two, for two changes of each slot; after more, a reader reads all records.
        self.num_entries = max(_LEAST_JOURNAL, 1 << (2 * num_slots - 1).bit_length())
        self.records_at = _HEADER_BYTES + 4 * self.num_entries
        self.holds_at = self.records_at + _RECORD.size * num_slots
        self.size = self.holds_at + 8 * num_slots

    def record_at(self, slot: int) -> int:
        return self.records_at + _RECORD.size * slot


class SlabIndex:
    """The engine's side of the index, which writes it. All calls are made under the slab's lock."""

    def __init__(self, num_slots: int) -> None:
        self._shape = shape = _Shape(num_slots)
        shared = SharedMemory(
            "stratakv-slab-index", shape.size, huge_pages=False, threads=1, progress=None
        )
        self.fd, self._map = shared.fd, shared.map
        self._memory = memoryview(self._map)
        self._journal = self._memory[_HEADER_BYTES : shape.records_at].cast("I")
        self._holds = self._memory[shape.holds_at : shape.size].cast("d")
        self._own_holds: dict[int, float] = {}
        self.is_read = True  # whether a process may be serving the slab
        self._sequences = [0] * num_slots
        self._published = [False] * num_slots
        self._epoch = 1
        self._head = 0
        _HEADER.pack_into(self._memory, 0, _MAGIC, num_slots, shape.num_entries)
        _COUNT.pack_into(self._memory, _EPOCH_AT, self._epoch)

    def publish(self, slot: int, key: bytes, proof: Proof) -> None:
        self._write_record(slot, self._epoch, key, *proof)
        self._published[slot] = True

    def retract(self, slot: int) -> None:
        """Invalidate the record of a slot, because the slot's block is removed."""
        if self._published[slot]:
            self._published[slot] = False
            self._write_record(slot, 0, *_VOID)

    def clear(self) -> None:
        """Invalidate all records by starting a new epoch."""
        self._epoch += 1
        _COUNT.pack_into(self._memory, _EPOCH_AT, self._epoch)
        self._append_journal(_ALL)

    def retain_slots(self, slots: Sequence[int], until: float, most: int) -> None:
        """Protect slots, up to `most`, by the engine's holds until `until` (monotonic seconds)."""
        now = time.monotonic()
        held = {slot: end for slot, end in self._own_holds.items() if end > now}
        for slot in slots:
            if slot in held or len(held) < most:
                held[slot] = max(held.get(slot, 0.0), until)
        self._own_holds = held

    def is_held(self, slot: int) -> bool:
        """Whether the slot is protected from eviction now."""
        own, others = self._own_holds.get(slot, 0.0), self._holds[slot]
        if not own and not others:
            return False
        now = time.monotonic()
        return own > now or now < others <= now + MAX_HOLD_SECONDS

    def release_all(self) -> None:
        """End all holds of the serving process, because that process has ended."""
        self.is_read = False
        self._memory[self._shape.holds_at : self._shape.size] = bytes(8 * self._shape.num_slots)

    def close(self) -> None:
        for view in (self._journal, self._holds, self._memory):
            view.release()
        self._map.close()

    def _write_record(self, slot: int, epoch: int, key: bytes, tag: bytes, digest: bytes) -> None:
        at, sequence = self._shape.record_at(slot), self._sequences[slot] + 2
        self._sequences[slot] = sequence
        _COUNT.pack_into(self._memory, at, sequence - 1)
        _RECORD.pack_into(self._memory, at, sequence - 1, epoch, key, tag, digest)
        _COUNT.pack_into(self._memory, at, sequence)
        self._append_journal(slot)

    def _append_journal(self, entry: int) -> None:
        self._journal[self._head & (self._shape.num_entries - 1)] = entry
        self._head += 1
        _COUNT.pack_into(self._memory, _HEAD_AT, self._head)


@dataclass(slots=True)
class Changes:
    """The keys that were added and removed since the last `refresh`, without duplicates."""

    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A block in a held slot."""

    slot: int
    proof: Proof


@dataclass(slots=True)
class _Known:
    slot: int
    sequence: int
    proof: Proof


class SlabReader:
    """The server's side, which reads the index. Holds up to `share` of all slots. Thread-safe."""

    def __init__(self, fd: int, num_slots: int, share: float) -> None:
        self.num_slots = num_slots
        self._shape = shape = _Shape(num_slots)
        self._map = mmap.mmap(fd, shape.size)
        self._memory = memoryview(self._map)
        if _HEADER.unpack_from(self._memory) != (_MAGIC, num_slots, shape.num_entries):
            raise TierConfigError(f"this is no index of a slab of {num_slots} slots")
        self._journal = self._memory[_HEADER_BYTES : shape.records_at].cast("I")
        self._holds = self._memory[shape.holds_at : shape.size].cast("d")
        self._lock = threading.Lock()
        self._by_key: dict[bytes, _Known] = {}
        self._key_of: dict[int, bytes] = {}
        self._seen = 0  # number of journal entries read
        self._held: Counter[int] = Counter()
        self._most_held = max(1, int(share * num_slots))
        # The holds of an earlier serving process are void.
        self._memory[shape.holds_at : shape.size] = bytes(8 * num_slots)

    def __len__(self) -> int:
        return len(self._by_key)

    def refresh(self) -> Changes:
        """Read the changes of the index since the last call."""
        changes = Changes()
        with self._lock:
            head = self._read_counter(_HEAD_AT)
            if head == self._seen:
                return changes
            if head - self._seen >= self._shape.num_entries:
                self._look_at_all(changes)
            else:
                mask = self._shape.num_entries - 1
                entries = [self._journal[i & mask] for i in range(self._seen, head)]
                # If journal entries may have been overwritten meanwhile, all records are read.
                if (
                    self._read_counter(_HEAD_AT) - self._seen >= self._shape.num_entries
                    or _ALL in entries
                ):
                    self._look_at_all(changes)
                else:
                    for slot in dict.fromkeys(entries):
                        self._look_at(slot, changes)
            self._seen = head
        return changes

    def lookup(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each block whether it was in the slab at the last `refresh`."""
        known = self._by_key
        return [key in known for key in keys]

    def acquire_blocks(self, keys: Sequence[bytes], until: float) -> list[Found | None]:
        """Protect blocks from eviction until `until` (monotonic seconds) or `release_slots`. Return
        None for a block that is not in the slab or for which no more slots may be held."""
        found: list[Found | None] = []
        with self._lock:
            for key in keys:
                known = self._by_key.get(key)
                is_new = known is not None and known.slot not in self._held
                if known is None or (is_new and len(self._held) >= self._most_held):
                    found.append(None)
                    continue
                self._holds[known.slot] = max(self._holds[known.slot], until)
                if self._read_counter(self._shape.record_at(known.slot)) != known.sequence:
                    if is_new:
                        self._holds[known.slot] = 0.0
                    found.append(None)
                    continue
                self._held[known.slot] += 1
                found.append(Found(known.slot, known.proof))
        return found

    def is_still(self, key: bytes, slot: int) -> bool:
        return self._read_record(slot)[1] == key

    def release_slots(self, slots: Sequence[int]) -> None:
        """Undo one `acquire_blocks` of each slot."""
        with self._lock:
            for slot in slots:
                self._held[slot] -= 1
                if not self._held[slot]:
                    del self._held[slot]
                    self._holds[slot] = 0.0

    @property
    def num_held(self) -> int:
        return len(self._held)

    def close(self) -> None:
        with self._lock:
            for view in (self._journal, self._holds, self._memory):
                view.release()
            self._map.close()

    def _read_counter(self, at: int) -> int:
        number: int = _COUNT.unpack_from(self._memory, at)[0]
        return number

    def _look_at_all(self, changes: Changes) -> None:
        before = set(self._by_key)
        self._by_key.clear()
        self._key_of.clear()
        found = Changes()
        for slot in range(self._shape.num_slots):
            self._look_at(slot, found)
        changes.stored = [key for key in self._by_key if key not in before]
        changes.removed = [key for key in before if key not in self._by_key]
        changes.cleared = bool(before) and len(changes.removed) == len(before)

    def _look_at(self, slot: int, changes: Changes) -> None:
        sequence, key, proof = self._read_record(slot)
        old = self._key_of.pop(slot, None)
        if old is not None and old != key and self._by_key[old].slot == slot:
            del self._by_key[old]
            changes.removed.append(old)
        if key is None:
            return
        other = self._by_key.get(key)
        if other is not None and other.slot != slot:  # the block moved; its old slot changes later
            self._key_of.pop(other.slot, None)
        self._by_key[key] = _Known(slot, sequence, proof)
        self._key_of[slot] = key
        if other is None:
            changes.stored.append(key)

    def _read_record(self, slot: int) -> tuple[int, bytes | None, Proof]:
        at = self._shape.record_at(slot)
        sequence, epoch, key, tag, digest = _RECORD.unpack_from(self._memory, at)
        # A record that is being written counts as void; the record's journal entry follows.
        is_whole = not sequence % 2 and self._read_counter(at) == sequence
        is_there = is_whole and epoch and epoch == self._read_counter(_EPOCH_AT)
        return sequence, key if is_there else None, Proof(tag, digest)
