# SPDX-License-Identifier: Apache-2.0
"""Write-back: takes blocks that only the slab has down to the store below, ahead of their eviction.

While the slab has room nothing is written. Once it fills up, the blocks that came in from the pool
are written, the longest unused first, in batches whose slots stay pinned until the store is done
with them. A store that cannot keep up delays nobody: the slab evicts what it must, and the blocks
lost are counted. An admission filter may find a block not worth writing; it is asked again once the
block was used again. Knows nothing of loads or requests, and has no thread: `Hierarchy` drives it
from its own calls and from completions.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future
from itertools import islice

from .admission import AdmissionFilter
from .base import Answer, SlabTier, StoreTier
from .block import ALIGNMENT
from .errors import TierBusy
from .faults import REFUSED, Faults
from .traffic import Traffic

# A batch of this many bytes pays for its sync, and several keep a disk busy through it (three of
# them wrote 1.05 times what two did); the blocks bound a step's work.
BATCH_BYTES = 64 * 1024**2
BATCH_BLOCKS = 256
BATCHES_IN_FLIGHT = 3
SHARES_OF_SLAB = 8  # a batch is at most one of so many

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
        admission: AdmissionFilter,
        faults: Faults,
        traffic: Traffic,
    ) -> None:
        self._slab = slab
        self._store = store
        self._deliver = deliver
        self._unpin = unpin
        self._admission = admission
        self._faults = faults
        self._traffic = traffic
        self._low_slots = max(1, int(slab.num_slots * watermark))
        # Pinned slots cannot be evicted: all batches in flight hold at most three eighths.
        batch_bytes = BATCH_BYTES // slab.layout.slot_bytes
        self._batch = max(1, min(BATCH_BLOCKS, batch_bytes, slab.num_slots // SHARES_OF_SLAB))
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._refused: set[bytes] = set()  # by the filter; in the slab, or evicted meanwhile
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
        if not self._dirty and not self._refused:
            return
        for key in reversed(keys):
            if key in self._dirty:
                self._dirty.move_to_end(key)
            elif key in self._refused:
                self._refused.discard(key)
                self._dirty[key] = None

    def threatened(self, coldest: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks the slab is about to evict that are not written yet. The store is
        told of the others, of which it has the last copy then."""
        lacking = [key for key in coldest if key in self._dirty] if self._dirty else []
        if len(lacking) < len(coldest) and self._faults.allows(self._store):
            clean = [key for key in reversed(coldest) if key not in self._dirty]
            try:
                self._store.touch(clean)
            except Exception as error:  # noqa: BLE001 - any fault of a store is counted
                self._faults.count(self._store, error)
        return lacking

    def evicted(self, threatened: Sequence[bytes]) -> None:
        """The slab has made room: count those of `threatened` that are gone."""
        answers = self._slab.lookup(threatened)
        lost = [k for k, a in zip(threatened, answers, strict=True) if a is not Answer.HIT]
        for key in lost:
            del self._dirty[key]
        self._traffic.lost_blocks += len(lost)
        self._traffic.lost_stores += bool(lost)

    def pump(self, *, reading: bool) -> None:
        """Start batches if the slab is filling up: fewer while somebody waits for a read, none
        while the store is broken."""
        allowed = 1 if reading else BATCHES_IN_FLIGHT
        while (
            self._dirty
            and self._faults.allows(self._store)
            and len(self._in_flight) < allowed
            and self._slab.free_slots() < self._low_slots
            and self._write(list(islice(self._dirty, self._batch)))
        ):
            pass

    def flush_some(self) -> bool:
        """Start batches of the most recently used blocks; False where the store is busy."""
        while self._dirty and len(self._in_flight) < BATCHES_IN_FLIGHT:
            if not self._faults.allows(self._store):
                return False
            newest = list(islice(reversed(self._dirty), self._batch))
            # The slab is about to go, so there is no second chance for the filter to give.
            if not self._write(newest, filtered=False):
                return False
        return True

    def recheck(self, forgotten: Container[bytes]) -> None:
        """Before a flush: every block of the slab that the store lacks is to be written, except
        `forgotten` ones, but no more than the store has room for, so that late batches do not
        displace earlier ones."""
        self._dirty.clear()
        self._refused.clear()
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
        self._refused.clear()
        self._unwanted |= self._in_flight

    def _write(self, keys: list[bytes], *, filtered: bool = True) -> bool:
        """Start one batch. False where the store is busy; the blocks stay marked then."""
        answers = self._faults.lookup(self._store, keys)
        lacking = [k for k, a in zip(keys, answers, strict=True) if a is Answer.MISS]
        if filtered and lacking:
            lacking = self._admitted(lacking)
        slots = self._slab.pin(lacking, touch=False)
        pairs = [(k, s) for k, s in zip(lacking, slots, strict=True) if s is not None]
        if pairs and not self._start([key for key, _ in pairs], [slot for _, slot in pairs]):
            return False
        for key in keys:
            self._dirty.pop(key, None)
        return True

    def _admitted(self, keys: list[bytes]) -> list[bytes]:
        """Those that the filter finds worth writing; the others wait for their next use."""
        verdicts = self._admission.admit(keys, time.monotonic())
        refused = [key for key, admitted in zip(keys, verdicts, strict=True) if not admitted]
        for key in refused:
            del self._dirty[key]
        self._refused.update(refused)
        self._traffic.unadmitted_blocks += len(refused)
        if len(self._refused) > 2 * self._slab.num_slots:
            self._forget_evicted()
        return [key for key, admitted in zip(keys, verdicts, strict=True) if admitted]

    def _forget_evicted(self) -> None:
        """Refused blocks leave the slab unseen; forget them from time to time."""
        refused = list(self._refused)
        answers = self._slab.lookup(refused)
        self._refused = {k for k, a in zip(refused, answers, strict=True) if a is Answer.HIT}

    def _start(self, keys: list[bytes], slots: list[int]) -> bool:
        self._faults.began(self._store)
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
            self._faults.succeeded(self._store)
            if refused:
                self._faults.count(self._store, REFUSED, refused)
            if unwanted:
                self._store.drop(keys)
        except Exception as error:  # noqa: BLE001 - as above
            self._traffic.cascade_failures += 1
            self._faults.count(self._store, error, len(keys))
