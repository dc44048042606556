# SPDX-License-Identifier: Apache-2.0
"""Write-back: takes blocks that only the slab has down to the store below, ahead of their eviction.

While the slab has room nothing is written. Once it fills up, the blocks that came in from the pool
are written, the longest unused first, in batches whose slots stay pinned until the store is done
with them. A batch that is not full waits for more blocks, a moment at most and only while none of
its own is about to be evicted: each costs a sync and a commit, however small. A store that cannot
keep up delays nobody: the slab evicts what it must, and the blocks lost are counted. An admission
filter may find a block not worth writing; it is asked again once the block was used again. Knows
nothing of loads or requests, nor of what becomes of a batch (`writes.py` does), and has no thread:
`Hierarchy` drives it from its own calls and from completions.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from ..admission import AdmissionFilter
from ..base import Answer, SlabTier, StoreTier
from ..block import ALIGNMENT
from .completions import Deliver
from .faults import Faults
from .traffic import Traffic
from .writes import Writes

# A batch of this many bytes pays for its sync, and several keep a disk busy through it (three of
# them wrote 1.05 times what two did); the blocks bound a step's work.
BATCH_BYTES = 64 * 1024**2
BATCH_BLOCKS = 256
BATCHES_IN_FLIGHT = 3
SHARES_OF_SLAB = 8  # a batch is at most one of so many
FILL_SECONDS = 1.0  # how long a batch waits to be full


class WriteBack:
    """Moves blocks from `slab` to `store`. `watermark` is the fraction of slots below which free
    slots start the writing; `fill_seconds` bounds the wait for a full batch; `unpin` gives slots
    back; `forget` takes damaged blocks out of the slab; `set_alarm` is asked to have `pump` called
    at a moment. Called by one thread."""

    def __init__(
        self,
        slab: SlabTier,
        store: StoreTier,
        *,
        watermark: float,
        fill_seconds: float,
        write_seconds: float,
        deliver: Deliver,
        set_alarm: Callable[[float], None],
        unpin: Callable[[list[bytes]], None],
        forget: Callable[[list[bytes]], None],
        admission: AdmissionFilter,
        faults: Faults,
        traffic: Traffic,
    ) -> None:
        self._slab = slab
        self._store = store
        self._fill_seconds = fill_seconds
        self._set_alarm = set_alarm
        self._admission = admission
        self._faults = faults
        self._traffic = traffic
        self._low_slots = max(1, int(slab.num_slots * watermark))
        # Pinned slots cannot be evicted: all batches in flight hold at most three eighths.
        batch_bytes = BATCH_BYTES // slab.layout.slot_bytes
        self._batch = max(1, min(BATCH_BLOCKS, batch_bytes, slab.num_slots // SHARES_OF_SLAB))
        self._dirty: OrderedDict[bytes, None] = OrderedDict()  # the longest unused first
        self._full_at: float | None = None  # when a batch that is not full goes (monotonic)
        self._alarm_at = 0.0  # the last one that was set for it
        self._is_urgent = False  # some of `_dirty` will be evicted next
        self._refused: set[bytes] = set()  # by the filter; in the slab, or evicted meanwhile
        self._writes = Writes(
            slab,
            store,
            write_seconds=write_seconds,
            deliver=deliver,
            set_alarm=set_alarm,
            unpin=unpin,
            forget=forget,
            faults=faults,
            traffic=traffic,
        )

    @property
    def in_flight(self) -> int:
        """Batches being written."""
        return len(self._writes)

    @property
    def pending(self) -> bool:
        """Whether anything is still to be written or being written."""
        return bool(self._dirty or self._writes)

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

    def threatened(self, coldest: Sequence[bytes], next_coldest: Sequence[bytes]) -> list[bytes]:
        """Those of the blocks the slab is about to evict that are not written yet. The store is
        told of the others, of which it has the last copy then. `next_coldest` go after them: what
        is not written of those has to be now."""
        lacking = [key for key in coldest if key in self._dirty] if self._dirty else []
        self._is_urgent = bool(self._dirty) and any(key in self._dirty for key in next_coldest)
        if len(lacking) < len(coldest) and self._faults.allows(self._store):
            clean = [key for key in reversed(coldest) if key not in self._dirty]
            self._faults.attempt(self._store, partial(self._store.touch, clean))
        return lacking

    def evicted(self, threatened: Sequence[bytes]) -> None:
        """The slab has made room: count those of `threatened` that are gone."""
        answers = self._slab.lookup(threatened)
        lost = [k for k, a in zip(threatened, answers, strict=True) if a is not Answer.HIT]
        for key in lost:
            del self._dirty[key]
        self._traffic.lost_blocks += len(lost)
        self._traffic.lost_stores += bool(lost)

    def pump(self, *, reading: bool) -> bool:
        """Give up late batches, and start new ones if the slab is filling up: fewer while somebody
        waits for a read, and one block alone, to probe, while the store is broken. False where the
        store was busy: it is to be asked again, though nothing will tell when."""
        self._writes.give_up_late()
        is_taken = True
        allowed = 1 if reading else BATCHES_IN_FLIGHT
        while (
            is_taken
            and self._dirty
            and self._is_due
            and (size := self._writes.room(self._batch, allowed))
        ):
            is_taken = self._write(list(islice(self._dirty, size)))
            if is_taken:
                self._full_at, self._is_urgent = None, False
        if self._dirty:
            self._writes.announce_probe()
        return is_taken

    def flush_some(self) -> bool:
        """Start batches of the most recently used blocks. True while it is worth waiting."""
        self._writes.give_up_late()
        while self._dirty and (size := self._writes.room(self._batch, BATCHES_IN_FLIGHT)):
            newest = list(islice(reversed(self._dirty), size))
            # The slab is about to go, so there is no second chance for the filter to give.
            if not self._write(newest, filtered=False):
                break
        return self.pending and not self._writes.has_stalled

    @property
    def is_flushed(self) -> bool:
        """After a flush: whether the store took all of it."""
        return not (self.pending or self._writes.has_failed)

    def recheck(self) -> None:
        """Before a flush: every block of the slab that the store lacks is to be written, but no
        more than the store has room for, so that late batches do not displace earlier ones."""
        self._writes.begin_flush()
        self._dirty.clear()
        self._refused.clear()
        # A store may spend up to one unit of alignment on a header.
        unit = self._store.layout.slot_bytes + ALIGNMENT
        room = self._store.stats().capacity_bytes // unit
        newest_first = self._slab.keys()[::-1][:room]
        answers = self._faults.lookup(self._store, newest_first)
        self.added([k for k, a in zip(newest_first, answers, strict=True) if self._may_lack(a)])

    def drop(self, keys: Sequence[bytes]) -> None:
        """Write none of these blocks; what is being written of them is dropped on its arrival."""
        for key in keys:
            self._dirty.pop(key, None)
            self._refused.discard(key)
        self._writes.drop(keys)

    def clear(self) -> None:
        """Forget all; what is being written is dropped from the store when it arrives."""
        self._dirty.clear()
        self._refused.clear()
        self._writes.forget()

    @property
    def _is_due(self) -> bool:
        """Whether to write at all: for room, or to find out whether the store works again."""
        if self._writes.is_broken:
            return True
        return self._slab.free_slots() < self._low_slots and not self._may_wait()

    def _may_wait(self) -> bool:
        """Whether a batch that is not full has time to become so."""
        if len(self._dirty) >= self._batch or self._is_urgent or not self._fill_seconds:
            return False
        now = time.monotonic()
        if self._full_at is None:
            self._full_at = now + self._fill_seconds
        if self._alarm_at <= now < self._full_at:
            self._alarm_at = self._full_at
            self._set_alarm(self._full_at)
        return now < self._full_at

    def _write(self, keys: list[bytes], *, filtered: bool = True) -> bool:
        """Start one batch. False where the store is busy; the blocks stay marked then."""
        answers = self._faults.lookup(self._store, keys)
        lacking = [k for k, a in zip(keys, answers, strict=True) if self._may_lack(a)]
        if filtered and lacking:
            lacking = self._admitted(lacking)
        slots = self._slab.pin(lacking, touch=False)
        pairs = [(k, s) for k, s in zip(lacking, slots, strict=True) if s is not None]
        if pairs and not self._writes.start([key for key, _ in pairs], [slot for _, slot in pairs]):
            return False
        for key in keys:
            self._dirty.pop(key, None)
        return True

    def _may_lack(self, answer: Answer) -> bool:
        """Whether a block with this answer is to be given to the store. PENDING is on its way
        there; but one that is shared says so too of what it is being asked about."""
        return answer is Answer.MISS or (answer is Answer.PENDING and self._store.is_shared)

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
