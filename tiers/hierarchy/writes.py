# SPDX-License-Identifier: Apache-2.0
"""Writes: the batches in flight to one store, with their deadlines."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..base import SlabTier, Stored
from ..errors import TierBusy
from .guarded_store import DAMAGED, LATE_WRITE, REFUSED, GuardedStore, check_answers

# The largest share of the slab that writes may pin, since pinned blocks cannot be evicted; the
# second share applies while some batches are late or probes.
SHARE, LATE_SHARE = 0.375, 0.5
# Seconds without an accepted batch after which a flush gives a store up: normally, and with an open
# breaker (long enough for a probe).
STALL_SECONDS, OPEN_STALL_SECONDS = 5.0, 2.0


@dataclass(slots=True, eq=False)
class Batch:
    """A batch of blocks that is being written."""

    keys: list[bytes]
    deadline: float
    is_probe: bool
    is_late: bool = False
    is_wanted: bool = True  # False after `clear`
    dropped: set[bytes] = field(default_factory=set)  # removed keys


class Writes:
    """The batches in flight to one store. The slots of a batch are pinned until its write ends.

        start ──► in flight ──(the future ends)──► unpinned
                     └─(past its deadline)──► late ──(it ends after all)──► unpinned

    A late batch opens the write breaker. The slots of a late batch stay pinned, because the store
    may still read them. While the breaker is open, only single blocks are written, as probes. Only
    one thread calls the methods."""

    def __init__(self, slab: SlabTier, store: GuardedStore) -> None:
        self._slab = slab
        self._store = store
        self._breaker = store.write_breaker
        self._alarm_at = 0.0  # the last timer that was set for a deadline
        self._batches: list[Batch] = []
        self.num_ended = 0
        self._taken_at = 0.0  # when the store last took a batch, or a flush began
        self._has_failed = False  # whether a batch failed since the flush began

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def num_blocks(self) -> int:
        return sum(len(batch.keys) for batch in self._batches)

    def holds(self, key: bytes) -> bool:
        return any(key in batch.keys for batch in self._batches)

    def room(self, most_blocks: int, most_batches: int) -> int:
        """The number of blocks that the next batch may have; 0 if no batch may start now."""
        if not self._store.breaker.allows:
            return 0
        usual = sum(not (batch.is_late or batch.is_probe) for batch in self._batches)
        if not self._breaker.allows:  # an open breaker: only probes
            size = int(self._breaker.probe_due)
        else:
            size = most_blocks if usual < most_batches else 0
        if size and self._batches:
            is_usual = usual == len(self._batches)
            share = SHARE if is_usual else LATE_SHARE
            size = min(size, int(share * self._slab.num_slots) - self.num_blocks)
        return max(0, size)

    def start(self, keys: list[bytes], slots: list[int]) -> bool:
        """Start to write pinned blocks. If the store is busy, unpin them and return False."""
        deadline = time.monotonic() + self._store.write_seconds
        batch = Batch(keys, deadline, is_probe=not self._breaker.allows)
        if batch.is_probe:
            self._breaker.probe_began()
        try:
            buffers = [self._slab.buffer(slot) for slot in slots]
            future = self._store.tier.store(keys, buffers, self._slab.proofs(keys))
            when_done = future.add_done_callback
        except TierBusy as error:
            self._slab.unpin(keys)
            self._store.count_fault(error)
            self._end_probe(batch, answered=False)
            return False
        except Exception as error:  # noqa: BLE001 - any fault of a store is counted, none spreads
            self._slab.unpin(keys)
            self._fail_batch(batch, error)
            return True
        self._batches.append(batch)
        self._store.traffic.active_cascades += 1
        self._set_alarm()
        deliver = self._store.mailbox.deliver
        when_done(lambda done: deliver(lambda: self._ended(batch, done)))
        return True

    def give_up_late(self) -> None:
        """Mark and count the batches whose deadline has passed. Their slots stay pinned."""
        if not self._batches:
            return
        now = time.monotonic()
        for batch in self._batches:
            if not batch.is_late and batch.deadline <= now:
                batch.is_late = True
                self._store.traffic.cascade_failures += 1
                self._store.traffic.late_write_blocks += len(batch.keys)
                self._store.count_fault(LATE_WRITE, writing=True)
        self._set_alarm()

    def drop_all(self) -> None:
        """Make the store drop each block in flight when its write has ended."""
        for batch in self._batches:
            batch.is_wanted = False

    def drop_on_arrival(self, keys: Sequence[bytes]) -> None:
        """Make the store drop the blocks of `keys` in flight, when their write has ended."""
        for batch in self._batches:
            batch.dropped.update(set(keys).intersection(batch.keys))

    def begin_flush(self) -> None:
        """Reset `has_failed` and `has_stalled` at the start of a flush."""
        self._taken_at, self._has_failed = time.monotonic(), False

    @property
    def has_failed(self) -> bool:
        """Whether a batch has failed since the flush began."""
        return self._has_failed

    @property
    def has_stalled(self) -> bool:
        """Whether the store has taken no batch for so long that a flush stops waiting for it."""
        most = STALL_SECONDS if self._breaker.allows else OPEN_STALL_SECONDS
        return time.monotonic() - self._taken_at >= most

    def _set_alarm(self) -> None:
        """Set a timer for the next deadline, unless an earlier timer is set. Few timers are set,
        because most batches end long before their deadlines and each timer wakes two threads."""
        if self._alarm_at <= time.monotonic():
            waiting = [batch.deadline for batch in self._batches if not batch.is_late]
            if waiting:
                self._alarm_at = min(waiting)
                self._store.mailbox.wake_at(self._alarm_at)

    def _ended(self, batch: Batch, future: Future[list[Stored]]) -> None:
        self._batches.remove(batch)
        self.num_ended += 1
        self._store.traffic.active_cascades -= 1
        self._slab.unpin(batch.keys)
        if batch.is_late:
            self._store.traffic.late_write_blocks -= len(batch.keys)
            self._breaker.answered_late()
        try:
            outcomes = future.result(timeout=0)
            check_answers(outcomes, batch.keys)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_batch(batch, error)
            return
        self._end_probe(batch, answered=True)
        self._taken_at = time.monotonic()
        if refused := outcomes.count(Stored.REFUSED):
            self._store.count_fault(REFUSED, refused)
        if Stored.DAMAGED in outcomes:
            pairs = zip(batch.keys, outcomes, strict=True)
            damaged = [key for key, outcome in pairs if outcome is Stored.DAMAGED]
            self._store.count_fault(DAMAGED, len(damaged))
            self._slab.forget(damaged)
            self._store.mailbox.version += 1
        unwanted = list(batch.dropped) if batch.is_wanted else batch.keys
        if unwanted:
            self._store.drop(unwanted)

    def _fail_batch(self, batch: Batch, error: Exception) -> None:
        self._store.traffic.cascade_failures += not batch.is_late  # a late batch is counted
        self._store.count_fault(error, len(batch.keys), writing=True)
        self._end_probe(batch, answered=False)
        self._has_failed = True

    def _end_probe(self, batch: Batch, *, answered: bool) -> None:
        if batch.is_probe:
            self._breaker.probe_ended(answered)
