# SPDX-License-Identifier: Apache-2.0
"""Finds the tier of each block of a prefix. The slab is searched first, then the stores in order. A
look-up has no side effects and never blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..base import Answer, SlabTier
from .guarded_store import GuardedStore, find_stores
from .promotions import Promotions

# Sizes of the first and the largest batch of keys. A look-up stops at the first miss, which for
# most prompts is the first block, so the first batch is small and each next batch is larger.
FIRST_BLOCKS, FIND_BLOCKS = 4, 256


class Prefix(NamedTuple):
    """The leading blocks that were found, and their `tiers`. `pending`: the next block is being
    copied into the slab. `asked`: a server has not answered yet whether it has the next block."""

    tiers: list[str]
    pending: bool
    asked: bool = False
    num_found: int = 0  # blocks found, before `tiers` was shortened


class PrefixLookup:
    """A look-up of blocks in the slab, in the stores and in the promotions under way."""

    def __init__(
        self, slab: SlabTier, stores: Sequence[GuardedStore], promotions: Promotions
    ) -> None:
        self._slab = slab
        self._stores = stores
        self._promotions = promotions

    def match_prefix(self, keys: Sequence[bytes]) -> Prefix:
        """Return the longest prefix of `keys` whose blocks are all in some tier."""
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
            awaited: set[bytes] = set()
            places = dict(zip(misses, find_stores(self._stores, misses, awaited), strict=True))
            for key, answer in zip(batch, answers, strict=True):
                if answer is Answer.PENDING:
                    promotion = self._promotions.by_key.get(key)
                    if promotion is None:  # the block is being copied into the slab
                        return Prefix(tiers, True)
                    place: SlabTier | GuardedStore | None = (
                        promotion.store if promotion.brings(key) else None
                    )
                else:
                    place = self._slab if answer is Answer.HIT else places[key]
                if place is None:
                    return Prefix(tiers, False, key in awaited)
                tiers.append(place.name)
        return Prefix(tiers, False)

    def answers(self, keys: Sequence[bytes]) -> list[Answer]:
        """Return HIT, MISS or PENDING for each key by itself. A block being promoted is a HIT,
        because a load can wait for the block. A block that is being copied into the slab, for which
        no load can wait, is PENDING."""
        answers = self._slab.lookup(keys)
        hit, miss, pending = Answer.HIT, Answer.MISS, Answer.PENDING
        if answers.count(hit) == len(answers):
            return answers
        for i in [i for i, answer in enumerate(answers) if answer is pending]:
            promotion = self._promotions.by_key.get(keys[i])
            if promotion is not None and promotion.brings(keys[i]):
                answers[i] = hit
        missing = [i for i, answer in enumerate(answers) if answer is miss] if self._stores else []
        if missing:
            places = find_stores(self._stores, [keys[i] for i in missing])
            for i, place in zip(missing, places, strict=True):
                if place is not None:
                    answers[i] = Answer.HIT
        return answers
