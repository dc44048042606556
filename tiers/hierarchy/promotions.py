# SPDX-License-Identifier: Apache-2.0
"""Promotions: the loads, and the batches that stores read into reserved slots of the slab.

A load requests the leading blocks of a prompt. If a block is in no tier, or gets no slot in the
slab, the blocks after this block are useless and are not read. A block is read only once, however
many loads wait for it. If a promotion misses its deadline, the waiting loads fail. The slots of a
late promotion stay reserved until the read has ended, because the store may still write to them;
the blocks are then published for later loads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from ..base import NO_CONTEXT, RequestContext, SlabTier, load_for
from ..tag import Proof, Proofs, Tagger
from .guarded_store import LATE, WRONG_TAG, GuardedStore, check_answers, find_stores, name_of
from .write_back import WriteBacks

MISSED = "missed"  # the store did not have the block, or it was damaged


@dataclass(slots=True, eq=False)
class LoadTicket:
    """A load. When `waiting` is 0, `slots[i]` is the pinned slot of `keys[i]`, or None if the block
    was not loaded. Only the first `begun` blocks are loaded, because the next block is in no tier
    or got no slot. `fault` says why one of the first `begun` blocks was not loaded, if any."""

    keys: list[bytes]
    slots: list[int | None]
    tiers: list[str]  # the source tier of each of the first `begun` blocks
    waiting: int = 0  # how many blocks are still being read
    ended: bool = False
    begun: int = 0
    fault: str | None = None
    context: RequestContext = NO_CONTEXT


@dataclass(slots=True, eq=False)
class Promotion:
    """A batch that is being read from a store into the slab."""

    store: GuardedStore
    keys: list[bytes]
    began: float
    deadline: float
    waiting: list[tuple[LoadTicket, int]] = field(default_factory=list)
    late: bool = False
    wanted: bool = True  # False after `clear`
    dropped: set[bytes] = field(default_factory=set)  # removed keys

    def brings(self, key: bytes) -> bool:
        """Whether a load may wait for this promotion to get the block `key`."""
        return self.wanted and not self.late and key not in self.dropped

    def join(self, ticket: LoadTicket, index: int) -> None:
        """Make a ticket wait for this promotion of the ticket's block at `index`."""
        self.waiting.append((ticket, index))
        ticket.tiers[index] = self.store.name
        ticket.waiting += 1

    def give_up(self) -> None:
        """Fail the waiting loads, because the deadline has passed."""
        self.late = True
        for ticket, _ in self.waiting:
            ticket.waiting -= 1
            ticket.fault = LATE
        self.waiting.clear()


