# SPDX-License-Identifier: Apache-2.0
"""The hierarchy: the slab and the stores below it as one place where blocks are kept.

    begin_store ──► slab slot ──(write-back, when free slots run low)──► first store
    begin_load  ◄── pinned slot ◄──(one batch for each store)────────── any store

It is inclusive: a block read up stays below, a block written down stays in the slab until its slot
is needed. Whatever goes wrong in a store is a miss with a counted reason; nothing is raised on the
data path. Knows nothing of pools, devices or requests.

A caller may rely on this:
- no method but `flush` and `close` waits for a disk or a socket;
- `wakeup` is called, from any thread, when `poll` may have something to do;
- slots of a load stay as they are from `LoadTicket.done()` to `end_load`.
A caller must do this:
- call every method from one thread, `poll` after each wake-up;
- end each ticket exactly once.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from .alarm import Alarm
from .base import Answer, SlabTier, StoreTier, TierStats
from .faults import Faults
from .read_up import LoadTicket, ReadUp
from .tickets import Prefix, StoreTicket
from .traffic import Traffic
from .write_back import WriteBack

WATERMARK = 0.25
READ_SECONDS = 5.0
# Blocks looked up at a time; a look-up stops at the first miss.
FIND_BLOCKS = 256
# A store that is busy with nothing of ours is asked again so often while flushing.
RETRY_SECONDS = 0.01


class Hierarchy:
    """One slab, any number of stores below it, the fastest first. Blocks are written down to the
    first store only. Takes over slab and stores: `close` closes them."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        *,
        wakeup: Callable[[], None],
        watermark: float = WATERMARK,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        self._slab = slab
        self._stores = list(stores)
        self._wakeup = wakeup
        self._alarm = Alarm(wakeup)
        self._completions: deque[Callable[[], None]] = deque()
        self._delivered = threading.Event()
        self._faults = Faults()
        self._traffic = {store.name: Traffic() for store in self._stores}
        self._reads = ReadUp(
            slab,
            read_seconds=read_seconds,
            deliver=self._deliver,
            set_alarm=self._alarm.at,
            faults=self._faults,
            traffic=self._traffic,
        )
        self._write_back: WriteBack | None = None
        if self._stores:
            self._write_back = WriteBack(
                slab,
                self._stores[0],
                watermark=watermark,
                deliver=self._deliver,
                unpin=self._unpin,
                faults=self._faults,
                traffic=self._traffic[self._stores[0].name],
            )
        self._doomed: set[bytes] = set()  # pinned when everything was forgotten
        self._epoch = 0
        self._version = 0
        self._closed = False

    @property
    def tiers(self) -> list[str]:
        """The names of the tiers, the slab first."""
        return [self._slab.name, *(store.name for store in self._stores)]

    @property
    def block_bytes(self) -> int:
        """The bytes of one block."""
        return self._slab.layout.page_bytes

    @property
    def version(self) -> int:
        """Changes whenever a ticket, or the answer of `find`, may have changed."""
        return self._version + self._reads.version

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """The longest run of leading keys that are in some tier. Changes nothing."""
        tiers: list[str] = []
        for start in range(0, len(keys), FIND_BLOCKS):
            batch = keys[start : start + FIND_BLOCKS]
            answers = self._slab.lookup(batch)
            if answers.count(Answer.HIT) == len(batch) and not self._doomed:
                tiers += [self._slab.name] * len(batch)
                continue
            misses = [k for k, a in zip(batch, answers, strict=True) if a is Answer.MISS]
            places = dict(zip(misses, self._places(misses), strict=True))
            for key, answer in zip(batch, answers, strict=True):
                if answer is Answer.PENDING:
                    return Prefix(tiers, self._is_coming(key))
                place = self._slab if answer is Answer.HIT else places[key]
                if place is None or key in self._doomed:
                    return Prefix(tiers, False)
                tiers.append(place.name)
        return Prefix(tiers, False)

    def begin_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Pin what the slab has and read up the rest. Where the slab has no room for all, the
        leading part that fits is loaded. Keys come head first."""
        pinned = self._slab.pin(keys)
        ticket = LoadTicket(list(keys), pinned, [self._slab.name] * len(keys))
        if self._write_back is not None:
            self._write_back.used(keys)
        missing = [i for i, slot in enumerate(pinned) if slot is None]
        if missing:
            self._read_up(ticket, missing)
        return ticket

    def end_load(self, ticket: LoadTicket) -> None:
        """Give back the pins. Reads still under way go on, for whoever asks next."""
        if not ticket.ended:
            ticket.ended = True
            pairs = zip(ticket.keys, ticket.slots, strict=True)
            self._unpin([key for key, slot in pairs if slot is not None])

    def begin_store(self, keys: Sequence[bytes]) -> StoreTicket:
        """Reserve slots for those blocks that the slab does not have. Keys come head first: short
        of room, the last ones go without, since a tail is no use without its head."""
        answers = self._slab.lookup(keys)
        new = [k for k, a in zip(keys, answers, strict=True) if a is Answer.MISS]
        ticket = StoreTicket([], [], self._epoch)
        if new:
            for key, slot in zip(new, self._reserve(new), strict=True):
                if slot is not None:
                    ticket.keys.append(key)
                    ticket.slots.append(slot)
            ticket.num_refused = len(new) - len(ticket.keys)
            self._version += 1
        return ticket

    def end_store(self, ticket: StoreTicket, ok: bool) -> None:
        """The bytes are in the slots (`ok`), or never will be."""
        keep = ok and ticket.epoch == self._epoch
        self._slab.commit(ticket.keys, [keep] * len(ticket.keys))
        if keep and self._write_back is not None:
            self._write_back.added(ticket.keys)
        self._version += 1

    def poll(self) -> bool:
        """Take in completions, give up late reads, write back what is due. True if anything that
        a ticket or `find` could show has changed."""
        before = self.version
        self._take_completions()
        if self._reads:
            self._reads.give_up_late()
        if self._write_back is not None:
            self._write_back.pump(reading=bool(self._reads))
        return self.version != before

    def flush(self, timeout_seconds: float) -> bool:
        """Write down everything the first store lacks, the most recently used first; False if
        the time was too short. Waits, so it is for shutdown only."""
        if self._write_back is None:
            return True
        deadline = time.monotonic() + timeout_seconds
        self._write_back.recheck(self._doomed)
        while True:
            accepted = self._write_back.flush_some()
            if not self._write_back.pending:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if not accepted and not self._write_back.in_flight:
                left = min(left, RETRY_SECONDS)
            self._delivered.wait(left)
            self._take_completions()

    def clear(self) -> None:
        """Forget every block in every tier. What is pinned now is forgotten when it is given
        back, what is on its way when it arrives."""
        self._epoch += 1
        self._version += 1
        self._slab.drop(self._slab.keys())
        self._doomed = set(self._slab.keys())
        self._reads.clear()
        if self._write_back is not None:
            self._write_back.clear()
        for store in self._stores:
            try:
                store.clear()
            except Exception as error:  # noqa: BLE001 - a broken store must not stop the others
                self._faults.count(store, error)

    def stats(self) -> dict[str, TierStats]:
        """By tier; the slab's `dropped_stores` includes blocks evicted before they were written."""
        slab = self._slab.stats()
        slab.dropped_stores += sum(traffic.lost_blocks for traffic in self._traffic.values())
        result = {self._slab.name: slab} | {store.name: store.stats() for store in self._stores}
        self._faults.add_to(result)
        return result

    def traffic(self) -> dict[str, Traffic]:
        """A copy of what moved between the slab and each store, the fastest first."""
        return copy.deepcopy(self._traffic)

    def close(self, timeout_seconds: float) -> bool:
        """Close the stores, then the slab. False if a store still uses slots after that time: the
        slab's memory then stays, because the store may still write to it. Idempotent."""
        if self._closed:
            return not self._is_used()
        self._closed = True
        self._alarm.close()
        deadline = time.monotonic() + timeout_seconds
        for store in self._stores:
            try:
                store.close(max(0.0, deadline - time.monotonic()))
            except Exception as error:  # noqa: BLE001 - the others must be closed as well
                self._faults.count(store, error)
        self._take_completions()
        while self._is_used() and (left := deadline - time.monotonic()) > 0:
            self._delivered.wait(left)
            self._take_completions()
        if not self._is_used():
            self._slab.close()
        return not self._is_used()

    def _read_up(self, ticket: LoadTicket, missing: list[int]) -> None:
        """Fill the gaps of a ticket: join reads under way, reserve slots and read the others."""
        keys = ticket.keys
        joined = {i: read for i in missing if (read := self._reads.of(keys[i])) is not None}
        fresh = [i for i in missing if i not in joined]
        places = dict(zip(fresh, self._places([keys[i] for i in fresh]), strict=True))
        lost = (i for i in missing if (joined[i].late if i in joined else places[i] is None))
        end = next(lost, len(keys))
        fresh = [i for i in fresh if i < end]
        slots = dict(zip(fresh, self._reserve([keys[i] for i in fresh]), strict=True))
        for i in fresh:
            place = places[i]
            if slots[i] is None and place is not None:
                self._traffic[place.name].promotion_allocation_failures += 1
                end = i
                break
        self._cut(ticket, end, slots)
        for i, read in joined.items():
            if i < end:
                read.join(ticket, i)
        for store in self._stores:
            chosen = {
                i: slot
                for i, slot in slots.items()
                if slot is not None and i < end and places[i] is store
            }
            if chosen:
                self._reads.start(store, ticket, list(chosen), list(chosen.values()))

    def _cut(self, ticket: LoadTicket, end: int, reserved: dict[int, int | None]) -> None:
        """Give back pins and reservations from `end` on."""
        spare = [ticket.keys[i] for i, slot in reserved.items() if i >= end and slot is not None]
        self._slab.commit(spare, [False] * len(spare))
        beyond = range(end, len(ticket.keys))
        self._unpin([ticket.keys[i] for i in beyond if ticket.slots[i] is not None])
        ticket.slots[end:] = [None] * len(beyond)

    def _places(self, keys: list[bytes]) -> list[StoreTier | None]:
        """The first store that has each key. A store's PENDING counts as a miss: nothing would
        wake whoever waited for it."""
        places: list[StoreTier | None] = [None] * len(keys)
        for store in self._stores:
            unplaced = [i for i, place in enumerate(places) if place is None]
            answers = self._faults.lookup(store, [keys[i] for i in unplaced])
            for i, answer in zip(unplaced, answers, strict=True):
                if answer is Answer.HIT:
                    places[i] = store
        return places

    def _reserve(self, keys: list[bytes]) -> list[int | None]:
        """Reserve slots, counting the blocks that are lost by it."""
        if self._write_back is None:
            return self._slab.reserve(keys)
        threatened = self._write_back.threatened(len(keys))
        slots = self._slab.reserve(keys)
        if threatened:
            self._write_back.evicted(threatened)
        return slots

    def _unpin(self, keys: list[bytes]) -> None:
        self._slab.unpin(keys)
        if self._doomed:
            self._slab.drop(list(self._doomed))
            self._doomed.intersection_update(self._slab.keys())

    def _is_coming(self, key: bytes) -> bool:
        """Whether a reserved block will be there soon: stored to the slab, or read in time."""
        read = self._reads.of(key)
        return read is None or not read.late

    def _is_used(self) -> bool:
        return bool(self._reads or (self._write_back and self._write_back.in_flight))

    def _deliver(self, completion: Callable[[], None]) -> None:
        """From any thread: have the caller's thread run `completion` in its next `poll`."""
        self._completions.append(completion)
        self._delivered.set()
        self._wakeup()

    def _take_completions(self) -> None:
        self._delivered.clear()
        while self._completions:
            self._completions.popleft()()
