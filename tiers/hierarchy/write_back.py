# SPDX-License-Identifier: Apache-2.0
"""Write-back: writes blocks to the stores that lack them, before the slab evicts the blocks.

While the slab has enough free slots, no block is written. When free slots run low, blocks that the
store may lack are written in batches, the least recently used first. The slots of a batch stay
pinned until its write ends. A batch that is not full waits up to 5 s for more blocks, because even
a small batch costs a sync and a commit; a batch does not wait if one of its blocks is about to be
evicted. A slow store delays no request: the slab evicts unwritten blocks, and `Traffic.lost_blocks`
counts them. An admission filter may refuse a block; the filter decides anew after the block's next
use.

Blocks are written to a shared store at once and without the filter, because other engines wait for
the blocks. Write-back has no thread: `Hierarchy` runs it in its own calls and after completions."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

from ..admission import AdmitAll
from ..base import Answer, SlabTier
from ..block import ALIGNMENT
from ..mailbox import Mailbox
from .guarded_store import GuardedStore
from .hierarchy_options import HierarchyOptions
from .writes import Writes

# The size at which a batch is worth its sync. Several batches keep a disk busy during a sync (three
# wrote 5 % more than two). The limit in blocks bounds the time of one `poll`.
BATCH_BYTES = 64 * 1024**2
BATCH_BLOCKS = 256
BATCHES_IN_FLIGHT = 3
# The largest share of the slab in a batch: an eighth below FEW_SLOTS slots, else a quarter, since
# small batches cost as many syncs and commits as full ones.
SHARES_OF_SLAB, FEWER_SHARES = 8, 4
FEW_SLOTS = 1024
# How long a batch waits to be full, unless one of its blocks is about to be evicted.
FILL_SECONDS = 5.0
# In a flush: the time between checks of a store with writes in flight, and the pause before a write
# to a busy store without writes in flight is tried again.
LOOK_SECONDS, RETRY_SECONDS = 0.25, 0.01


class WriteBack:
    """Writes blocks from `slab` to one store. Only one thread calls the methods."""

    def __init__(self, slab: SlabTier, store: GuardedStore, options: HierarchyOptions) -> None:
        self._slab = slab
        self._store = store
        self._admission = AdmitAll() if store.is_shared else options.admission
        self._fill_seconds = 0.0 if store.is_shared else FILL_SECONDS
        low_slots = max(1, int(slab.num_slots * options.watermark))
        self._low_slots = slab.num_slots + 1 if store.is_shared else low_slots
        batch_bytes = BATCH_BYTES // slab.layout.slot_bytes
        shares = SHARES_OF_SLAB if slab.num_slots < FEW_SLOTS else FEWER_SHARES
        self._batch = max(1, min(BATCH_BLOCKS, batch_bytes, slab.num_slots // shares))
        # The queue of blocks to write, the least recently used first. True: the filter has admitted
        # the block.
        self._dirty: OrderedDict[bytes, bool] = OrderedDict()
        self._full_at: float | None = None  # when an incomplete batch is due (monotonic)
        self._alarm_at = 0.0  # the last timer that was set for `_full_at`
        self._num_next = 0  # announced evictions, not yet compared with `_dirty`
        self._is_urgent = False  # whether blocks in `_dirty` are about to be evicted
        self._refused: set[bytes] = set()  # keys that the filter refused, perhaps evicted by now
        self._writes = Writes(slab, store)

    @property
    def in_flight(self) -> int:
        return len(self._writes)

    @property
    def num_ended(self) -> int:
        return self._writes.num_ended

    @property
    def num_unwritten(self) -> int:
        """The number of blocks that are queued or being written; 0 while a breaker is open."""
        if not (self._store.write_breaker.allows and self._store.breaker.allows):
            return 0
        return len(self._dirty) + self._writes.num_blocks

    def awaits(self, key: bytes) -> bool:
        """Whether a block is queued to be written; False while a breaker is open."""
        store = self._store
        return key in self._dirty and store.write_breaker.allows and store.breaker.allows

    @property
    def pending(self) -> bool:
        return bool(self._dirty or self._writes)

    def added(self, keys: Sequence[bytes]) -> None:
        """Queue new blocks of the slab, in prompt order, which the store may lack."""
        if self._store.is_read_only:
            return
        for key in reversed(keys):
            self._dirty[key] = False

    def is_moving(self, key: bytes) -> bool:
        """Whether the block is queued to be written or is being written."""
        return key in self._dirty or self._writes.holds(key)

    def used(self, keys: Sequence[bytes]) -> None:
        """Record a use of `keys`, in prompt order; other queued blocks are then written first."""
        if not self._dirty and not self._refused:
            return
        for key in reversed(keys):
            if key in self._dirty:
                self._dirty.move_to_end(key)
            elif key in self._refused:
                self._refused.discard(key)
                self._dirty[key] = False

    def evicted(self, keys: Sequence[bytes]) -> None:
        """Handle an eviction of blocks from the slab, in the order of eviction. Count unwritten
        blocks as lost, and touch all other blocks in the store, which may have the last copy."""
        dirty = self._dirty
        lost = [key for key in keys if key in dirty] if dirty else []
        if len(lost) < len(keys) and self._store.breaker.allows:
            clean = [key for key in reversed(keys) if key not in dirty]
            self._store.attempt(partial(self._store.tier.touch, clean))
        for key in lost:
            del dirty[key]
        self._store.traffic.lost_blocks += len(lost)
        self._store.traffic.lost_stores += bool(lost)

    def will_be_evicted(self, count: int) -> None:
        """Record that `count` evictions are near, so that queued victims are written first."""
        self._num_next = count

    def pump(self, *, reading: bool) -> bool:
        """Give up late batches, and start new batches if free slots run low. While a load reads
        from a store, one batch is in flight at most. While the breaker is open, single blocks are
        written as probes. Return False if the store was busy; the caller must then call `pump`
        again, because no completion will wake it."""
        self._writes.give_up_late()
        is_taken = True
        allowed = 1 if reading else BATCHES_IN_FLIGHT
        while (
            is_taken
            and self._dirty
            and self._is_due
            and (size := self._writes.room(self._batch, allowed))
        ):
            is_taken = self._write_batch(list(islice(self._dirty, size)))
        if self._dirty:
            self._store.write_breaker.announce_probe(self._store.mailbox)
        return is_taken

    def flush_some(self) -> bool:
        """Start batches of the most recently used blocks. Return whether the flush must go on."""
        self._writes.give_up_late()
        while self._dirty and (size := self._writes.room(self._batch, BATCHES_IN_FLIGHT)):
            newest = list(islice(reversed(self._dirty), size))
            # The slab is about to close, so the filter cannot decide again later.
            if not self._write_batch(newest, filtered=False):
                break
        return self.pending and not self._writes.has_stalled

    @property
    def is_flushed(self) -> bool:
        """Whether the store has taken every block of a flush."""
        return not (self.pending or self._writes.has_failed)

    def recheck(self) -> None:
        """Prepare a flush: queue the newest blocks of the slab that the store lacks, as many as fit
        into the store, so that no batch evicts an earlier batch."""
        self._writes.begin_flush()
        self._dirty.clear()
        self._refused.clear()
        # A store may spend up to one unit of alignment on a header.
        unit = self._store.tier.layout.slot_bytes + ALIGNMENT
        room = self._store.tier.stats().capacity_bytes // unit
        newest_first = self._slab.keys()[::-1][:room]
        answers = self._store.lookup(newest_first)
        self.added([k for k, a in zip(newest_first, answers, strict=True) if self._may_lack(a)])

    def discard_dirty(self, keys: Sequence[bytes]) -> None:
        """Remove `keys` from the queue. Blocks being written are dropped when their write ends."""
        for key in keys:
            self._dirty.pop(key, None)
            self._refused.discard(key)
        self._writes.drop_on_arrival(keys)

    def clear(self) -> None:
        """Empty the queue. Blocks being written are dropped when their write ends."""
        self._dirty.clear()
        self._refused.clear()
        self._writes.drop_all()

    @property
    def _is_due(self) -> bool:
        """Whether to write now: to free slots, or to probe a store whose breaker is open."""
        if not self._store.write_breaker.allows:
            return True
        return self._slab.free_slots() < self._low_slots and not self._may_wait()

    def _may_wait(self) -> bool:
        """Whether the next batch is not full and may wait for more blocks."""
        return len(self._dirty) < self._batch and self._has_time()

    def _has_time(self) -> bool:
        """Whether the queued blocks may wait until the batch is full."""
        allows = self._store.write_breaker.allows
        if not allows or not self._fill_seconds or self._goes_next():
            return False
        now = time.monotonic()
        if self._full_at is None:
            self._full_at = now + self._fill_seconds
        if self._alarm_at <= now < self._full_at:
            self._alarm_at = self._full_at
            self._store.mailbox.wake_at(self._full_at)
        return now < self._full_at

    def _goes_next(self) -> bool:
        """Whether a queued block is about to be evicted."""
        if self._num_next:
            self._is_urgent = self._slab.may_go_next(self._dirty.keys(), self._num_next)
            self._num_next = 0
        return self._is_urgent

    def _write_batch(self, keys: list[bytes], *, filtered: bool = True) -> bool:
        """Start one batch. If some of its blocks need no write, the other blocks may wait for more.
        Return False if the store is busy; the blocks then stay queued."""
        answers = self._store.lookup(keys)
        lacking = keys
        if answers.count(Answer.MISS) < len(keys):
            lacking = [k for k, a in zip(keys, answers, strict=True) if self._may_lack(a)]
        if filtered and lacking:
            lacking = self._admitted(lacking)
        if filtered and 0 < len(lacking) < len(keys) and self._has_time():
            self._unmark(set(keys).difference(lacking))
            return True
        slots = self._slab.pin(lacking, touch=False)
        pairs = [(k, s) for k, s in zip(lacking, slots, strict=True) if s is not None]
        if pairs and not self._writes.start([key for key, _ in pairs], [slot for _, slot in pairs]):
            return False
        self._unmark(keys)
        self._full_at, self._is_urgent = None, False
        return True

    def _unmark(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._dirty.pop(key, None)

    def _may_lack(self, answer: Answer) -> bool:
        """Whether to write a block for which the store's look-up returned `answer`. PENDING means
        that the block is being written, or that a shared store's server has not answered yet."""
        return answer is Answer.MISS or (answer is Answer.PENDING and self._store.is_shared)

    def _admitted(self, keys: list[bytes]) -> list[bytes]:
        """Return the blocks that the filter admits. A refused block leaves the queue until its next
        use. An admitted block is not passed to the filter again."""
        dirty = self._dirty
        asked = [key for key in keys if not dirty[key]]
        verdicts = self._admission.admit(asked, time.monotonic()) if asked else []
        refused = []
        for key, is_admitted in zip(asked, verdicts, strict=True):
            if is_admitted:
                dirty[key] = True
            else:
                del dirty[key]
                refused.append(key)
        self._refused.update(refused)
        self._store.traffic.unadmitted_blocks += len(refused)
        if len(self._refused) > 2 * self._slab.num_slots:
            self._forget_evicted()
        return [key for key in keys if key in dirty] if refused else keys

    def _forget_evicted(self) -> None:
        refused = list(self._refused)
        answers = self._slab.lookup(refused)
        self._refused = {k for k, a in zip(refused, answers, strict=True) if a is Answer.HIT}


