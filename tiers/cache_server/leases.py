# SPDX-License-Identifier: Apache-2.0
"""Leases: pins on slots of a slab that end by themselves.

A pin is for code that is sure to give it back. A lease is for whoever may vanish, such as another
process: after its time the slots are the slab's again. Time is monotonic, so a jump of the wall
clock ends nothing. Called by one thread at a time.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..base import SlabTier
from ..errors import InvalidBlock, TierBusy
from ..hierarchy.hierarchy import StoreTicket
from ..hierarchy.promotions import LoadTicket
from ..wire.frames import State
from ..wire.status import TooMuch


@dataclass(slots=True, eq=False)
class ReadLease:
    """Blocks on their way out. After `TenantStore.wait`, `slots[i]` is where `keys[i]` lies, None
    for a miss, until `TenantStore.end_load`."""

    keys: list[bytes]
    slots: list[int | None]
    stored: list[bytes]
    ticket: LoadTicket


@dataclass(slots=True, eq=False)
class WriteLease:
    """Blocks on their way in. `slots[i]` is to be filled where `states[i]` is WANTED, else None."""

    keys: list[bytes]
    states: list[State]
    slots: list[int | None]
    stored: list[bytes]
    ticket: StoreTicket


MAX_SECONDS = 3600.0
MAX_LEASES = 65536


@dataclass(slots=True)
class Lease:
    """`slots[i]` holds the block `keys[i]` and stays as it is until `deadline`."""

    number: int  # never used again
    keys: list[bytes]
    slots: list[int]
    deadline: float  # monotonic


class Leases:
    """The leases on one slab. `expire` is called from time to time, and by every other call."""

    def __init__(self, slab: SlabTier, clock: Callable[[], float] = time.monotonic) -> None:
        self._slab = slab
        self._clock = clock
        self._numbers = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._held: Counter[bytes] = Counter()  # by how many leases
        self._deadlines: list[tuple[float, int]] = []  # a heap; renewed ones are in it twice

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, keys: Sequence[bytes], seconds: float) -> Lease:
        """Lease the slots of the leading keys that the slab has; the others are misses.

        Raises InvalidBlock for a duration out of range, TierBusy where there are too many leases.
        """
        deadline = self._deadline(seconds)
        self.expire()
        if len(self._leases) >= MAX_LEASES:
            raise TierBusy(f"{MAX_LEASES} leases are out already; try again when some have ended")
        pinned = self._slab.pin(keys)
        slots = list(itertools.takewhile(lambda slot: slot is not None, pinned))
        beyond = zip(keys[len(slots) :], pinned[len(slots) :], strict=True)
        self._slab.unpin([key for key, slot in beyond if slot is not None])
        lease = Lease(next(self._numbers), list(keys[: len(slots)]), slots, deadline)  # type: ignore[arg-type]
        self._leases[lease.number] = lease
        self._held.update(lease.keys)
        heapq.heappush(self._deadlines, (deadline, lease.number))
        return lease

    def renew(self, number: int, seconds: float) -> bool:
        """Have a lease end `seconds` from now; False if it has ended."""
        deadline = self._deadline(seconds)
        self.expire()
        lease = self._leases.get(number)
        if lease is None:
            return False
        lease.deadline = deadline
        heapq.heappush(self._deadlines, (deadline, number))
        return True

    def release(self, number: int) -> bool:
        """End a lease; False if it has ended."""
        lease = self._leases.pop(number, None)
        if lease is None:
            return False
        for key in lease.keys:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
        self._slab.unpin(lease.keys)
        return True

    def has(self, key: bytes) -> bool:
        """Whether a lease holds this block."""
        return key in self._held

    def holds(self, number: int) -> bool:
        """Whether a lease still runs: what was read under it is good only if it does."""
        lease = self._leases.get(number)
        return lease is not None and lease.deadline > self._clock()

    def expire(self) -> int:
        """End the leases whose time is over; how many."""
        now, ended = self._clock(), 0
        while self._deadlines and self._deadlines[0][0] <= now:
            _, number = heapq.heappop(self._deadlines)
            lease = self._leases.get(number)
            if lease is not None and lease.deadline <= now:
                ended += self.release(number)
        return ended

    def next_deadline(self) -> float | None:
        """When to call `expire` at the latest, on the monotonic clock; None without a lease."""
        return self._deadlines[0][0] if self._deadlines else None

    def _deadline(self, seconds: float) -> float:
        if not 0 < seconds <= MAX_SECONDS:
            raise InvalidBlock(
                f"a lease runs for more than 0 and up to {MAX_SECONDS} s, not {seconds}"
            )
        return self._clock() + seconds


class LeaseOwners:
    """Which tenant was given which lease, at most `most` each: where tenants share a store, nobody
    may end another's lease. For one event loop."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._ends: dict[str, dict[int, float]] = {}

    def check_room_for(self, tenant: str) -> None:
        """Raises TooMuch where the tenant has all the leases it may have."""
        now = self._clock()
        running = {lease: end for lease, end in self._of(tenant).items() if end > now}
        self._ends[tenant] = running
        if len(running) >= self._most:
            raise TooMuch(f"{self._most} leases of {tenant} run already; end some or wait")

    def add(self, tenant: str, lease: int, end: float) -> None:
        """The tenant was given a lease until `end` (monotonic)."""
        self._ends.setdefault(tenant, {})[lease] = end

    def remove(self, tenant: str, lease: int) -> bool:
        """The tenant gives a lease back; False if it has none of that number."""
        return self._of(tenant).pop(lease, 0.0) > self._clock()

    def _of(self, tenant: str) -> dict[int, float]:
        return self._ends.get(tenant, {})
