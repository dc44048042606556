# SPDX-License-Identifier: Apache-2.0
"""Loads: what the slab has of a run of blocks is pinned, and the gaps are read up from the stores.

A load is of leading blocks: where one of them is in no tier, or the slab has no room for it, those
behind it are of no use and are left alone. Knows nothing of writes or of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ..base import SlabTier, StoreTier
from .look_up import LookUp
from .promotions import LoadTicket, ReadUp
from .traffic import Traffic


class Loads:
    """`reserve` finds slots for keys and `unpin` gives pins back. Called by one thread."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        *,
        reads: ReadUp,
        look_up: LookUp,
        reserve: Callable[[list[bytes]], list[int | None]],
        unpin: Callable[[list[bytes]], None],
        used: Callable[[list[bytes]], None],
        traffic: Mapping[str, Traffic],
    ) -> None:
        self._slab = slab
        self._stores = stores
        self._reads = reads
        self._look_up = look_up
        self._reserve = reserve
        self._unpin = unpin
        self._used = used
        self._traffic = traffic

    def begin(self, keys: Sequence[bytes]) -> LoadTicket:
        """See `Hierarchy.begin_load`."""
        pinned = self._slab.pin(keys)
        ticket = LoadTicket(list(keys), pinned, [self._slab.name] * len(keys), begun=len(keys))
        self._used([key for key, slot in zip(keys, pinned, strict=True) if slot is not None])
        missing = [i for i, slot in enumerate(pinned) if slot is None]
        if missing:
            self._read_up(ticket, missing)
        return ticket

    def end(self, ticket: LoadTicket) -> None:
        """See `Hierarchy.end_load`."""
        if not ticket.ended:
            ticket.ended = True
            pairs = zip(ticket.keys, ticket.slots, strict=True)
            self._unpin([key for key, slot in pairs if slot is not None])

    def _read_up(self, ticket: LoadTicket, missing: list[int]) -> None:
        """Fill the gaps of a ticket: join reads under way, reserve slots and read the others."""
        keys = ticket.keys
        joined = {i: read for i in missing if (read := self._reads.of(keys[i])) is not None}
        fresh = [i for i in missing if i not in joined]
        places = dict(zip(fresh, self._look_up.stores_of([keys[i] for i in fresh]), strict=True))
        lost = (
            i
            for i in missing
            if (not joined[i].brings(keys[i]) if i in joined else places[i] is None)
        )
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
        ticket.begun = end
