# SPDX-License-Identifier: Apache-2.0
"""PeerStore: serves an engine's slab to other engines through the cache service. Other engines can
load blocks, but can neither store nor delete blocks.

Blocks are sent from their slots. The engine does not evict a block while it is sent or leased
(`slab/slab_index.py`). A block that was evicted just before is a miss."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from ...base import TierStats
from ...block import BlockLayout
from ...errors import TierClosed
from ...hierarchy.hierarchy import StoreTicket
from ...hierarchy.promotions import LoadTicket
from ...slab.slab_index import Found, SlabReader
from ...tag import Proof, Proofs
from ...wire.connection_tags import Tags
from ...wire.frames import State
from ...wire.status import ReadOnly, TooMuch
from ..leases import MAX_LEASES, Lease, Leases, ReadLease, WriteLease
from ..served_store import Listener, ServedStore

log = logging.getLogger(__name__)

# The share of slots that reads and leases may hold; other slots are left to the engine.
HELD_SHARE = 0.5
SLAB = "cpu"  # the name of the only tier
# The protection of a slot that is read, longer than a client waits for a load. A slot that is read
# for longer may get another block, whose digest differs.
READ_SECONDS = 30.0
_LOOK_SECONDS = 0.01  # between two reads of the index, with listeners
_CLOSE_SECONDS = 1.0


class PeerStore(ServedStore):
    """A store over an engine's slab in `slab_fd`, with blocks of `layout`. `reader` reads the
    slab's index, and `tags` makes the tags that other engines expect."""

    is_read_only = True

    def __init__(self, reader: SlabReader, slab_fd: int, layout: BlockLayout, tags: Tags) -> None:
        self.layout = layout
        self.num_slots = reader.num_slots
        self._reader = reader
        self._tags = tags
        size = self.num_slots * layout.slot_bytes
        self._map = mmap.mmap(slab_fd, size, prot=mmap.PROT_READ)
        self._memory = memoryview(self._map)
        self._lock = threading.RLock()
        self._leases = Leases[list[Found]](
            lambda lease: self._release_slots(lease.held), MAX_LEASES
        )
        self._reads: dict[int, list[Found | None]] = {}  # by the `id()` of a read lease
        self._listening = threading.Lock()
        self._listeners: list[Listener] = []
        self._stats = TierStats(capacity_bytes=size, capacity_blocks=self.num_slots)
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None

    @property
    def corrupt_blocks(self) -> int:
        return 0  # no client stores blocks

    @property
    def memory_fd(self) -> int:
        raise ReadOnly("an engine's memory is not lent")

    def try_hold(self) -> bool:
        return self._lock.acquire(blocking=False)

    def let_go(self) -> None:
        self._lock.release()

    def buffer(self, slot: int) -> memoryview:
        start = slot * self.layout.slot_bytes
        return self._memory[start : start + self.page_bytes]

    def lookup(self, keys: Sequence[bytes], *, asked: bool = False) -> list[State]:
        self._check_open()
        with self._lock:
            self._refresh()
        return [State.HIT if there else State.MISS for there in self._reader.lookup(keys)]

    def begin_load(self, keys: Sequence[bytes]) -> ReadLease:
        """Protect the blocks that the slab has from eviction. Does not wait."""
        self._check_open()
        with self._lock:
            self._refresh()
            self._leases.expire()
        found = self._reader.acquire_blocks(keys, time.monotonic() + READ_SECONDS)
        slots = [None if each is None else each.slot for each in found]
        read_lease = ReadLease(list(keys), slots, list(keys), LoadTicket([], [], []))
        self._reads[id(read_lease)] = found
        hits = len(slots) - slots.count(None)
        with self._lock:  # each session has its own thread
            self._stats.hits += hits
            self._stats.loaded_blocks += hits
            self._stats.loaded_bytes += hits * self.page_bytes
            self._stats.misses += len(slots) - hits
        return read_lease

    def wait_loaded(self, read_lease: ReadLease, deadline: float) -> None:
        """Do nothing, because a block is already in the slab or is a miss."""

    def end_load(self, read_lease: ReadLease) -> None:
        self._release_slots(self._reads.pop(id(read_lease), ()))

    def proofs(self, read_lease: ReadLease) -> list[Proof | None]:
        proofs: list[Proof | None] = []
        found = self._reads.get(id(read_lease), [None] * len(read_lease.keys))
        for i, (key, each) in enumerate(zip(read_lease.keys, found, strict=True)):
            proof = None
            if each is not None and self._reader.is_still(key, each.slot):
                proof = self._tags.outgoing(key, each.proof)
            if proof is None:
                read_lease.slots[i] = None
            proofs.append(proof)
        return proofs

    def begin_store(self, keys: Sequence[bytes]) -> WriteLease:
        """Reserve no slot. The state of every block is KEPT or NO_ROOM."""
        states = [
            State.KEPT if state is State.HIT else State.NO_ROOM for state in self.lookup(keys)
        ]
        slots: list[int | None] = [None] * len(keys)
        return WriteLease(list(keys), states, slots, list(keys), StoreTicket([], [], 0))

    def end_store(
        self, write_lease: WriteLease, proofs: Proofs, aborted: Collection[int] = ()
    ) -> list[State]:
        return write_lease.states

    def abandon_store(self, write_lease: WriteLease) -> list[int]:
        return []

    def restore_slots(self, slots: Sequence[int]) -> None:
        """Do nothing, because this store withholds no slots."""

    def check_digests(self, write_lease: WriteLease, proofs: Proofs) -> list[Proof | None]:
        return list(proofs)

    def pin(
        self, keys: Sequence[bytes], seconds: float, deadline: float, owner: str = ""
    ) -> Lease[list[bytes]]:
        """Lease the leading blocks that are in the slab. Raises the errors of `ServedStore.pin`."""
        self._check_open()
        with self._lock:
            self._refresh()
            self._leases.check_room(owner)
            if self._reader.num_held + len(keys) > HELD_SHARE * self.num_slots:
                raise TooMuch(
                    f"{self._reader.num_held} of {self.num_slots} blocks are held already, and "
                    f"{len(keys)} more would leave too few for the engine; load them instead"
                )
            found = self._reader.acquire_blocks(keys, time.monotonic() + seconds)
            leading = next((i for i, each in enumerate(found) if each is None), len(found))
            self._release_slots(found[leading:])
            held = [each for each in found[:leading] if each is not None]
            lease = self._leases.grant_lease(held, seconds, owner)
            if not held:
                self._leases.end_lease(lease)
            return Lease(lease.number, owner, list(keys[:leading]), lease.deadline)

    def unpin(self, number: int, owner: str = "") -> bool:
        with self._lock:
            lease = self._leases.find_lease(number, owner)
            if lease is not None:
                self._leases.end_lease(lease)
                self._release_slots(lease.held)
            return lease is not None

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing, because reads by other engines do not change the engine's eviction order."""

    def drop(self, keys: Sequence[bytes]) -> int:
        """Refuse the deletion. Raises ReadOnly."""
        raise ReadOnly("these blocks are an engine's own, which alone deletes them")

    def clear(self) -> None:
        """Refuse to clear the slab. Raises ReadOnly."""
        self.drop(())

    def subscribe(self, listener: Listener) -> None:
        with self._listening:
            self._listeners = [*self._listeners, listener]
            if self._watcher is None:
                self._watcher = threading.Thread(
                    target=self._watch_index, name="stratakv-peer-watch", daemon=True
                )
                self._watcher.start()

    def unsubscribe(self, listener: Listener) -> None:
        with self._listening:
            self._listeners = [other for other in self._listeners if other is not listener]

    def stats(self) -> dict[str, TierStats]:
        stats = replace(self._stats)
        stats.blocks = len(self._reader)
        stats.used_bytes = stats.blocks * self.layout.slot_bytes
        stats.pinned_blocks = self._reader.num_held
        return {SLAB: stats}

    def close(self, timeout_seconds: float) -> bool:
        """Stop watching the index. The memory is freed when the process ends."""
        self._closed.set()
        if self._watcher is not None:
            self._watcher.join(min(timeout_seconds, _CLOSE_SECONDS))
        return True

    def _release_slots(self, found: Sequence[Found | None]) -> None:
        self._reader.release_slots([each.slot for each in found if each is not None])

    def _refresh(self) -> None:
        """Read the changes in the engine's index, and report them to the listeners."""
        changes = self._reader.refresh()
        for listener in self._listeners:
            if changes.cleared:
                listener.cleared()
            elif changes.removed:
                listener.removed(changes.removed)
            if changes.stored:
                listener.stored(changes.stored)

    def _watch_index(self) -> None:
        """Read the index at intervals until there are no listeners, or until `close`."""
        while not self._closed.wait(_LOOK_SECONDS):
            with self._listening:
                if not self._listeners:
                    self._watcher = None
                    return
            try:
                with self._lock:
                    self._refresh()
            except Exception:  # the thread must go on: no other one reports to watchers
                log.exception("the index of the engine's blocks could not be read")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TierClosed("the engine is going down")
