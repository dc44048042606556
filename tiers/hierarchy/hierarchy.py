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
import time
from collections.abc import Callable, Sequence
from functools import partial

from ..admission import AdmissionFilter, AdmitAll
from ..alarm import Alarm
from ..base import Answer, SlabTier, StoreTier, TierStats
from ..tag import Proof, Proofs, Tagger
from .completions import Completions
from .faults import Faults
from .loads import Loads
from .look_up import LookUp
from .pending_lookups import Asking
from .probes import Probes
from .promotions import LoadTicket, ReadUp
from .tickets import Prefix, StoreTicket
from .traffic import Traffic
from .write_backs import WriteBacks
from .writes import WRITE_SECONDS

WATERMARK = 0.25
READ_SECONDS = 5.0
# A step of an engine polls, so `poll` does nothing while nothing has happened. Whatever is due by
# the clock has its alarm; should one be missed, it costs this long.
POLL_SECONDS = 0.05


class Hierarchy:
    """One slab, any number of stores below it, the fastest first. Blocks are written down to each
    of them. Takes over slab and stores: `close` closes them.

    With a `tagger` nothing is read up whose tag is another than its, for the key asked for. Without
    one tags are carried and not looked at: those of a server's clients are theirs to judge."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        *,
        wakeup: Callable[[], None],
        watermark: float = WATERMARK,
        read_seconds: float = READ_SECONDS,
        write_seconds: float = WRITE_SECONDS,
        inclusive: bool = True,
        admission: AdmissionFilter | None = None,
        tagger: Tagger | None = None,
    ) -> None:
        self._slab = slab
        self._stores = list(stores)
        self._inclusive = inclusive
        self._admission = AdmitAll() if admission is None else admission
        self._tagger = tagger
        self._wakeup = wakeup
        self._is_due = True  # something has happened since the last `poll`
        self._poll_at = 0.0
        self._alarm = Alarm(self._ring)
        self._completions = Completions(self._ring)
        self._faults = Faults(self._stores)
        self._traffic = {store.name: Traffic() for store in self._stores}
        self._reads = ReadUp(
            slab,
            read_seconds=read_seconds,
            deliver=self._completions.deliver,
            set_alarm=self._alarm.at,
            promoted=self._promoted,
            faults=self._faults,
            traffic=self._traffic,
            tagger=tagger,
        )
        self._asking = Asking(self._stores, self._faults, self._completions.deliver, self._answered)
        self._look_up = LookUp(slab, self._stores, self._reads, self._faults, self._asking)
        self._write_backs = WriteBacks(
            slab,
            self._stores,
            watermark=watermark,
            write_seconds=write_seconds,
            deliver=self._completions.deliver,
            set_alarm=self._alarm.at,
            unpin=self._unpin,
            forget=self._forget,
            admission=self._admission,
            faults=self._faults,
            traffic=self._traffic,
        )
        self._loads = Loads(
            slab,
            self._stores,
            reads=self._reads,
            look_up=self._look_up,
            reserve=self._reserve,
            unpin=self._unpin,
            used=self._write_backs.used,
            traffic=self._traffic,
        )
        self._probes = Probes(
            self._stores,
            self._faults,
            deliver=self._completions.deliver,
            set_alarm=self._alarm.at,
        )
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
    def stores(self) -> Sequence[StoreTier]:
        """What lies below the slab, the fastest first."""
        return self._stores

    @property
    def is_shared(self) -> bool:
        """Whether other engines read one of the stores too."""
        return any(store.is_shared for store in self._stores)

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
        return (
            self._slab.learns
            or (self.has_stores and self._admission.learns)
            or any(store.learns for store in self._stores)
        )

    def observe(self, chain: Sequence[bytes]) -> None:
        """A prompt arrived whose blocks are `chain`, head first, wherever they are. What it says
        of the future is for policies, of slab and stores, and the admission filter to learn."""
        now = time.monotonic()
        self._slab.observe(chain, now)
        if self._stores:
            self._admission.observe(chain, now)
        for store in self._stores:
            if store.learns:
                self._faults.attempt(store, partial(store.observe, chain, now))

    def ask(self, keys: Sequence[bytes]) -> bool:
        """A prompt was queued whose blocks are `keys`: stores that must ask elsewhere do so now.
        True if one does; `version` changes when it has the answer."""
        return self._asking.ask(keys)

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """The longest run of leading keys that are in some tier. Changes nothing."""
        prefix = self._look_up.find(keys)
        if not all(map(self._faults.allows, self._stores)):
            self._is_due = True  # a store that failed to answer is to be probed
        return prefix

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """HIT, MISS or PENDING for each key on its own. Changes nothing."""
        return self._look_up.answers(keys)

    def begin_load(self, keys: Sequence[bytes]) -> LoadTicket:
        """Pin what the slab has and read up the rest. Where the slab has no room for all, the
        leading part that fits is loaded. Keys come head first."""
        self._is_due = True
        return self._loads.begin(keys)

    def end_load(self, ticket: LoadTicket) -> None:
        """Give back the pins. Reads still under way go on, for whoever asks next."""
        self._is_due = True
        self._loads.end(ticket)

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

    def end_store(
        self, ticket: StoreTicket, ok: bool | Sequence[bool], proofs: Proofs | None = None
    ) -> None:
        """The bytes are in the slots (`ok`, of all or of each), or never will be. `proofs[i]`, of
        each block of the ticket, came with it or was made when it was copied."""
        self._is_due = True
        verdicts = [ok] * len(ticket.keys) if isinstance(ok, bool) else list(ok)
        if ticket.epoch != self._epoch:
            verdicts = [False] * len(verdicts)
        kept = self._slab.commit(ticket.keys, verdicts, proofs)
        if kept:
            self._write_backs.added(kept)
        self._version += 1

    def prove(self, keys: Sequence[bytes], digests: Sequence[bytes]) -> list[Proof] | None:
        """The proofs of blocks that an engine stores, whose bytes have these digests. None without
        a tagger."""
        tagger = self._tagger
        if tagger is None:
            return None
        pairs = zip(keys, digests, strict=True)
        return [Proof(tagger.tag(key, digest), digest) for key, digest in pairs]

    def withhold(self, ticket: StoreTicket) -> list[int]:
        """The ticket's end, as for blocks that will never come, where somebody may still write to
        the slots: they stay out of use until `restore` is given them."""
        self._version += 1
        return self._slab.withhold(ticket.keys)

    def restore(self, slots: Sequence[int]) -> None:
        """Nobody writes any more to slots that were withheld."""
        self._slab.restore(slots)

    def poll(self) -> bool:
        """Take in completions, give up what is late, write back and probe what is due. True if
        anything that a ticket or `find` could show has changed."""
        now = time.monotonic()
        if not self._is_due and now < self._poll_at:
            return False
        self._is_due, self._poll_at = False, now + POLL_SECONDS
        before = self.version
        self._completions.take()
        if self._reads:
            self._reads.give_up_late()
        if not self._write_backs.pump(reading=bool(self._reads)):
            self._is_due = True
        self._probes.run()
        return self.version != before

    def flush(self, timeout_seconds: float) -> bool:
        """Write down everything the stores lack, the most recently used first; False if something
        could not be. Waits, so it is for shutdown only; not for a store that takes nothing."""

        def wait(seconds: float) -> None:
            self._completions.wait(seconds)
            self._completions.take()
            self._probes.run()

        return self._write_backs.flush(timeout_seconds, wait)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget blocks in every tier. What is pinned now is forgotten at once and its slot freed
        when it is given back, what is on its way is forgotten when it arrives."""
        self._is_due = True
        self._forget(list(keys))
        self._reads.drop(keys)
        self._write_backs.drop(keys)
        for store in self._stores:
            self._faults.attempt(store, partial(store.drop, keys), writing=True)

    def clear(self, *, sweep: bool = True) -> None:
        """Forget every block in every tier. What is pinned now is forgotten at once and its slot
        freed when it is given back; what is on its way is forgotten when it arrives. With `sweep`
        false the slots are left for `sweep` to free, which takes far longer than forgetting."""
        self._epoch += 1
        self._version += 1
        self._slab.clear()
        self._reads.clear()
        self._write_backs.clear()
        for store in self._stores:
            self._faults.attempt(store, store.clear)
        if sweep:
            self.sweep(self._slab.num_slots)

    def sweep(self, most: int) -> int:
        """Free up to so many slots of blocks that `clear` has made forgotten; how many it was."""
        return self._slab.sweep(most)

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
            self._faults.show(name, traffic)
        return copy.deepcopy(self._traffic)

    def close(self, timeout_seconds: float) -> bool:
        """Close the stores, then the slab. False if a store still uses slots after that time: the
        slab's memory then stays, because the store may still write to it. Idempotent."""
        if self._closed:
            return not self._is_used()
        self._closed = True
        self._alarm.close()
        deadline = time.monotonic() + timeout_seconds
        for place, store in enumerate(self._stores):
            # Its share of the time, so that one that hangs leaves something for the next.
            left = max(0.0, deadline - time.monotonic()) / (len(self._stores) - place)
            self._faults.attempt(store, partial(store.close, left))
        self._completions.take()
        while self._is_used() and (left := deadline - time.monotonic()) > 0:
            self._completions.wait(left)
            self._completions.take()
        if not self._is_used():
            self._slab.close()
        return not self._is_used()

    def _reserve(self, keys: list[bytes], *, optional: bool = False) -> list[int | None]:
        """Reserve slots, counting the blocks that are lost by it."""
        threatened = self._write_backs.threatened(len(keys))
        slots = self._slab.reserve(keys, optional=optional)
        self._write_backs.evicted(threatened)
        return slots

    def _promoted(self, store: StoreTier, keys: list[bytes]) -> None:
        """Blocks came up from a store. Exclusive, the first store need not keep them."""
        if not store.is_shared:
            self._admission.read_up(len(keys))
        if self._inclusive or store is not self._stores[0] or not keys:
            return
        # Where that fails, it is kept twice.
        self._faults.attempt(store, partial(store.drop, keys), writing=True)
        self._write_backs.added(keys, store)

    def _ring(self) -> None:
        """From any thread: `poll` has something to do."""
        self._is_due = True
        self._wakeup()

    def _answered(self) -> None:
        self._version += 1

    def _unpin(self, keys: list[bytes]) -> None:
        self._slab.unpin(keys)

    def _forget(self, keys: list[bytes]) -> None:
        """Take blocks out of the slab; nobody finds them from now on."""
        self._slab.forget(keys)
        self._version += 1

    def _is_used(self) -> bool:
        return bool(self._reads or self._write_backs.in_flight)
