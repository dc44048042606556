# SPDX-License-Identifier: Apache-2.0
"""The write-backs of a hierarchy, one for each store below the slab.

A store of one engine alone is written when the slab runs short of slots, in full batches and past
the admission filter; a shared one at once and without it, because others wait for what it gets.
Knows nothing of loads. Called by one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from ..admission import AdmissionFilter, AdmitAll
from ..base import SlabTier, StoreTier
from .completions import Deliver
from .faults import Faults
from .traffic import Traffic
from .write_back import FILL_SECONDS, WriteBack

# While flushing: how often a store is looked at that does not end what it was given, and how soon
# one is asked again that is busy with nothing of ours.
LOOK_SECONDS, RETRY_SECONDS = 0.25, 0.01
EAGER = 2.0  # a watermark that no number of free slots is above

Threats = list[tuple[WriteBack, list[bytes]]]


class WriteBacks:
    """Tells each store's write-back what happens in the slab."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        *,
        watermark: float,
        write_seconds: float,
        deliver: Deliver,
        set_alarm: Callable[[float], None],
        unpin: Callable[[list[bytes]], None],
        forget: Callable[[list[bytes]], None],
        admission: AdmissionFilter,
        faults: Faults,
        traffic: Mapping[str, Traffic],
    ) -> None:
        self._slab = slab
        self._of = {
            store.name: WriteBack(
                slab,
                store,
                watermark=EAGER if store.is_shared else watermark,
                fill_seconds=0.0 if store.is_shared else FILL_SECONDS,
                write_seconds=write_seconds,
                deliver=deliver,
                set_alarm=set_alarm,
                unpin=unpin,
                forget=forget,
                admission=AdmitAll() if store.is_shared else admission,
                faults=faults,
                traffic=traffic[store.name],
            )
            for store in stores
        }
        self._all = list(self._of.values())

    @property
    def in_flight(self) -> int:
        """Batches being written."""
        return sum(write_back.in_flight for write_back in self._all)

    def added(self, keys: Sequence[bytes], store: StoreTier | None = None) -> None:
        """The slab has these blocks, head first; all stores, or the one named, may lack them."""
        for write_back in self._all if store is None else [self._of[store.name]]:
            write_back.added(keys)

    def used(self, keys: Sequence[bytes]) -> None:
        """These blocks, head first, were used."""
        for write_back in self._all:
            write_back.used(keys)

    def threatened(self, count: int) -> Threats:
        """What `count` new blocks will displace before it was written; for `evicted`."""
        excess = count - self._slab.free_slots()
        if excess <= 0 or not self._all:
            return []
        coldest = self._slab.coldest(2 * excess)
        now, later = coldest[:excess], coldest[excess:]
        return [(write_back, write_back.threatened(now, later)) for write_back in self._all]

    def evicted(self, threats: Threats) -> None:
        """The slab has made room: count what is lost."""
        for write_back, keys in threats:
            if keys:
                write_back.evicted(keys)

    def pump(self, *, reading: bool) -> bool:
        """Start batches where they are due; False where a store was busy."""
        taken = [write_back.pump(reading=reading) for write_back in self._all]
        return all(taken)

    def flush(self, timeout_seconds: float, wait: Callable[[float], None]) -> bool:
        """Write down every block of the slab that a store lacks; see `Hierarchy.flush`. `wait`
        waits for completions, at most so long, and takes them in."""
        deadline = time.monotonic() + timeout_seconds
        for write_back in self._all:
            write_back.recheck()
        while self._flush_some():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            wait(min(left, LOOK_SECONDS if self.in_flight else RETRY_SECONDS))
        return all(write_back.is_flushed for write_back in self._all)

    def _flush_some(self) -> bool:
        going_on = [write_back.flush_some() for write_back in self._all]
        return any(going_on)

    def drop(self, keys: Sequence[bytes]) -> None:
        """Write none of these blocks."""
        for write_back in self._all:
            write_back.drop(keys)

    def clear(self) -> None:
        """Forget all."""
        for write_back in self._all:
            write_back.clear()
