# SPDX-License-Identifier: Apache-2.0
"""The CPU slab: a region of host memory divided into slots, each for one block.

The memory is allocated at the start, as shared memory: another process on the host can map the
slots from `fd`. The caller fills and reads the slots (`reserve`/`commit`, `pin`/`unpin`).

    unknown → reserve → reserved → commit → committed ⇄ pinned
       ↑                   └─ not kept ─┐       │
       └────────────────────────────────┴───────┘ evicted or dropped, never while pinned

With an index (`slab_index.py`), another process can serve the slab's blocks to other engines. That
process protects slots from eviction while it reads them."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, KeysView, Sequence

from ..base import Answer, SlabTier, TierStats
from ..block import BlockLayout
from ..errors import InvalidBlock, TierClosed, TierConfigError
from ..holds import Hold, Holds
from ..policies.base import EvictionPolicy
from ..policies.lru import LruPolicy
from ..settings.sizes import show_size
from ..tag import Proof, Proofs
from .shared_memory import Progress, SharedMemory
from .slab_index import SlabIndex

log = logging.getLogger(__name__)


_FORGOTTEN = -1  # the epoch of a block that was forgotten by key
# Largest share of the slots for blocks that `keep` protects for other engines.
KEPT_SHARE = 0.5
# Largest share of the slots for blocks that `hold` protects for a conversation's next request.
HELD_SHARE = 0.4


class _Slot:
    """The slot of a known key, and its state."""

    __slots__ = ("committed", "epoch", "index", "is_unwanted", "pins", "proof")

    def __init__(self, index: int) -> None:
        self.index = index
        self.pins = 0
        self.committed = False
        self.is_unwanted = False  # forgotten before it was committed
        self.proof: Proof | None = None
        self.epoch = 0  # the slab's epoch at the commit


class CpuSlab(SlabTier):
    """Slots of `layout.slot_bytes` in shared memory. Calls are thread-safe, and O(1) for each key.
    Raises TierConfigError if the capacity is less than a block or the host lacks the memory."""

    def __init__(
        self,
        layout: BlockLayout,
        capacity_bytes: int,
        *,
        populate_threads: int = 2,
        progress: Progress | None = None,
        policy: EvictionPolicy | None = None,
        huge_pages: bool = False,
        is_served: bool = False,
    ) -> None:
        self.name = "cpu"
        self.layout = layout
        self._slot_bytes, self._page_bytes = layout.slot_bytes, layout.page_bytes
        self.num_slots = capacity_bytes // self._slot_bytes
        if not self.num_slots:
            raise TierConfigError(
                f"the CPU tier needs at least {show_size(layout.slot_bytes)} for one block, "
                f"not {show_size(capacity_bytes)}"
            )
        shared = SharedMemory(
            "stratakv-slab",
            self.num_slots * layout.slot_bytes,
            huge_pages=huge_pages,
            threads=populate_threads,
            progress=progress,
        )
        self.fd, self._map, self.has_huge_pages = shared.fd, shared.map, shared.is_huge
        # Huge pages may reach beyond the last slot.
        self._memory = memoryview(self._map)[: self.num_slots * layout.slot_bytes]
        self._lock = threading.Lock()
        self._slots: dict[bytes, _Slot] = {}
        self._free = list(range(self.num_slots - 1, -1, -1))  # popped in ascending order
        self._policy = LruPolicy() if policy is None else policy  # holds the committed keys
        self.learns = self._policy.learns
        self._stats = TierStats(capacity_bytes=capacity_bytes, capacity_blocks=self.num_slots)
        self._epoch = 0  # blocks of earlier epochs are forgotten
        self._holds = Holds(int(HELD_SHARE * self.num_slots))
        self._num_forgotten = 0  # upper bound of forgotten blocks whose slots are not free
        self._closed = False
        self.is_served = is_served
        self.index = SlabIndex(self.num_slots) if is_served else None

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        hit, miss = Answer.HIT, Answer.MISS  # local names: attribute look-ups are slow
        with self._lock:
            known, epoch = self._slots.get, self._epoch
            return [
                miss
                if (slot := known(key)) is None
                else hit
                if slot.committed and slot.epoch == epoch
                else self._lookup_slot(key)
                for key in keys
            ]

    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        optional: bool = False,
        spared: Callable[[bytes], bool] | None = None,
        evicted: list[bytes] | None = None,
    ) -> list[int | None]:
        """See SlabTier. The call evicts no block of `keys`."""
        with self._lock:
            if self._num_forgotten:
                known = [key for key in dict.fromkeys(keys) if key in self._slots]
                self._free_forgotten([key for key in known if self._is_forgotten(key)])
            unknown = [key for key in dict.fromkeys(keys) if key not in self._slots]
            wanted = frozenset(keys).difference(unknown)
            gone = self._make_room(unknown, wanted, optional, spared)
            if evicted is not None:
                evicted += gone
            indices: list[int | None] = []
            for key in keys:
                if key in self._slots or not self._free:
                    self._stats.dropped_stores += key not in self._slots
                    indices.append(None)
                    continue
                slot = self._slots[key] = _Slot(self._free.pop())
                indices.append(slot.index)
            self._stats.reserved_blocks += len(indices) - indices.count(None)
            return indices

    def commit(
        self, keys: Sequence[bytes], ok: Sequence[bool], proofs: Proofs | None = None
    ) -> list[bytes]:
        """See SlabTier. Raises InvalidBlock, changing nothing, for a key not reserved."""
        with self._lock:
            slots = [self._slots.get(key) for key in keys]
            if len(keys) != len(ok) or any(slot is None or slot.committed for slot in slots):
                raise InvalidBlock("commit takes reserved keys and one verdict for each")
            published = []
            given = [None] * len(keys) if proofs is None else proofs
            for key, slot, kept, proof in zip(keys, slots, ok, given, strict=True):
                assert slot is not None
                if not kept or slot.is_unwanted:
                    self._free_slot(key, slot)
                    continue
                slot.committed, slot.epoch, slot.proof = True, self._epoch, proof
                published.append(key)
                if self.index is not None and proof is not None:
                    self.index.publish(slot.index, key, proof)
            self._stats.reserved_blocks -= len(keys)
            self._policy.insert(reversed(published))
            self._stats.stored_blocks += len(published)
            self._stats.stored_bytes += len(published) * self._page_bytes
            return published

    def withhold(self, keys: Sequence[bytes]) -> list[int]:
        """See SlabTier. Raises InvalidBlock for a key that is not reserved."""
        with self._lock:
            slots = [self._slots.get(key) for key in keys]
            if any(slot is None or slot.committed for slot in slots):
                raise InvalidBlock("withhold takes reserved keys")
            self._stats.reserved_blocks -= len(keys)
            return [self._slots.pop(key).index for key in keys]

    def restore(self, slots: Sequence[int]) -> None:
        with self._lock:
            self._free.extend(slots)

    def proofs(self, keys: Sequence[bytes]) -> list[Proof | None]:
        with self._lock:
            slots = map(self._slots.get, keys)
            return [None if slot is None else slot.proof for slot in slots]

    def pin(self, keys: Sequence[bytes], *, touch: bool = True) -> list[int | None]:
        """See SlabTier. Keys are given head first and marked as used tail first. So the tail of a
        chain is evicted first, because it is useless without its head."""
        with self._lock:
            indices: list[int | None] = []
            hits = []
            for key in keys:
                slot = self._slots.get(key)
                if slot is None or not slot.committed or slot.epoch != self._epoch:
                    indices.append(None)
                    continue
                self._stats.pinned_blocks += not slot.pins
                slot.pins += 1
                hits.append(key)
                indices.append(slot.index)
            if touch:
                self._policy.touch(reversed(hits))
                self._stats.hits += len(hits)
                self._stats.misses += len(keys) - len(hits)
                self._stats.loaded_blocks += len(hits)
                self._stats.loaded_bytes += len(hits) * self._page_bytes
            return indices

    def unpin(self, keys: Sequence[bytes]) -> None:
        """See SlabTier. Raises InvalidBlock for a key that is not pinned."""
        with self._lock:
            for key in keys:
                slot = self._slots.get(key)
                if slot is None or not slot.pins:
                    raise InvalidBlock(f"unpin takes pinned keys; {key.hex()} is not pinned")
                slot.pins -= 1
                self._stats.pinned_blocks -= not slot.pins
                if slot.epoch != self._epoch and not slot.pins and not self._is_held(slot):
                    self._free_forgotten([key])

    def keep(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """See SlabTier. Protects at most KEPT_SHARE of the slots; only reports further blocks."""
        with self._lock:
            index = self.index
            if index is None or not index.is_read:
                return [False] * len(keys)
            is_here = [self._lookup_slot(key) is Answer.HIT for key in keys]
            slots = [
                self._slots[key].index for key, here in zip(keys, is_here, strict=True) if here
            ]
            index.retain_slots(slots, time.monotonic() + seconds, int(KEPT_SHARE * self.num_slots))
            return is_here

    def hold(self, keys: Sequence[bytes], seconds: float) -> Hold:
        """See SlabTier. At most HELD_SHARE of the slots are held."""
        now = time.monotonic()
        with self._lock:
            hold = self._holds.create_hold(keys, now + seconds, now)
            known = [key for key in hold.keys if self._lookup_slot(key) is Answer.HIT]
            self._policy.touch(reversed(known))  # the search for victims meets others first
            return hold

    def release(self, hold: Hold) -> None:
        with self._lock:
            self._holds.end_hold(hold)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark committed blocks, given head first, as used now. Counts no hit."""
        with self._lock:
            known = [key for key in keys if self._lookup_slot(key) is Answer.HIT]
            self._policy.touch(reversed(known))

    def buffer(self, slot: int) -> memoryview:
        if not 0 <= slot < self.num_slots:
            raise InvalidBlock(f"the slab has slots 0 to {self.num_slots - 1}, not {slot}")
        size = self._slot_bytes
        return self.memory()[slot * size : (slot + 1) * size]

    def memory(self) -> memoryview:
        if self._closed:
            raise TierClosed("the CPU tier was closed")
        return self._memory

    def free_slots(self) -> int:
        with self._lock:
            return len(self._free)

    def coldest(self, count: int) -> list[bytes]:
        """See SlabTier. Changes nothing. Pinned blocks are left out of the list."""
        with self._lock:
            return self._policy.victims(count, self._is_idle_and_known)

    def may_go_next(self, keys: KeysView[bytes], count: int) -> bool:
        """See SlabTier. Checks one victim more for each pinned block: pinned blocks stay."""
        with self._lock:
            return self._policy.may_be_next(keys, count + self._stats.pinned_blocks)

    def keys(self) -> list[bytes]:
        with self._lock:
            return self._policy.victims(len(self._policy), self._is_known)

    def forget(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            for key in dict.fromkeys(keys):
                slot = self._slots.get(key)
                if slot is None:
                    continue
                if not slot.committed:
                    slot.is_unwanted = True
                elif not slot.pins and not self._is_held(slot):
                    self._num_forgotten -= slot.epoch != self._epoch
                    self._remove_blocks([key])
                elif slot.epoch == self._epoch:
                    slot.epoch = _FORGOTTEN
                    self._num_forgotten += 1
                    self._retract(slot)

    def clear(self) -> None:
        with self._lock:
            self._epoch += 1
            self._holds.clear()
            self._num_forgotten = len(self._policy)
            if self.index is not None:
                self.index.clear()

    def sweep(self, most: int) -> int:
        """See SlabTier. The slot of a pinned block is freed with its last pin. The slot of a block
        that is kept for other engines is freed when a new block needs a slot."""
        with self._lock:
            if not self._num_forgotten:
                return 0
            keys = self._policy.victims(most, self._is_forgotten)
            self._free_forgotten(keys)
            return len(keys)

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        with self._lock:
            self._policy.observe(chain, now)

    def stats(self) -> TierStats:
        with self._lock:
            stats = self._stats
            stats.used_bytes = (self.num_slots - len(self._free)) * self.layout.slot_bytes
            stats.blocks = len(self._policy)
            return stats.copy()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        os.close(self.fd)
        if self.index is not None:
            os.close(self.index.fd)
            self.index.close()
        try:
            self._memory.release()
            self._map.close()
        except BufferError:
            # Unmapping under a reader would crash; the memory is freed with the last view.
            log.warning("the CPU tier was closed while views of its slots were still in use")

    def _lookup_slot(self, key: bytes) -> Answer:
        slot = self._slots.get(key)
        if slot is None:
            return Answer.MISS
        if not slot.committed:
            return Answer.MISS if slot.is_unwanted else Answer.PENDING
        return Answer.HIT if slot.epoch == self._epoch else Answer.MISS

    def _is_idle(self, key: bytes) -> bool:
        slot = self._slots[key]
        if not slot.committed or slot.pins:
            return False
        return self.index is None or not self._is_held(slot)

    def _is_idle_and_not_held(self, key: bytes) -> bool:
        return key not in self._holds.times and self._is_idle(key)

    def _is_held(self, slot: _Slot) -> bool:
        """Whether the slot is protected for other engines; False without an index."""
        return self.index is not None and self.index.is_held(slot.index)

    def _is_known(self, key: bytes) -> bool:
        return self._slots[key].epoch == self._epoch

    def _is_idle_and_known(self, key: bytes) -> bool:
        return self._is_idle(key) and self._is_known(key)

    def _is_forgotten(self, key: bytes) -> bool:
        """Whether a forgotten block's slot is idle, so that it may be freed."""
        return self._is_idle(key) and not self._is_known(key)

    def _make_room(
        self,
        coming: list[bytes],
        wanted: frozenset[bytes],
        optional: bool,
        spared: Callable[[bytes], bool] | None,
    ) -> list[bytes]:
        """Evict until `coming` have slots. Return the evicted blocks, except forgotten ones."""
        count = len(coming) - len(self._free)
        if count <= 0:
            return []
        if self._holds.times:
            self._holds.expire(time.monotonic())
        idle = self._is_idle_and_not_held if self._holds.times else self._is_idle

        def is_free_to_go(key: bytes) -> bool:
            return key not in wanted and idle(key) and not (spared is not None and spared(key))

        may_evict = is_free_to_go if wanted or spared is not None else idle
        if optional:
            victims = self._policy.displaced_by(coming, count, may_evict)
        else:
            victims = self._policy.victims(count, may_evict)
        slots, epoch = self._slots, self._epoch
        known = [key for key in victims if slots[key].epoch == epoch]
        self._remove_blocks(victims)
        self._stats.evicted_blocks += len(known)
        self._num_forgotten -= len(victims) - len(known)
        return known

    def _remove_blocks(self, keys: Sequence[bytes]) -> None:
        self._policy.remove(keys)
        slots = list(map(self._slots.pop, keys))
        for slot in slots if self.index is not None else ():
            self._retract(slot)
        self._free += [slot.index for slot in slots]

    def _free_forgotten(self, keys: Sequence[bytes]) -> None:
        self._remove_blocks(keys)
        self._num_forgotten -= len(keys)

    def _retract(self, slot: _Slot) -> None:
        if self.index is not None:
            self.index.retract(slot.index)

    def _free_slot(self, key: bytes, slot: _Slot) -> None:
        del self._slots[key]
        self._retract(slot)
        self._free.append(slot.index)
