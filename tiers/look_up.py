# SPDX-License-Identifier: Apache-2.0
"""Where blocks are: the slab is asked first, then the stores in their order.

Changes nothing anywhere and waits for nothing. Knows nothing of what is done with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from .base import Answer, SlabTier, StoreTier
from .faults import Faults
from .read_up import ReadUp
from .tickets import Prefix

FIND_BLOCKS = 256  # looked up at a time; a look-up stops at the first miss


class LookUp:
    """Questions to slab and stores."""

    def __init__(
        self, slab: SlabTier, stores: Sequence[StoreTier], reads: ReadUp, faults: Faults
    ) -> None:
        self._slab = slab
        self._stores = stores
        self._reads = reads
        self._faults = faults

    def find(self, keys: Sequence[bytes], doomed: set[bytes]) -> Prefix:
        """The longest run of leading keys that are in some tier, none of them `doomed`."""
        tiers: list[str] = []
        for start in range(0, len(keys), FIND_BLOCKS):
            batch = keys[start : start + FIND_BLOCKS]
            answers = self._slab.lookup(batch)
            if answers.count(Answer.HIT) == len(batch) and not doomed:
                tiers += [self._slab.name] * len(batch)
                continue
            misses = [k for k, a in zip(batch, answers, strict=True) if a is Answer.MISS]
            places = dict(zip(misses, self.stores_of(misses), strict=True))
            for key, answer in zip(batch, answers, strict=True):
                if key in doomed:
                    return Prefix(tiers, False)
                if answer is Answer.PENDING:
                    read = self._reads.of(key)
                    if read is None:  # its bytes are being copied to the slab
                        return Prefix(tiers, True)
                    place: SlabTier | StoreTier | None = read.store if read.is_good else None
                else:
                    place = self._slab if answer is Answer.HIT else places[key]
                if place is None:
                    return Prefix(tiers, False)
                tiers.append(place.name)
        return Prefix(tiers, False)

    def stores_of(self, keys: Sequence[bytes]) -> list[StoreTier | None]:
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
