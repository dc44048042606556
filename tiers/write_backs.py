# SPDX-License-Identifier: Apache-2.0
"""The write-backs of a hierarchy, one for each store below the slab.

A store of one engine alone is written when the slab runs short of slots, and past the admission
filter; a shared one at once and without it, because others wait for what it gets. Knows nothing of
loads. Called by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from .admission import AdmissionFilter, AdmitAll
from .base import SlabTier, StoreTier
from .faults import Faults
from .traffic import Traffic
from .write_back import Deliver, WriteBack

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
        deliver: Deliver,
        unpin: Callable[[list[bytes]], None],
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
                deliver=deliver,
                unpin=unpin,
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

    @property
    def pending(self) -> bool:
        """Whether anything is still to be written or being written."""
        return any(write_back.pending for write_back in self._all)

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
        coldest = self._slab.coldest(excess)
        return [(write_back, write_back.threatened(coldest)) for write_back in self._all]

    def evicted(self, threats: Threats) -> None:
        """The slab has made room: count what is lost."""
        for write_back, keys in threats:
            if keys:
                write_back.evicted(keys)

    def pump(self, *, reading: bool) -> None:
        """Start batches where they are due."""
        for write_back in self._all:
            write_back.pump(reading=reading)

    def flush_some(self) -> bool:
        """Start batches of the most recently used blocks; False where a store is busy."""
        accepted = True
        for write_back in self._all:
            accepted &= write_back.flush_some()
        return accepted

    def recheck(self, forgotten: Container[bytes]) -> None:
        """Before a flush: mark every block of the slab that a store lacks."""
        for write_back in self._all:
            write_back.recheck(forgotten)

    def clear(self) -> None:
        """Forget all."""
        for write_back in self._all:
            write_back.clear()
