# SPDX-License-Identifier: Apache-2.0
"""Reading up: batches on their way from a store into reserved slots, and who waits for them.

A block is read once however many loads wait for it. A read that misses its deadline fails for
those who wait, but its slots stay reserved until it has really ended, because the store may still
write to them; what it then brings is published for whoever asks next. Knows nothing of how slots
and stores are chosen; `Hierarchy` does that.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from ..base import SlabTier, StoreTier
from ..tag import Proof, Proofs, Tagger
from .completions import Deliver
from .faults import LATE, WRONG_TAG, Faults, check_answers, name_of
from .traffic import Traffic

MISSED = "missed"  # the store had not what it had said, or it was damaged


@dataclass(slots=True, eq=False)
class LoadTicket:
    """A load. Once `done()`, `slots[i]` is the pinned slot of `keys[i]`, or None where the block
    could not be had: missing, damaged, late, or no room (which takes all that follow). `begun` are
    the leading blocks that were there and for which there was room; `fault` says what befell one
    of those that did not come, where something did."""

    keys: list[bytes]
    slots: list[int | None]
    tiers: list[str]  # where each block of the leading part that fits came from
    waiting: int = 0  # blocks still being read
    ended: bool = False
    begun: int = 0
    fault: str | None = None

    def done(self) -> bool:
        return self.waiting == 0


@dataclass(slots=True, eq=False)
class Read:
    """One batch on its way up."""

    store: StoreTier
    keys: list[bytes]
    began: float
    deadline: float
    waiting: list[tuple[LoadTicket, int]] = field(default_factory=list)
    late: bool = False
    wanted: bool = True  # False once everything was forgotten
    dropped: set[bytes] = field(default_factory=set)  # those of `keys` that were forgotten

    def brings(self, key: bytes) -> bool:
        """Whether a load that joins it may hope for this block."""
        return self.wanted and not self.late and key not in self.dropped

    def join(self, ticket: LoadTicket, index: int) -> None:
        """Have the ticket's block at `index` come from this read."""
        self.waiting.append((ticket, index))
        ticket.tiers[index] = self.store.name
        ticket.waiting += 1

    def give_up(self) -> None:
        """Too late for those who wait now."""
        self.late = True
        for ticket, _ in self.waiting:
            ticket.waiting -= 1
            ticket.fault = LATE
        self.waiting.clear()


class ReadUp:
    """The reads under way. `set_alarm` is asked to have `give_up_late` called at a moment
    (seconds, monotonic clock); `promoted` is told which blocks a store has brought. With a `tagger`
    only blocks that have its tag are published. Called by one thread."""

    def __init__(
        self,
        slab: SlabTier,
        *,
        read_seconds: float,
        deliver: Deliver,
        set_alarm: Callable[[float], None],
        promoted: Callable[[StoreTier, list[bytes]], None],
        faults: Faults,
        traffic: Mapping[str, Traffic],
        tagger: Tagger | None,
    ) -> None:
        self._slab = slab
        self._tagger = tagger
        self._read_seconds = read_seconds
        self._deliver = deliver
        self._set_alarm = set_alarm
        self._promoted = promoted
        self._faults = faults
        self._traffic = traffic  # by the name of a store
        self._reads: list[Read] = []
        self._by_key: dict[bytes, Read] = {}
        self.version = 0  # changes with everything a ticket or a look-up could show

    def __bool__(self) -> bool:
        return bool(self._reads)

    def of(self, key: bytes) -> Read | None:
        """The read that brings this block."""
        return self._by_key.get(key)

    def start(
        self, store: StoreTier, ticket: LoadTicket, indices: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Read the ticket's blocks at `indices` into the reserved `slots`."""
        keys = [ticket.keys[i] for i in indices]
        now = time.monotonic()
        read = Read(store, keys, now, now + self._read_seconds)
        traffic = self._traffic[store.name]
        traffic.active_promotions += 1
        self._reads.append(read)
        self._by_key.update(dict.fromkeys(keys, read))
        for i in indices:
            read.join(ticket, i)
        self.version += 1
        try:
            future = store.load(keys, [self._slab.buffer(slot) for slot in slots])
            when_done = future.add_done_callback
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            self._faults.count(store, error)
            traffic.promotion_failures += 1
            self._end(read, [None] * len(keys), name_of(error))
            return
        self._set_alarm(read.deadline)
        when_done(lambda done: self._deliver(lambda: self._arrived(read, done)))

    def give_up_late(self) -> None:
        """Fail the reads whose deadline has passed."""
        now = time.monotonic()
        for read in self._reads:
            if not read.late and read.deadline <= now:
                read.give_up()
                self._faults.count(read.store, LATE)
                self._traffic[read.store.name].promotion_failures += 1
                self.version += 1

    def clear(self) -> None:
        """Publish nothing of what is under way."""
        for read in self._reads:
            read.wanted = False

    def drop(self, keys: Sequence[bytes]) -> None:
        """Nobody is to hope for these blocks any more. The slab does not publish them."""
        for key in keys:
            read = self._by_key.get(key)
            if read is not None:
                read.dropped.add(key)

    def _arrived(self, read: Read, future: Future[list[Proof | None]]) -> None:
        traffic = self._traffic[read.store.name]
        breaker = self._faults.breakers[read.store.name]
        fault = MISSED
        if read.late:
            breaker.answered_late()
        try:
            proofs = future.result(timeout=0)
            check_answers(proofs, read.keys)
            proofs = self._tagged(read, proofs)
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            self._faults.count(read.store, error)
            proofs = [None] * len(read.keys)
            traffic.promotion_failures += not read.late  # a late one has been counted
            fault = name_of(error)
        else:
            if not read.late:
                breaker.succeeded()
            traffic.promotion_seconds.observe(time.monotonic() - read.began)
        self._end(read, proofs, fault)

    def _tagged(self, read: Read, proofs: list[Proof | None]) -> list[Proof | None]:
        """`proofs`, but None for a block whose tag is not of that name and those bytes. The store
        forgets it, so that it can be stored anew."""
        tagger = self._tagger
        if tagger is None:
            return proofs
        wrong = {
            key
            for key, proof in zip(read.keys, proofs, strict=True)
            if proof is not None and proof.tag != tagger.tag(key, proof.digest)
        }
        if not wrong:
            return proofs
        self._faults.count(read.store, WRONG_TAG, len(wrong))
        self._faults.attempt(read.store, partial(read.store.drop, sorted(wrong)), writing=True)
        return [None if k in wrong else p for k, p in zip(read.keys, proofs, strict=True)]

    def _end(self, read: Read, proofs: Proofs, fault: str = MISSED) -> None:
        """Publish what has come and pin it for those who wait. `fault`: why the rest did not."""
        ok = [read.wanted and proof is not None for proof in proofs]
        self._promoted(read.store, self._slab.commit(read.keys, ok, proofs))
        self._reads.remove(read)
        self._traffic[read.store.name].active_promotions -= 1
        for key in read.keys:
            del self._by_key[key]
        self.version += 1
        waiting = [(ticket, i) for ticket, i in read.waiting if not ticket.ended]
        # Not pinned anew for statistics or order: the commit has just made them the newest.
        slots = self._slab.pin([ticket.keys[i] for ticket, i in waiting], touch=False)
        for (ticket, i), slot in zip(waiting, slots, strict=True):
            ticket.slots[i] = slot
            ticket.waiting -= 1
            if slot is None:
                ticket.fault = fault
