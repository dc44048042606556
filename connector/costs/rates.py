# SPDX-License-Identifier: Apache-2.0
"""Moving estimates of the time to compute a prompt and to move its blocks. New samples outweigh old
samples, so an estimate follows the latest steps or loads."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...tiers.base import NO_CONTEXT, RequestContext
from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.hierarchy.promotions import LoadTicket

MEMORY_STEPS = 32
_KEPT = 1.0 - 1.0 / MEMORY_STEPS  # share of the earlier sums that stays when a step is added
# The variance of positions, as a share of their squared mean, at which the slope counts half. Steps
# with nearly equal contexts measure the cost of context badly.
_SPREAD = 0.01
_LEAST_FREE_SHARE = 0.1  # least share of a token's price that does not depend on its context

# The share by which an estimate of a link moves towards a sample, in logarithms. At 0.3, an outlier
# 100 times too large makes the estimate four times as large, and five usual ones undo it.
_LEARNED = 0.3
_LEAST_SECONDS = 1e-6


@dataclass(slots=True)
class _Watched:
    ticket: LoadTicket
    began: float
    indices: dict[str, list[int]]  # indices of the blocks being read, by store
    num_read: dict[str, int]  # how many blocks in `indices` no earlier load reads
    num_bytes: dict[str, int]  # of `num_read` and of earlier blocks being read, by store
    joined: _Watched | None  # an earlier load that reads a block of the same load
    let_go: bool = False  # the caller needs the load no more


class ReadTimes:
    """Begins and ends loads of `hierarchy`. The class times loads that wait for a store, to update
    the store's rate in `links`. A load that the caller has abandoned is still timed, because an
    abandoned load usually has a slow store."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        links: Mapping[str, LinkRate],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hierarchy = hierarchy
        self._links = {name: links[name] for name in hierarchy.tiers[1:]}
        self._block_bytes = hierarchy.block_bytes
        self._clock = clock
        self.watched: dict[int, _Watched] = {}  # loads under way, by id of the ticket
        self._reader_of: dict[bytes, _Watched] = {}  # the first load that waited for a key
        self._looked = clock()  # when `record_ended_loads` last ran
        self.queued: Counter[str] = Counter()  # blocks being read, by store

    def begin_load(self, keys: Sequence[bytes], context: RequestContext = NO_CONTEXT) -> LoadTicket:
        """Begin a load. The caller ends the load with `let_go`."""
        ticket = self._hierarchy.begin_load(keys, context)
        if ticket.waiting:
            self._watch_load(ticket)
        return ticket

    def _watch_load(self, ticket: LoadTicket) -> None:
        indices: dict[str, list[int]] = {}
        for index, (slot, tier) in enumerate(zip(ticket.slots, ticket.tiers, strict=True)):
            if slot is None and tier in self._links:
                indices.setdefault(tier, []).append(index)
        if not indices:
            return
        keys = [ticket.keys[index] for blocks in indices.values() for index in blocks]
        num_read = {
            tier: sum([ticket.keys[index] not in self._reader_of for index in blocks])
            for tier, blocks in indices.items()
        }
        watched = self.watched[id(ticket)] = _Watched(
            ticket,
            self._clock(),
            indices,
            num_read,
            {
                tier: (self.queued[tier] + count) * self._block_bytes
                for tier, count in num_read.items()
            },
            next((self._reader_of[key] for key in keys if key in self._reader_of), None),
        )
        for key in keys:
            self._reader_of.setdefault(key, watched)
        self.queued.update(num_read)

    def let_go(self, ticket: LoadTicket) -> None:
        """End a load, now or as soon as its reads have ended."""
        watched = self.watched.get(id(ticket))
        if watched is None or not ticket.waiting:
            self._hierarchy.end_load(ticket)
            return
        watched.let_go = True
        reader = watched.joined or watched
        self._learn(reader, self._clock() - reader.began, math.inf)

    def record_ended_loads(self) -> None:
        """Update the rates from loads whose reads have ended, and end loads that were let go."""
        now = self._clock()
        for watched in [w for w in self.watched.values() if not w.ticket.waiting]:
            self._remove_watched(watched)
            if watched.joined is None:
                # The load ended after `_looked`.
                self._learn(watched, self._looked - watched.began, now - watched.began)
            if watched.let_go:
                self.let_go(watched.ticket)
        self._looked = now

    def _learn(self, watched: _Watched, at_least: float, at_most: float) -> None:
        slots = watched.ticket.slots
        for tier, indices in watched.indices.items():
            came = all(slots[index] is not None for index in indices)
            self._links[tier].record_transfer(
                watched.num_bytes[tier],
                # With several stores, the late store is unknown.
                at_least if len(watched.indices) == 1 else 0.0,
                at_most if came else math.inf,
            )

    def _remove_watched(self, watched: _Watched) -> None:
        del self.watched[id(watched.ticket)]
        self.queued.subtract(watched.num_read)
        for indices in watched.indices.values():
            for index in indices:
                key = watched.ticket.keys[index]
                if self._reader_of.get(key) is watched:
                    del self._reader_of[key]


