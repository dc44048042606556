# SPDX-License-Identifier: Apache-2.0
"""Leases: pins and reservations with a deadline, for clients that may vanish.

Each store and each session has its own `Leases` table, and ends the expired leases in it:

    owner                   holds                at its deadline
    a tenant, by gRPC       pinned blocks        they are unpinned
    a session that reads    a ReadLease          its slots are unpinned
    a session that writes   a WriteLease         its slots are withheld: the client may still write

A ReadLease or WriteLease that only a thread of the server uses is in no table: the thread always
ends the lease, whose slots must not be freed before. Times are monotonic, so that setting the clock
ends no lease."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..base import SlabTier
from ..errors import InvalidBlock, TierBusy
from ..hierarchy.hierarchy import StoreTicket
from ..hierarchy.promotions import LoadTicket
from ..wire.frames import State
from ..wire.status import TooMuch

MAX_SECONDS = 3600.0
MAX_LEASES = 65536
_STALE_DEADLINES = 64  # the heap is rebuilt above twice the leases plus this number
_Held = TypeVar("_Held")


@dataclass(slots=True, eq=False)
class ReadLease:
    """Blocks that are being read. `slots[i]` is the slot of `keys[i]`, or None for a miss. Slots
    are known after `ServedStore.wait_loaded`, and stay pinned until `ServedStore.end_load`."""

    keys: list[bytes]
    slots: list[int | None]
    stored: list[bytes]
    ticket: LoadTicket


@dataclass(slots=True, eq=False)
class WriteLease:
    """Blocks being stored. `slots[i]` is the slot to fill if `states[i]` is WANTED, else None."""

    keys: list[bytes]
    states: list[State]
    slots: list[int | None]
    stored: list[bytes]
    ticket: StoreTicket


class PinnedBlocks:
    """The blocks of a slab that leases have pinned, with the number of leases on each block."""

    def __init__(self, slab: SlabTier) -> None:
        self._slab = slab
        self._times: Counter[bytes] = Counter()

    def __contains__(self, key: bytes) -> bool:
        return key in self._times

    def __len__(self) -> int:
        return len(self._times)

    def pin(self, keys: Sequence[bytes]) -> list[bytes]:
        """Pin the leading keys up to the first one that the slab lacks, and return these keys."""
        slots = self._slab.pin(keys)
        leading = next((i for i, slot in enumerate(slots) if slot is None), len(keys))
        beyond = zip(keys[leading:], slots[leading:], strict=True)
        self._slab.unpin([key for key, slot in beyond if slot is not None])
        self._times.update(keys[:leading])
        return list(keys[:leading])

    def unpin(self, keys: Sequence[bytes]) -> None:
        """Undo one call of `pin`, which returned `keys`."""
        for key in keys:
            self._times[key] -= 1
            if not self._times[key]:
                del self._times[key]
        self._slab.unpin(keys)


@dataclass(slots=True, eq=False)
class Lease(Generic[_Held]):
    """A lease, by which `owner` has `held` until `deadline`."""

    number: int  # no two leases have the same number
    owner: str
    held: _Held
    deadline: float  # monotonic seconds


class Leases(Generic[_Held]):
    """A table of leases, with at most `most_each` of each owner. When a lease has expired, the
    callback `expired` releases what it held. The user of the table calls `expire` at intervals;
    most other methods call `expire` too. Not thread-safe."""

    def __init__(
        self,
        expired: Callable[[Lease[_Held]], object],
        most_each: int = MAX_LEASES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._expired = expired
        self._most_each = most_each
        self._clock = clock
        self._numbers = itertools.count(1)
        self._leases: dict[int, Lease[_Held]] = {}
        self._owned: Counter[str] = Counter()
        # A heap of deadlines and numbers. Entries of ended leases are stale.
        self._deadlines: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease[_Held]]:
        return iter(list(self._leases.values()))

    def check_room(self, owner: str = "") -> None:
        """Raise TierBusy if there are too many leases, TooMuch if `owner` has too many."""
        self.expire()
        if len(self._leases) >= MAX_LEASES:
            raise TierBusy(f"{MAX_LEASES} leases are out already; try again when some have ended")
        if self._owned[owner] >= self._most_each:
            raise TooMuch(f"{self._most_each} leases of {owner} run already; end some or wait")

    def grant_lease(self, held: _Held, seconds: float, owner: str = "") -> Lease[_Held]:
        """Make a lease of `held` for `owner`. Raises InvalidBlock, TierBusy, TooMuch."""
        deadline = self._deadline(seconds)
        self.check_room(owner)
        lease = Lease(next(self._numbers), owner, held, deadline)
        self._leases[lease.number] = lease
        self._owned[owner] += 1
        heapq.heappush(self._deadlines, (deadline, lease.number))
        return lease

    def find_lease(self, number: int, owner: str = "") -> Lease[_Held] | None:
        """Return the lease `number`, or None if the lease has ended or has another owner."""
        self.expire()
        lease = self._leases.get(number)
        return lease if lease is not None and lease.owner == owner else None

    def end_lease(self, lease: Lease[_Held]) -> None:
        """Remove a lease from the table. The caller must release what the lease held."""
        del self._leases[lease.number]
        self._owned[lease.owner] -= 1
        if len(self._deadlines) > 2 * len(self._leases) + _STALE_DEADLINES:
            self._deadlines = [(each.deadline, each.number) for each in self]
            heapq.heapify(self._deadlines)

    def expire(self) -> int:
        """End the leases whose deadline has passed. Return how many were ended."""
        now, ended = self._clock(), 0
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            lease = self._leases[self._deadlines[0][1]]
            self.end_lease(lease)
            self._expired(lease)
            ended += 1
        return ended

    def next_deadline(self) -> float | None:
        """Return the earliest deadline (monotonic seconds), or None without a lease."""
        while self._deadlines:
            deadline, number = self._deadlines[0]
            lease = self._leases.get(number)
            if lease is not None and lease.deadline == deadline:
                return deadline
            heapq.heappop(self._deadlines)
        return None

    def _deadline(self, seconds: float) -> float:
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidBlock(
                f"a lease runs for more than 0 and up to {MAX_SECONDS} s, not {seconds}"
            )
        return self._clock() + seconds
