# SPDX-License-Identifier: Apache-2.0
"""Write-back: takes blocks that only the slab has down to the store below, ahead of their eviction.

While the slab has room nothing is written. Once it fills up, the blocks that came in from the pool
are written, the longest unused first, in batches whose slots stay pinned until the store is done
with them. A store that cannot keep up delays nobody: the slab evicts what it must, and the blocks
lost are counted. Knows nothing of loads or requests, and has no thread: `Hierarchy` drives it from
its own calls and from completions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from itertools import islice

from .base import Answer, SlabTier, StoreTier
from .block import ALIGNMENT
from .errors import TierBusy
from .faults import Faults
from .traffic import Traffic

BATCH_BLOCKS = 64
BATCHES_IN_FLIGHT = 2

# Takes a completion to the thread that owns the slab; may be called from any thread.
Deliver = Callable[[Callable[[], None]], None]


class WriteBack:
    """Moves blocks from `slab` to `store`. `watermark` is the fraction of slots below which free
    slots start the writing; `unpin` gives slots back. Called by one thread."""

    def __init__(
        self,
        slab: SlabTier,
        store: StoreTier,
        *,
        watermark: float,
        deliver: Deliver,
        unpin: Callable[[list[bytes]], None],
        faults: Faults,
        traffic: Traffic,
    ) -> None:
        self._slab = slab
        self._store = store
        self._deliver = deliver
        self._unpin = unpin
        self._faults = faults
        self._traffic = traffic
        self._low_slots = max(1, int(slab.num_slots * watermark))
        # Pinned slots cannot be evicted, so batches in flight hold at most a quarter of the slab.
        self._batch = min(BATCH_BLOCKS, max(1, slab.num_slots // (4 * BATCHES_IN_FLIGHT)))
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._in_flight: set[Future[list[bool]]] = set()
        self._unwanted: set[Future[list[bool]]] = set()  # in flight when all was forgotten

    @property
    def in_flight(self) -> int:
        """Batches being written."""
        return len(self._in_flight)

    @property
    def pending(self) -> bool:
        """Whether anything is still to be written or being written."""
        return bool(self._dirty or self._in_flight)

    def added(self, keys: Sequence[bytes]) -> None:
        """The slab has these blocks, head first, from the pool; the store may lack them."""
        for key in reversed(keys):
            self._dirty[key] = None

    def used(self, keys: Sequence[bytes]) -> None:
        """These blocks, head first, were used, so they are written later than others."""
        if not self._dirty:
            return
        for key in reversed(keys):
            if key in self._dirty:
                self._dirty.move_to_end(key)

    def threatened(self, count: int) -> list[bytes]:
        """Blocks not written yet among those the slab would evict for `count` new ones."""
        excess = count - self._slab.free_slots()
        if excess <= 0 or not self._dirty:
            return []
        return [key for key in self._slab.coldest(excess) if key in self._dirty]

    def evicted(self, threatened: Sequence[bytes]) -> None:
        """The slab has made room: count those of `threatened` that are gone."""
        answers = self._slab.lookup(threatened)
        lost = [k for k, a in zip(threatened, answers, strict=True) if a is not Answer.HIT]
        for key in lost:
            del self._dirty[key]
        self._traffic.lost_blocks += len(lost)
        self._traffic.lost_stores += bool(lost)

    def pump(self, *, reading: bool) -> None:
        """Start batches if the slab is filling up: fewer while somebody waits for a read."""
        allowed = 1 if reading else BATCHES_IN_FLIGHT
        while (
            self._dirty
            and len(self._in_flight) < allowed
            and self._slab.free_slots() < self._low_slots
            and self._write(list(islice(self._dirty, self._batch)))
        ):
            pass

    def flush_some(self) -> bool:
        """Start batches of the most recently used blocks; False where the store is busy."""
        while self._dirty and len(self._in_flight) < BATCHES_IN_FLIGHT:
            if not self._write(list(islice(reversed(self._dirty), self._batch))):
                return False
        return True

    def recheck(self, forgotten: Container[bytes]) -> None:
        """Before a flush: every block of the slab that the store lacks is to be written, except
        `forgotten` ones, but no more than the store has room for, so that late batches do not
        displace earlier ones."""
        self._dirty.clear()
        # A store may spend up to one unit of alignment on a header.
        unit = self._store.layout.slot_bytes + ALIGNMENT
        room = self._store.stats().capacity_bytes // unit
        kept = [key for key in reversed(self._slab.keys()) if key not in forgotten]
        newest_first = kept[:room]
        answers = self._faults.lookup(self._store, newest_first)
        self.added([k for k, a in zip(newest_first, answers, strict=True) if a is Answer.MISS])

    def clear(self) -> None:
        """Forget all; what is being written is dropped from the store when it arrives."""
        self._dirty.clear()
        self._unwanted |= self._in_flight

    def _write(self, keys: list[bytes]) -> bool:
        """Start one batch. False where the store is busy; the blocks stay marked then."""
        answers = self._faults.lookup(self._store, keys)
        lacking = [k for k, a in zip(keys, answers, strict=True) if a is Answer.MISS]
        slots = self._slab.pin(lacking, touch=False)
        pairs = [(k, s) for k, s in zip(lacking, slots, strict=True) if s is not None]
        if pairs and not self._start([key for key, _ in pairs], [slot for _, slot in pairs]):
            return False
        for key in keys:
            self._dirty.pop(key, None)
        return True

    def _start(self, keys: list[bytes], slots: list[int]) -> bool:
        try:
            future = self._store.store(keys, [self._slab.buffer(slot) for slot in slots])
        except TierBusy as error:
            self._unpin(keys)
            self._faults.count(self._store, error)
            return False
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self._unpin(keys)
            self._faults.count(self._store, error, len(keys))
            self._traffic.cascade_failures += 1
            return True
        self._in_flight.add(future)
        self._traffic.active_cascades += 1
        future.add_done_callback(lambda done: self._deliver(lambda: self._written(keys, done)))
        return True

    def _written(self, keys: list[bytes], future: Future[list[bool]]) -> None:
        self._in_flight.discard(future)
        self._traffic.active_cascades -= 1
        self._unpin(keys)
        unwanted = future in self._unwanted
        self._unwanted.discard(future)
        try:
            refused = future.result(timeout=0).count(False)
            if refused:
                self._faults.count(self._store, "refused", refused)
            if unwanted:
                self._store.drop(keys)
        except Exception as error:  # noqa: BLE001 - as above
            self._traffic.cascade_failures += 1
            self._faults.count(self._store, error, len(keys))