class PrefillRate:
    """The seconds to compute a prompt token, as a linear function of its position:

        seconds of a token  =  free part  +  slope x position

    The line is fitted to the last steps, each weighted by its tokens."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._positions = 0.0
        self._positions_squared = 0.0  # squared mean position of a step, times its tokens
        self._seconds_by_position = 0.0

    @property
    def seconds_per_token(self) -> float | None:
        """The recent average of seconds per prompt token; None before the first measurement."""
        return self._seconds / self._tokens if self._tokens else None

    def record_prefill(self, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        """Record a prefill. `num_context_tokens` is the sum of the positions of its tokens."""
        mean = num_context_tokens / num_tokens
        self._tokens = self._tokens * _KEPT + num_tokens
        self._seconds = self._seconds * _KEPT + seconds
        self._positions = self._positions * _KEPT + num_context_tokens
        self._positions_squared = self._positions_squared * _KEPT + num_context_tokens * mean
        self._seconds_by_position = self._seconds_by_position * _KEPT + seconds * mean

    def estimate_prefill(self, start: int, end: int) -> float | None:
        """The seconds to compute the tokens `start` to `end`. None before the first measurement."""
        price = self.price_at((start + end - 1) / 2)
        return None if price is None else (end - start) * price

    def price_at(self, position: float) -> float | None:
        """The seconds to compute a token at `position`. None before the first measurement."""
        price = self.seconds_per_token
        if price is None:
            return None
        mean = self._positions / self._tokens
        return price + self._slope(price, mean) * (position - mean)

    def _slope(self, price: float, mean: float) -> float:
        if mean <= 0:
            return 0.0
        spread = self._positions_squared / self._tokens - mean * mean
        slope = self._seconds_by_position / self._tokens - price * mean
        slope /= max(spread, 0.0) + _SPREAD * mean * mean
        return min(max(slope, 0.0), (1.0 - _LEAST_FREE_SHARE) * price / mean)


class LinkRate:
    """The seconds of a transfer: a fixed part and a part for each byte, both measured.

    Transfers are polled between steps, so a sample is a span of time in which a transfer ended. A
    sample whose span contains the estimate changes nothing. Otherwise the estimate moves towards
    the span by a share of the distance in logarithms: a link 100 times slower is noticed as soon as
    one 100 times faster. Small transfers mostly change the fixed part, large ones the part for each
    byte."""

    def __init__(self, fixed_seconds: float, bytes_per_second: float) -> None:
        self.fixed_seconds = fixed_seconds
        self.seconds_per_byte = 1.0 / bytes_per_second
        self.is_measured = False  # False while the rates are assumed

    def estimate_transfer(self, num_bytes: float) -> float:
        return self.fixed_seconds + num_bytes * self.seconds_per_byte

    def believe(self, num_bytes: float, seconds: float) -> None:
        """Set the rate from a trial that moved `num_bytes` in `seconds`. The fixed part stays,
        because the long trial includes no wait for an engine's step."""
        self.is_measured = True
        self.seconds_per_byte = max(_LEAST_SECONDS, seconds) / num_bytes

    def record_transfer(self, num_bytes: float, at_least: float, at_most: float = math.inf) -> None:
        """Record that moving `num_bytes` took between `at_least` and `at_most` seconds."""
        self.is_measured = True
        expected = self.estimate_transfer(num_bytes)
        seen = max(_LEAST_SECONDS, min(max(expected, at_least), at_most))
        if seen == expected:
            return
        fixed = self.fixed_seconds / expected
        step = _LEARNED * math.log(seen / expected) / (fixed * fixed + (1 - fixed) * (1 - fixed))
        self.fixed_seconds *= math.exp(step * fixed)
        self.seconds_per_byte *= math.exp(step * (1 - fixed))
