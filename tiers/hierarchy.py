# SPDX-License-Identifier: Apache-2.0
"""The hierarchy: the slab and the stores below it as one place where blocks are kept.

    begin_store ──► slab slot ──(write-back, when free slots run low)──► every store
    begin_load  ◄── pinned slot ◄──(one batch for each store)────────── any store

Inclusive, as it is unless told otherwise, a block read up stays below. Exclusive, it leaves the
first store, which so holds other blocks than the slab, and is written down again when its turn to
be evicted comes. Either way a block written down stays in the slab until its slot is needed.
Whatever goes wrong in a store is a miss with a counted reason; nothing is raised on the data path.
Knows nothing of pools, devices or requests.

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

from .admission import AdmissionFilter, AdmitAll
from .alarm import Alarm
from .base import Answer, SlabTier, StoreTier, TierStats
from .faults import Faults
from .look_up import LookUp
from .read_up import LoadTicket, ReadUp
from .tickets import Prefix, StoreTicket
from .traffic import Traffic
from .write_backs import WriteBacks

WATERMARK = 0.25
READ_SECONDS = 5.0
# A store that is busy with nothing of ours is asked again so often while flushing.
RETRY_SECONDS = 0.01


class Hierarchy:
    """One slab, any number of stores below it, the fastest first. Blocks are written down to each
    of them. Takes over slab and stores: `close` closes them."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        *,
        wakeup: Callable[[], None],
        watermark: float = WATERMARK,
        read_seconds: float = READ_SECONDS,
        inclusive: bool = True,
        admission: AdmissionFilter | None = None,
    ) -> None:
        self._slab = slab
        self._stores = list(stores)
        self._wakeup = wakeup
        self._inclusive = inclusive
        self._admission = AdmitAll() if admission is None else admission
        self._alarm = Alarm(wakeup)
        self._completions: deque[Callable[[], None]] = deque()
        self._delivered = threading.Event()
        self._faults = Faults(self._stores)
        self._traffic = {store.name: Traffic() for store in self._stores}
        self._reads = ReadUp(
            slab,
            read_seconds=read_seconds,
            deliver=self._deliver,
            set_alarm=self._alarm.at,
            promoted=self._promoted,
            faults=self._faults,
            traffic=self._traffic,
        )
        self._look_up = LookUp(slab, self._stores, self._reads, self._faults)
        self._write_backs = WriteBacks(
            slab,
            self._stores,
            watermark=watermark,
            deliver=self._deliver,
            unpin=self._unpin,
            admission=self._admission,
            faults=self._faults,
            traffic=self._traffic,
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
    def num_slots(self) -> int:
        """Blocks that the slab holds at most."""
        return self._slab.num_slots

    @property
    def has_stores(self) -> bool:
        """Whether there is anything below the slab."""
        return bool(self._stores)

    @property
    def block_bytes(self) -> int:
        """The bytes of one block."""
        return self._slab.layout.page_bytes

    @property
    def version(self) -> int:
        """Changes whenever a ticket, or the answer of `find`, may have changed."""
        return self._version + self._reads.version

    @property
    def learns(self) -> bool:
        """Whether `observe` is of use to anybody."""
        return self._slab.learns or (self.has_stores and self._admission.learns)

    def observe(self, chain: Sequence[bytes]) -> None:
        """A prompt arrived whose blocks are `chain`, head first, wherever they are. What it says
        of the future is for the slab's policy and the admission filter to learn."""
        now = time.monotonic()
        self._slab.observe(chain, now)
        if self._stores:
            self._admission.observe(chain, now)

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """The longest run of leading keys that are in some tier. Changes nothing."""
        return self._look_up.find(keys, self._doomed)

    def begin_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Pin what the slab has and read up the rest. Where the slab has no room for all, the
        leading part that fits is loaded. Keys come head first."""
        pinned = self._slab.pin(keys)
        ticket = LoadTicket(list(keys), pinned, [self._slab.name] * len(keys))
        there = [key for key, slot in zip(keys, pinned, strict=True) if slot is not None]
        self._write_backs.used(there)
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
            for key, slot in zip(new, self._reserve(new, optional=True), strict=True):
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
        if keep:
            self._write_backs.added(ticket.keys)
        self._version += 1

    def poll(self) -> bool:
        """Take in completions, give up late reads, write back what is due. True if anything that
        a ticket or `find` could show has changed."""
        before = self.version
        self._take_completions()
        if self._reads:
            self._reads.give_up_late()
        self._write_backs.pump(reading=bool(self._reads))
        return self.version != before

    def flush(self, timeout_seconds: float) -> bool:
        """Write down everything the stores lack, the most recently used first; False if the time
        was too short. Waits, so it is for shutdown only."""
        deadline = time.monotonic() + timeout_seconds
        self._write_backs.recheck(self._doomed)
        while True:
            accepted = self._write_backs.flush_some()
            if not self._write_backs.pending:
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if not accepted and not self._write_backs.in_flight:
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
        self._write_backs.clear()
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
        for name, traffic in self._traffic.items():
            breaker = self._faults.breakers[name]
            traffic.breaker, traffic.breaker_opened = breaker.state.value, breaker.times_opened
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
        places = dict(zip(fresh, self._look_up.stores_of([keys[i] for i in fresh]), strict=True))
        lost = (i for i in missing if (not joined[i].is_good if i in joined else places[i] is None))
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

    def _reserve(self, keys: list[bytes], *, optional: bool = False) -> list[int | None]:
        """Reserve slots, counting the blocks that are lost by it."""
        threatened = self._write_backs.threatened(len(keys))
        slots = self._slab.reserve(keys, optional=optional)
        self._write_backs.evicted(threatened)
        return slots

    def _promoted(self, store: StoreTier, keys: list[bytes]) -> None:
        """Blocks came up from a store. Exclusive, the first store need not keep them."""
        if self._inclusive or store is not self._stores[0] or not keys:
            return
        try:
            store.drop(keys)
        except Exception as error:  # noqa: BLE001 - kept twice, which costs room and nothing else
            self._faults.count(store, error)
        self._write_backs.added(keys, store)

    def _unpin(self, keys: list[bytes]) -> None:
        self._slab.unpin(keys)
        if self._doomed:
            self._slab.drop(list(self._doomed))
            self._doomed.intersection_update(self._slab.keys())

    def _is_used(self) -> bool:
        return bool(self._reads or self._write_backs.in_flight)

    def _deliver(self, completion: Callable[[], None]) -> None:
        """From any thread: have the caller's thread run `completion` in its next `poll`."""
        self._completions.append(completion)
        self._delivered.set()
        self._wakeup()

    def _take_completions(self) -> None:
        self._delivered.clear()
        while self._completions:
            self._completions.popleft()()
