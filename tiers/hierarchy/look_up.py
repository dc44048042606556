# SPDX-License-Identifier: Apache-2.0
"""Where blocks are: the slab is asked first, then the stores in their order.

Changes nothing anywhere and waits for nothing. Knows nothing of what is done with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..base import Answer, SlabTier, StoreTier
from .faults import Faults
from .pending_lookups import Asking
from .promotions import ReadUp
from .tickets import Prefix

# A look-up stops at the first miss, which for most prompts is the first block: so it begins with
# few blocks, and takes more and more at a time.
FIRST_BLOCKS, FIND_BLOCKS = 4, 256


class LookUp:
    """Questions to slab and stores."""

    def __init__(
        self,
        slab: SlabTier,
        stores: Sequence[StoreTier],
        reads: ReadUp,
        faults: Faults,
        asking: Asking,
    ) -> None:
        self._slab = slab
        self._stores = stores
        self._reads = reads
        self._faults = faults
        self._asking = asking

    def find(self, keys: Sequence[bytes]) -> Prefix:
        """The longest run of leading keys that are in some tier."""
        tiers: list[str] = []
        size = FIRST_BLOCKS
        while len(tiers) < len(keys):
            batch = keys[len(tiers) : len(tiers) + size]
            size = min(4 * size, FIND_BLOCKS)
            answers = self._slab.lookup(batch)
            if answers.count(Answer.HIT) == len(batch):
                tiers += [self._slab.name] * len(batch)
                continue
            misses = [k for k, a in zip(batch, answers, strict=True) if a is Answer.MISS]
            asked: set[bytes] = set()
            places = dict(zip(misses, self.stores_of(misses, asked), strict=True))
            for key, answer in zip(batch, answers, strict=True):
                if answer is Answer.PENDING:
                    read = self._reads.of(key)
                    if read is None:  # its bytes are being copied to the slab
                        return Prefix(tiers, True)
                    place: SlabTier | StoreTier | None = read.store if read.brings(key) else None
                else:
                    place = self._slab if answer is Answer.HIT else places[key]
                if place is None:
                    return Prefix(tiers, False, key in asked)
                tiers.append(place.name)
        return Prefix(tiers, False)

    def answers(self, keys: Sequence[bytes]) -> list[Answer]:
        """Of each key on its own, wherever it is. PENDING: on its way into the slab, in a way
        that a load cannot wait for; what is being read up is a HIT, since a load joins the read."""
        answers = self._slab.lookup(keys)
        for i, answer in enumerate(answers):
            if answer is not Answer.PENDING:
                continue
            read = self._reads.of(keys[i])
            if read is not None and read.brings(keys[i]):
                answers[i] = Answer.HIT
        missing = [i for i, answer in enumerate(answers) if answer is Answer.MISS]
        if missing:
            places = self.stores_of([keys[i] for i in missing])
            for i, place in zip(missing, places, strict=True):
                if place is not None:
                    answers[i] = Answer.HIT
        return answers

    def stores_of(
        self, keys: Sequence[bytes], asked: set[bytes] | None = None
    ) -> list[StoreTier | None]:
        """The first store that has each key. Of those that none has, `asked` gains what a store
        was asked for and will answer soon. Any other PENDING of a store counts as a miss: nothing
        would wake whoever waited for it."""
        places: list[StoreTier | None] = [None] * len(keys)
        for store in self._stores:
            unplaced = [i for i, place in enumerate(places) if place is None]
            answers = self._faults.lookup(store, [keys[i] for i in unplaced])
            waits = asked is not None and self._asking.is_open(store)
            for i, answer in zip(unplaced, answers, strict=True):
                if answer is Answer.HIT:
                    places[i] = store
                elif waits and asked is not None and answer is Answer.PENDING:
                    asked.add(keys[i])
        return places