class WriteBacks:
    """The `WriteBack` of every store. Passes the slab's events to all of them. Without
    `options.inclusive`, the first store drops promoted blocks. One thread calls the methods."""

    def __init__(
        self, slab: SlabTier, stores: Sequence[GuardedStore], options: HierarchyOptions
    ) -> None:
        self._slab = slab
        self._stores = stores
        self._admission = options.admission
        self._exclusive_store = stores[0] if stores and not options.inclusive else None
        self._all = [WriteBack(slab, store, options) for store in stores]
        self._spared = self._is_awaited if options.keeps_unwritten and stores else None

    def get_write_back(self, place: int) -> WriteBack:
        return self._all[place]

    @property
    def in_flight(self) -> int:
        return sum(write_back.in_flight for write_back in self._all)

    @property
    def num_ended(self) -> int:
        return sum(write_back.num_ended for write_back in self._all)

    @property
    def num_unwritten(self) -> int:
        return max((write_back.num_unwritten for write_back in self._all), default=0)

    def added(self, keys: Sequence[bytes]) -> None:
        """Queue new blocks of the slab, in prompt order, for every store, which may lack them."""
        for write_back in self._all:
            write_back.added(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """Record a use of `keys`, in prompt order, in every `WriteBack`."""
        for write_back in self._all:
            write_back.used(keys)

    def promoted(self, store: GuardedStore, keys: Sequence[bytes]) -> None:
        """Record that `keys` were promoted from `store`. An exclusive store drops the blocks."""
        if not (store.is_shared or store.is_read_only):
            self._admission.promoted(len(keys))
        if keys and store is self._exclusive_store:
            store.drop(keys)  # if the call fails, both tiers keep the blocks
            self._all[0].added(keys)

    def reserve(self, keys: list[bytes], *, optional: bool = False) -> list[int | None]:
        """Reserve slots of the slab for `keys`. Blocks evicted unwritten are counted."""
        excess = len(keys) - self._slab.free_slots()
        evicted: list[bytes] = []
        slots = self._slab.reserve(keys, optional=optional, spared=self._spared, evicted=evicted)
        if evicted:
            for write_back in self._all:
                write_back.evicted(evicted)
        if excess > 0:
            for write_back in self._all:
                write_back.will_be_evicted(excess)
        return slots

    def _is_awaited(self, key: bytes) -> bool:
        return any(write_back.awaits(key) for write_back in self._all)

    def pump(self, *, reading: bool) -> bool:
        """Call `WriteBack.pump` for every store. Return False if a store was busy."""
        taken = [write_back.pump(reading=reading) for write_back in self._all]
        return all(taken)

    def write_missing(self, timeout_seconds: float, mailbox: Mailbox) -> bool:
        """Write every block of the slab to each store that lacks it; see `Hierarchy.flush`."""
        deadline = time.monotonic() + timeout_seconds
        for write_back in self._all:
            write_back.recheck()
        while self._flush_some():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            mailbox.wait(min(left, LOOK_SECONDS if self.in_flight else RETRY_SECONDS))
            mailbox.run_delivered()
            for store in self._stores:
                store.probe_when_due()
        return all(write_back.is_flushed for write_back in self._all)

    def _flush_some(self) -> bool:
        going_on = [write_back.flush_some() for write_back in self._all]
        return any(going_on)

    def discard_dirty(self, keys: Sequence[bytes]) -> None:
        for write_back in self._all:
            write_back.discard_dirty(keys)

    def clear(self) -> None:
        for write_back in self._all:
            write_back.clear()
