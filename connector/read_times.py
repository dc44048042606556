# SPDX-License-Identifier: Apache-2.0
"""How long stores take to bring blocks: loads under way are watched, and the links' rates learn.

What nobody waits for any more is watched too, until it has ended: a load given up for being late
says most about its store.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..tiers.hierarchy.promotions import LoadTicket
from .rates import LinkRate


@dataclass(slots=True)
class _Watched:
    ticket: LoadTicket
    began: float
    indices: dict[str, list[int]]  # blocks to come, by store
    num_bytes: dict[str, int]  # of these and of those that were on their way before, by store
    joined: _Watched | None  # the one that began to read what this one waits for too
    let_go: bool = False  # to be ended here


class ReadTimes:
    """Loads that wait for a store, of those in `links`. `end_load` ends those let go."""

    def __init__(
        self,
        links: Mapping[str, LinkRate],
        block_bytes: int,
        end_load: Callable[[LoadTicket], None],
        clock: Callable[[], float],
    ) -> None:
        self._links = links
        self._block_bytes = block_bytes
        self._end_load = end_load
        self._clock = clock
        self._watched: dict[int, _Watched] = {}  # by the id of the ticket
        self._reader_of: dict[bytes, _Watched] = {}  # the first one that waited for a key
        self._looked = clock()  # the last time
        self.queued: Counter[str] = Counter()  # blocks on their way, by store

    def __len__(self) -> int:
        """Loads under way."""
        return len(self._watched)

    def watch(self, ticket: LoadTicket) -> None:
        """A load has begun."""
        indices: dict[str, list[int]] = {}
        for index, (slot, tier) in enumerate(zip(ticket.slots, ticket.tiers, strict=True)):
            if slot is None and tier in self._links:
                indices.setdefault(tier, []).append(index)
        if ticket.done() or not indices:
            return
        keys = [ticket.keys[index] for blocks in indices.values() for index in blocks]
        watched = self._watched[id(ticket)] = _Watched(
            ticket,
            self._clock(),
            indices,
            {
                tier: (self.queued[tier] + len(blocks)) * self._block_bytes
                for tier, blocks in indices.items()
            },
            next((self._reader_of[key] for key in keys if key in self._reader_of), None),
        )
        for key in keys:
            self._reader_of.setdefault(key, watched)
        self.queued.update({tier: len(blocks) for tier, blocks in indices.items()})

    def let_go(self, ticket: LoadTicket) -> None:
        """Nobody waits for this load any more: end it, now or when its reads have ended."""
        watched = self._watched.get(id(ticket))
        if watched is None or ticket.done():
            self._end_load(ticket)
            return
        watched.let_go = True
        reader = watched.joined or watched
        self._learn(reader, self._clock() - reader.began, math.inf)

    def collect(self) -> None:
        """Look which have ended."""
        if not self._watched:
            return
        now = self._clock()
        for watched in [w for w in self._watched.values() if w.ticket.done()]:
            self._forget(watched)
            if watched.joined is None:
                # It was still under way when last looked at.
                self._learn(watched, self._looked - watched.began, now - watched.began)
            if watched.let_go:
                self._end_load(watched.ticket)
        self._looked = now

    def _learn(self, watched: _Watched, at_least: float, at_most: float) -> None:
        slots = watched.ticket.slots
        for tier, indices in watched.indices.items():
            came = all(slots[index] is not None for index in indices)
            self._links[tier].note(
                watched.num_bytes[tier],
                # Of several stores any may be the one that is still to come.
                at_least if len(watched.indices) == 1 else 0.0,
                at_most if came else math.inf,
            )

    def _forget(self, watched: _Watched) -> None:
        del self._watched[id(watched.ticket)]
        for tier, indices in watched.indices.items():
            self.queued[tier] -= len(indices)
            for index in indices:
                key = watched.ticket.keys[index]
                if self._reader_of.get(key) is watched:
                    del self._reader_of[key]
