# SPDX-License-Identifier: Apache-2.0
"""The hierarchy: the slab and the stores below it as one cache of blocks.

    begin_store ──► slab slot ──(write-back, when free slots run low)──► every store that is written
    begin_load  ◄── pinned slot ◄──(one batch for each store)────────── any store

Blocks are written to a shared store at once. By default a promoted block also stays in its store
(inclusive). An exclusive first store drops a promoted block, and gets it back before the slab
evicts it. A block that was written back stays in the slab until its slot is needed. Every fault of
a store becomes a miss and is counted by its cause; no load, store or look-up raises.

A caller may rely on these properties:
- no method but `flush` and `close` waits for a disk or a socket;
- `wakeup` is called, from any thread, when `poll` may have work;
- the bytes in a load's slots do not change from when `LoadTicket.waiting` is 0 to `end_load`.
A caller must obey these rules:
- call every method from one thread, and call `poll` after each `wakeup`;
- end each ticket exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from ..base import NO_CONTEXT, Answer, RequestContext, SlabTier, StoreTier, TierStats
from ..holds import Hold
from ..mailbox import Mailbox
from ..tag import Proofs
from .guarded_store import GuardedStore, Traffic
from .hierarchy_options import HierarchyOptions
from .prefix_lookup import Prefix, PrefixLookup
from .promotions import LoadTicket, Promotions
from .write_back import WriteBacks

DEFAULTS = HierarchyOptions()
# The longest time between two runs of timed work. Each engine step calls `poll`, which returns at
# once without an event; a missed timer delays work by at most this time.
POLL_SECONDS = 0.05


@dataclass(slots=True, eq=False)
class StoreTicket:
    """The slots that `begin_store` reserved for blocks that the slab did not have."""

    keys: list[bytes]
    slots: list[int]
    epoch: int
    num_refused: int = 0  # blocks for which the slab had no slot


class Hierarchy:
    """A slab and any number of stores below it, the fastest first, all owned by the hierarchy.
    Blocks are written back to each store that is not read-only."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        *,
        wakeup: Callable[[], None],
        options: HierarchyOptions = DEFAULTS,
    ) -> None:
        self.tiers = [slab.name, *(store.name for store in stores)]  # names, the slab first
        self.num_slots = slab.num_slots  # blocks that the slab can hold
        self.block_bytes = slab.layout.page_bytes
        self.has_stores = bool(stores)  # whether stores are below the slab
        self._slab = slab
        self._admission = options.admission
        self._tagger = options.tagger
        self._mailbox = Mailbox(wakeup)
        self._stores = [GuardedStore(store, self._mailbox, options) for store in stores]
        self._write_backs = WriteBacks(slab, self._stores, options)
        self._promotions = Promotions(slab, self._stores, self._write_backs, options.tagger)
        self._look_up = PrefixLookup(slab, self._stores, self._promotions)
        self._poll_at = 0.0
        self._epoch = 0
        self._closed = False

    @property
    def num_free_slots(self) -> int:
        return self._slab.free_slots()

    @property
    def stores(self) -> Sequence[StoreTier]:
        return [store.tier for store in self._stores]

    @property
    def is_shared(self) -> bool:
        """Whether other engines read one of the stores, or the slab itself."""
        return self._slab.is_served or any(store.is_shared for store in self._stores)

    @property
    def hears_of_others(self) -> bool:
        """Whether other engines write to one of the stores, so that it can be watched."""
        return any(store.is_shared or store.is_read_only for store in self._stores)

    @property
    def others_are_up(self) -> bool:
        """Whether a store that other engines write to is up and its breaker is closed."""
        stores = (store for store in self._stores if store.is_shared or store.is_read_only)
        return any(store.breaker.allows and store.tier.is_up for store in stores)

    @property
    def num_unwritten(self) -> int:
        """The number of slab blocks that would be lost for a store if they were evicted now, for
        the store that lacks most blocks. A store with an open breaker does not count."""
        return self._write_backs.num_unwritten

    @property
    def version(self) -> int:
        """A number that changes when a ticket or a result of `find_prefix` may have changed."""
        return self._mailbox.version

    @property
    def shared_version(self) -> tuple[int, int]:
        """A value that changes whenever a result of `shared` may have changed."""
        return self.version, self._write_backs.num_ended

    @property
    def learns(self) -> bool:
        """Whether `announce_prompt` has an effect."""
        return (
            self._slab.learns
            or (self.has_stores and self._admission.learns)
            or any(store.tier.learns for store in self._stores)
        )

    def announce_prompt(self, chain: Sequence[bytes]) -> None:
        """Report a prompt's blocks, in order, to the eviction policies and the admission filter."""
        now = time.monotonic()
        self._slab.observe(chain, now)
        if self._stores:
            self._admission.observe(chain, now)
        for store in self._stores:
            if store.tier.learns:
                store.attempt(partial(store.tier.observe, chain, now))

    def prefetch_lookup(self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT) -> bool:
        """Call `prefetch_lookup` of all stores for a queued prompt whose blocks are `keys`, in
        prompt order. True if a store sends its servers a request; `version` changes with the
        answer."""
        is_open = [store.prefetch_lookup(keys, context) for store in self._stores]
        return any(is_open)

    def find_prefix(self, keys: Sequence[bytes]) -> Prefix:
        """Return the longest prefix of `keys` with all blocks in some tier. Changes nothing."""
        prefix = self._look_up.match_prefix(keys)
        if not all(store.breaker.allows for store in self._stores):
            self._mailbox.is_due = True  # `poll` must probe a store that failed to answer
        return prefix

    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """Return HIT, MISS or PENDING for each key, independent of other keys. Changes nothing."""
        return self._look_up.answers(keys)

    def begin_load(self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT) -> LoadTicket:
        """Pin the blocks that the slab has, promote all others. If the slab lacks slots, only the
        leading blocks that fit are loaded. Keys are in prompt order; `context` is the request's."""
        self._mailbox.is_due = True
        return self._promotions.begin_load(keys, context)

    def end_load(self, ticket: LoadTicket) -> None:
        """Unpin a load's blocks. Reads under way continue; later loads can use their blocks."""
        self._mailbox.is_due = True
        self._promotions.end_load(ticket)

    def begin_store(self, keys: Sequence[bytes]) -> StoreTicket:
        """Reserve slots for the blocks that the slab does not have. Keys are in prompt order. If
        slots are short, the last blocks get no slot; a block needs those before it."""
        answers = self._slab.lookup(keys)
        new = [k for k, a in zip(keys, answers, strict=True) if a is Answer.MISS]
        ticket = StoreTicket([], [], self._epoch)
        if new:
            for key, slot in zip(new, self._write_backs.reserve(new, optional=True), strict=True):
                if slot is not None:
                    ticket.keys.append(key)
                    ticket.slots.append(slot)
            ticket.num_refused = len(new) - len(ticket.keys)
            self._mailbox.version += 1
        return ticket

    def end_store(
        self,
        ticket: StoreTicket,
        ok: bool | Sequence[bool],
        proofs: Proofs | None = None,
        digests: Sequence[bytes] | None = None,
    ) -> None:
        """End a ticket. `ok`, one bool for all blocks or one for each block, says whether the bytes
        are in the slots; a slot without bytes is freed. `proofs[i]` is the proof of the i-th block,
        if known. With a tagger, `digests` (16 bytes for each block) are made into proofs."""
        self._mailbox.is_due = True
        verdicts = [ok] * len(ticket.keys) if isinstance(ok, bool) else list(ok)
        if ticket.epoch != self._epoch:
            verdicts = [False] * len(verdicts)
        if digests is not None and self._tagger is not None:
            proofs = self._tagger.prove_all(ticket.keys, digests)
        kept = self._slab.commit(ticket.keys, verdicts, proofs)
        if kept:
            self._write_backs.added(kept)
        self._mailbox.version += 1

    def withhold(self, ticket: StoreTicket) -> list[int]:
        """End a ticket whose blocks are not stored, although a client may still write to its slots.
        Return the slots, which stay unused until `restore`."""
        self._mailbox.version += 1
        return self._slab.withhold(ticket.keys)

    def restore(self, slots: Sequence[int]) -> None:
        """Free withheld slots. No write to these slots may still be under way."""
        self._slab.restore(slots)

    def poll(self) -> bool:
        """Process completions and deadlines, start due work. True if an answer may have changed."""
        now = time.monotonic()
        if not self._mailbox.is_due and now < self._poll_at:
            return False
        self._mailbox.is_due, self._poll_at = False, now + POLL_SECONDS
        before = self.version
        self._mailbox.run_delivered()
        if self._promotions.under_way:
            self._promotions.give_up_late()
        if not self._write_backs.pump(reading=bool(self._promotions.under_way)):
            self._mailbox.is_due = True
        for store in self._stores:
            store.probe_when_due()
        return self.version != before

    def flush(self, timeout_seconds: float) -> bool:
        """Write all blocks to the stores that lack them, the most recently used first. Return False
        if some were not written. Only for shutdown: `flush` waits, but not for a store that takes
        no block."""
        return self._write_backs.write_missing(timeout_seconds, self._mailbox)

    def forget_blocks(self, keys: Sequence[bytes]) -> None:
        """Remove blocks from every tier. A pinned block is removed at once; its slot is freed with
        its last pin. A block that is being read or written is removed when the transfer ends."""
        self._mailbox.is_due = True
        self._slab.forget(keys)
        self._mailbox.version += 1
        self._promotions.drop_promotions(keys)
        self._write_backs.discard_dirty(keys)
        for store in self._stores:
            store.drop(keys)

    def clear(self, *, sweep: bool = True) -> None:
        """Remove every block from every tier. Pinned blocks, and blocks that are being read or
        written, are treated as in `forget_blocks`. Without `sweep`, the caller must call the method
        `sweep` to free the slots, which takes far longer than the removal."""
        self._epoch += 1
        self._mailbox.version += 1
        self._slab.clear()
        self._promotions.clear()
        self._write_backs.clear()
        for store in self._stores:
            store.attempt(store.tier.clear)
        if sweep:
            self.sweep(self._slab.num_slots)

    def sweep(self, most: int) -> int:
        """Free up to `most` slots of blocks that `clear` removed. Return how many were freed."""
        return self._slab.sweep(most)

    def shared(self, keys: Sequence[bytes], *, write: bool = False) -> list[Answer]:
        """Return for each key HIT if the shared store has the block, PENDING if it is being written
        there, else MISS. With `write`, blocks that only the slab has are written to the shared
        store. If no store is shared but the slab is served, the answers are those of the slab."""
        shared = next(((i, s) for i, s in enumerate(self._stores) if s.is_shared), None)
        if shared is None:
            served = self._slab.is_served
            return self._slab.lookup(keys) if served else [Answer.MISS] * len(keys)
        index, store = shared
        answers = store.lookup(keys)
        missing = [i for i, answer in enumerate(answers) if answer is Answer.MISS]
        in_slab = self._slab.lookup([keys[i] for i in missing])
        write_back = self._write_backs.get_write_back(index)
        # While a breaker is open no request waits, and a write is a probe.
        is_waiting = store.breaker.allows and store.write_breaker.allows
        again = []
        for i, answer in zip(missing, in_slab, strict=True):
            is_moving = answer is Answer.PENDING or write_back.is_moving(keys[i])
            if not is_moving and answer is Answer.HIT and write:
                again.append(keys[i])
                is_moving = True
            if is_moving and is_waiting:
                answers[i] = Answer.PENDING
        if again:
            self._mailbox.is_due = True
            write_back.added(again)
        return answers

    def watch_stores(self, hear: Callable[[Sequence[bytes]], bool]) -> None:
        """Watch the stores that other engines write to. `poll` calls `hear` with the keys of new
        blocks that the slab does not have. If `hear` returns True, `version` changes."""

        def heard(keys: Sequence[bytes]) -> None:
            answers = self._slab.lookup(keys)  # stores report this engine's blocks too
            others = [k for k, answer in zip(keys, answers, strict=True) if answer is Answer.MISS]
            self._mailbox.version += hear(others)

        for store in self._stores:
            if store.is_shared or store.is_read_only:
                store.watch(heard)

    def lease(
        self, keys: Sequence[bytes], seconds: float, done: Callable[[list[bool]], None]
    ) -> None:
        """Lease the blocks `keys` for `seconds` in the shared store, or else in the slab. `done` is
        called, by `poll` or at once, with a bool for each block, whether it is protected."""
        for store in self._stores:
            if store.is_shared:
                store.lease(keys, seconds, done)
                return
        done(self._slab.keep(keys, seconds))

    def hold(self, keys: Sequence[bytes], seconds: float) -> Hold:
        """Protect blocks, given in prompt order, from eviction from the slab for `seconds`, also
        blocks that are still being loaded. `release_hold` ends the protection sooner."""
        return self._slab.hold(keys, seconds)

    def ask_stores(self, keys: Sequence[bytes], seconds: float) -> None:
        """Lease the blocks `keys`, given in prompt order, for `seconds` in each store with leases.
        A store leases the blocks that it has. The leases end after `seconds`."""
        for store in self._stores:
            store.lease(keys, seconds, _ignore)

    def release_hold(self, hold: Hold) -> None:
        """End a hold before its time. Does nothing if the hold has ended."""
        self._slab.release(hold)

    def stats(self) -> dict[str, TierStats]:
        """Return counters by tier. The slab's `dropped_stores` includes unwritten evictions."""
        slab = self._slab.stats()
        slab.dropped_stores += sum(store.traffic.lost_blocks for store in self._stores)
        return {self._slab.name: slab} | {store.name: store.stats() for store in self._stores}

    def traffic(self) -> dict[str, Traffic]:
        """Return copies of the transfer counters by store, the fastest store first."""
        return {store.name: store.copy_traffic() for store in self._stores}

    def close(self, timeout_seconds: float) -> bool:
        """Close the stores, then the slab. Return False if a store still uses slots after
        `timeout_seconds`; the slab then stays open, because the store may write to the slab's
        memory. Idempotent."""
        if self._closed:
            return not self._is_used()
        self._closed = True
        self._mailbox.close()
        deadline = time.monotonic() + timeout_seconds
        for place, store in enumerate(self._stores):
            # Each store gets a share of the time, so that a hanging store leaves time for the next
            # store.
            left = max(0.0, deadline - time.monotonic()) / (len(self._stores) - place)
            store.attempt(partial(store.tier.close, left))
        self._mailbox.run_delivered()
        while self._is_used() and (left := deadline - time.monotonic()) > 0:
            self._mailbox.wait(left)
            self._mailbox.run_delivered()
        if not self._is_used():
            self._slab.close()
        return not self._is_used()

    def _is_used(self) -> bool:
        return bool(self._promotions.under_way or self._write_backs.in_flight)


def _ignore(_kept: list[bool]) -> None:
    """Ignore the answers of a lease."""