class Promotions:
    """The loads of a hierarchy and the promotions under way for them. With a `tagger`, only blocks
    with the tag that the tagger makes are published. Only one thread calls the methods."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[GuardedStore],
        write_backs: WriteBacks,
        tagger: Tagger | None,
    ) -> None:
        self._slab = slab
        self._stores = stores
        self._write_backs = write_backs
        self._tagger = tagger
        self.under_way: list[Promotion] = []
        self.by_key: dict[bytes, Promotion] = {}  # by keys in `under_way`

    def begin_load(self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT) -> LoadTicket:
        """See `Hierarchy.begin_load`."""
        pinned = self._slab.pin(keys)
        tiers = [self._slab.name] * len(keys)
        ticket = LoadTicket(list(keys), pinned, tiers, begun=len(keys), context=context)
        self._write_backs.used(
            [key for key, slot in zip(keys, pinned, strict=True) if slot is not None]
        )
        missing = [i for i, slot in enumerate(pinned) if slot is None]
        if missing:
            self._promote(ticket, missing)
        return ticket

    def end_load(self, ticket: LoadTicket) -> None:
        if not ticket.ended:
            ticket.ended = True
            pairs = zip(ticket.keys, ticket.slots, strict=True)
            self._slab.unpin([key for key, slot in pairs if slot is not None])

    def give_up_late(self) -> None:
        """Fail the promotions whose deadline has passed."""
        now = time.monotonic()
        for promotion in self.under_way:
            if not promotion.late and promotion.deadline <= now:
                promotion.give_up()
                promotion.store.count_fault(LATE)
                promotion.store.traffic.promotion_failures += 1
                promotion.store.mailbox.version += 1

    def clear(self) -> None:
        """Prevent that a block of the promotions under way is published."""
        for promotion in self.under_way:
            promotion.wanted = False

    def drop_promotions(self, keys: Sequence[bytes]) -> None:
        """Keep later loads from waiting for promotions of the removed blocks `keys`."""
        for key in keys:
            promotion = self.by_key.get(key)
            if promotion is not None:
                promotion.dropped.add(key)

    def _promote(self, ticket: LoadTicket, missing: list[int]) -> None:
        """Load missing blocks: join promotions under way, and start promotions of other blocks."""
        keys = ticket.keys
        joined = {i: found for i in missing if (found := self.by_key.get(keys[i])) is not None}
        fresh = [i for i in missing if i not in joined]
        places = dict(zip(fresh, find_stores(self._stores, [keys[i] for i in fresh]), strict=True))
        lost = (
            i
            for i in missing
            if (not joined[i].brings(keys[i]) if i in joined else places[i] is None)
        )
        end = next(lost, len(keys))
        fresh = [i for i in fresh if i < end]
        slots = dict(zip(fresh, self._write_backs.reserve([keys[i] for i in fresh]), strict=True))
        for i in fresh:
            place = places[i]
            if slots[i] is None and place is not None:
                place.traffic.promotion_allocation_failures += 1
                end = i
                break
        self._cut(ticket, end, slots)
        for i, promotion in joined.items():
            if i < end:
                promotion.join(ticket, i)
        for store in self._stores:
            chosen = {
                i: slot
                for i, slot in slots.items()
                if slot is not None and i < end and places[i] is store
            }
            if chosen:
                self._start_promotion(store, ticket, list(chosen), list(chosen.values()))

    def _cut(self, ticket: LoadTicket, end: int, reserved: dict[int, int | None]) -> None:
        """Undo the ticket's pins and reservations from block `end` on."""
        spare = [ticket.keys[i] for i, slot in reserved.items() if i >= end and slot is not None]
        self._slab.commit(spare, [False] * len(spare))
        beyond = range(end, len(ticket.keys))
        self._slab.unpin([ticket.keys[i] for i in beyond if ticket.slots[i] is not None])
        ticket.slots[end:] = [None] * len(beyond)
        ticket.begun = end

    def _start_promotion(
        self, store: GuardedStore, ticket: LoadTicket, indices: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Read the ticket's blocks at `indices` into the reserved `slots`."""
        keys = [ticket.keys[i] for i in indices]
        now = time.monotonic()
        promotion = Promotion(store, keys, now, now + store.read_seconds)
        store.traffic.active_promotions += 1
        self.under_way.append(promotion)
        self.by_key.update(dict.fromkeys(keys, promotion))
        for i in indices:
            promotion.join(ticket, i)
        store.mailbox.version += 1
        try:
            buffers = [self._slab.buffer(slot) for slot in slots]
            future = load_for(store.tier, keys, buffers, ticket.context)
            when_done = future.add_done_callback
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            store.count_fault(error)
            store.traffic.promotion_failures += 1
            self._finish_promotion(promotion, [None] * len(keys), name_of(error))
            return
        store.mailbox.wake_at(promotion.deadline)
        deliver = store.mailbox.deliver
        when_done(lambda done: deliver(lambda: self._arrived(promotion, done)))

    def _arrived(self, promotion: Promotion, future: Future[list[Proof | None]]) -> None:
        store = promotion.store
        fault = MISSED
        if promotion.late:
            store.breaker.answered_late()
        try:
            proofs = future.result(timeout=0)
            check_answers(proofs, promotion.keys)
            proofs = self._tagged(promotion, proofs)
        except Exception as error:  # noqa: BLE001 - any fault of a store is a counted miss
            store.count_fault(error)
            proofs = [None] * len(promotion.keys)
            store.traffic.promotion_failures += not promotion.late  # late: counted already
            fault = name_of(error)
        else:
            if not promotion.late:
                store.breaker.succeeded()
            store.traffic.promotion_seconds.observe_value(time.monotonic() - promotion.began)
        self._finish_promotion(promotion, proofs, fault)

    def _tagged(self, promotion: Promotion, proofs: list[Proof | None]) -> list[Proof | None]:
        """Return `proofs`, with None for a block with a wrong tag, which the store then drops."""
        tagger = self._tagger
        if tagger is None:
            return proofs
        wrong = {
            key
            for key, proof in zip(promotion.keys, proofs, strict=True)
            if proof is not None and proof.tag != tagger.tag(key, proof.digest)
        }
        if not wrong:
            return proofs
        promotion.store.count_fault(WRONG_TAG, len(wrong))
        promotion.store.drop(sorted(wrong))
        return [None if k in wrong else p for k, p in zip(promotion.keys, proofs, strict=True)]

    def _finish_promotion(self, promotion: Promotion, proofs: Proofs, fault: str = MISSED) -> None:
        """Publish read blocks, and pin them for loads. `fault`: why other blocks were not read."""
        ok = [promotion.wanted and proof is not None for proof in proofs]
        store = promotion.store
        self._write_backs.promoted(store, self._slab.commit(promotion.keys, ok, proofs))
        self.under_way.remove(promotion)
        store.traffic.active_promotions -= 1
        for key in promotion.keys:
            del self.by_key[key]
        store.mailbox.version += 1
        waiting = [(ticket, i) for ticket, i in promotion.waiting if not ticket.ended]
        # Without a touch: the commit has just made the blocks the newest, and the pins are no hits.
        slots = self._slab.pin([ticket.keys[i] for ticket, i in waiting], touch=False)
        for (ticket, i), slot in zip(waiting, slots, strict=True):
            ticket.slots[i] = slot
            ticket.waiting -= 1
            if slot is None:
                ticket.fault = fault
