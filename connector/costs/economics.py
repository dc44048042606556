# SPDX-License-Identifier: Apache-2.0
"""Chooses whether to load blocks of a prompt from the tiers, to compute them, or to overlap both.

    load       wait for the blocks, then compute the tokens after them
    recompute  compute all tokens
    overlap    compute from the front while blocks are loaded from the back, until they meet; only
               if no other request computes, because a busy engine computes others during a load.
               Several requests with overlapped loads share the engine

A load may end at the last block, or at a block whose successor lies in another tier. The end that
saves most seconds is chosen; if no end saves time, all blocks are computed. A load's time does not
include the time in which the engine first computes other requests. Near break-even, the last choice
for about as many blocks from the same tier is repeated. Every `PROBE_EVERY`-th plan that would not
load all blocks loads more of them, to measure whether a tier has become quick again. All seconds
are estimates. This module handles no requests, keys or tickets."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, groupby
from typing import NamedTuple

from ...tiers.hierarchy.hierarchy import Hierarchy
from ..parts import Parts
from .rates import LinkRate, PrefillRate

log = logging.getLogger(__name__)


# The rates assumed before a measurement: fixed seconds of a transfer, and bytes per second.
SLAB_PRIOR = (1e-3, 4e9)  # the fixed part includes waits for one or two steps
STORE_PRIOR = (2e-3, 1e9)
# Ratios of loading time to computing time above which loads stop, and below which they resume.
STAY, RETURN = 1.15, 0.85
PROBE_EVERY = 16  # requests
PROBE_BLOCKS = 16
# The least time until a load is given up, because threads of a busy machine may be this late.
GRACE_SECONDS = 0.01
# The longest wait for a load while the cost of computing is unknown.
UNMEASURED_SECONDS = 0.5
# How many parts an overlap loads and computes, and how many pieces are read at once.
OVERLAP_PARTS = 4
PIECES_AT_ONCE = 2
# The factor by which an overlap must be faster than both loading and computing. A prompt computed
# in parts takes up to a fifth longer than in one part (embedded model, 1,000 tokens).
OVERLAP_MARGIN = 1.25
# With more runs (neighbouring blocks in one tier), a load takes the whole prefix or no block.
MAX_RUNS = 8
_BREAK_EVEN_LIMIT = 2**20  # tokens


NONE_READ: Mapping[str, int] = {}


class Choice(Enum):
    """A choice by the estimates, or a fixed choice for tests and measurements."""

    AUTO = "auto"
    LOAD = "always"
    OVERLAP = "both"


class Plan(NamedTuple):
    """The number of leading blocks to load. In an overlapped load the request computes about
    `compute_blocks` of these blocks until the computed and the loaded part meet. 0 means a blocking
    load."""

    num_blocks: int
    compute_blocks: int = 0


class Run(NamedTuple):
    """Neighbouring blocks in one tier."""

    tier: str
    num_blocks: int


NOTHING = Plan(0)


class Economics:
    """The estimates and choices for one hierarchy; `parts` describes the blocks of a position. The
    engine records the cost of its steps in `prefill`."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        parts: Parts,
        choice: Choice = Choice.AUTO,
        *,
        prefill: PrefillRate | None = None,
    ) -> None:
        self.choice = choice
        self.prefill = PrefillRate() if prefill is None else prefill
        self._slab = hierarchy.tiers[0]
        self.links = {name: LinkRate(*STORE_PRIOR) for name in hierarchy.tiers}
        self.links[self._slab] = LinkRate(*SLAB_PRIOR)
        self.queued: Mapping[str, int] = {}  # blocks already being read, by tier
        self._block_size = parts.block_size
        self._block_bytes = hierarchy.block_bytes
        self._num_needed = parts.num_needed
        self._loaded_last: dict[tuple[str, int], bool] = {}  # by last tier and log2 of the blocks
        self._declined = 0  # plans since the last probe
        self.probes = 0
        self.declined_tokens: Counter[str] = Counter()  # computed, though in a tier

    def plan_loads(
        self,
        first_token: int,
        tiers: Sequence[str],
        *,
        num_sharing: int = 0,
        num_queued_tokens: int = 0,
        num_read_ahead: Mapping[str, int] = NONE_READ,
        decides: bool = False,
    ) -> Plan:
        """Return the plan for blocks that lie in `tiers`, the first block at `first_token`.
        `num_sharing` requests, including this request, would share the engine if the load was
        overlapped; 0 forbids overlap. The engine first computes `num_queued_tokens` of other
        requests. `num_read_ahead` is the part of `self.queued` that belongs to this request. With
        `decides` the request follows the plan and the choice is kept; otherwise the call changes
        nothing."""
        hidden = self._queue_seconds(num_queued_tokens)
        plan = self._best_plan(first_token, tiers, num_sharing, hidden, num_read_ahead)
        if not decides or self.choice is not Choice.AUTO or self.prefill.seconds_per_token is None:
            return plan
        for end, tier in _ends(_runs(tiers)):
            self._loaded_last[tier, end.bit_length()] = end <= plan.num_blocks
        if plan.num_blocks == len(tiers):
            return plan
        self._declined += 1
        if self._declined >= PROBE_EVERY:
            self._declined = 0
            self.probes += 1
            plan = Plan(min(len(tiers), plan.num_blocks + PROBE_BLOCKS))
        for tier in tiers[plan.num_blocks :]:
            self.declined_tokens[tier] += self._block_size
        return plan

    def max_wait_seconds(
        self, first_token: int, num_blocks: int, *, num_queued_tokens: int = 0
    ) -> float | None:
        """Return the seconds to compute the blocks and the queued tokens; None without a limit."""
        if self.choice is not Choice.AUTO:
            return None
        compute = self._compute(first_token, num_blocks)
        if compute is None:
            return UNMEASURED_SECONDS
        return max(GRACE_SECONDS, compute + self._queue_seconds(num_queued_tokens))

    def break_even_tokens(self, tier: str) -> int | None:
        """Return the length of the shortest prompt that is quicker to load from `tier` than to
        compute; None before a measurement, and if there is no such prompt."""
        num_blocks = 1
        while num_blocks * self._block_size <= _BREAK_EVEN_LIMIT:
            if self._pays(tier, num_blocks):
                break
            num_blocks *= 2
        else:
            return None
        low, high = num_blocks // 2, num_blocks  # too short to load, long enough
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._pays(tier, middle) else (middle, high)
        return high * self._block_size

    def stats(self) -> dict[str, object]:
        """Return the estimates as plain values."""
        price = self.prefill.seconds_per_token
        return {
            "prefill_tokens_per_second": 1.0 / price if price else None,
            "bytes_per_second": {n: 1.0 / r.seconds_per_byte for n, r in self.links.items()},
            "fixed_seconds": {n: r.fixed_seconds for n, r in self.links.items()},
            "break_even_tokens": {name: self.break_even_tokens(name) for name in self.links},
        }

    def _best_plan(
        self,
        first_token: int,
        tiers: Sequence[str],
        num_sharing: int,
        hidden: float,
        num_read_ahead: Mapping[str, int],
    ) -> Plan:
        num_blocks = len(tiers)
        if self.choice is Choice.OVERLAP and num_blocks > 1:
            return Plan(num_blocks, num_blocks // 2)
        if not num_blocks or self.choice is not Choice.AUTO:
            return Plan(num_blocks)
        runs = _runs(tiers)
        queued = {tier: n - num_read_ahead.get(tier, 0) for tier, n in self.queued.items()}
        compute = self._compute(first_token, num_blocks)
        if compute is None:
            return Plan(num_blocks)
        chosen, saved = 0, 0.0
        for end, tier in _ends(runs):
            saving = self._saving(first_token, runs, queued, end, tier, hidden)
            if saving is not None and (not chosen or saving > saved):
                chosen, saved = end, saving
        if num_sharing and num_blocks > 1:
            computed, seconds = self._meet(first_token, runs, queued, num_blocks, num_sharing)
            if seconds * OVERLAP_MARGIN <= compute - saved and 0 < computed < num_blocks:
                return Plan(num_blocks, computed)
        return Plan(chosen)

    def _saving(
        self,
        first_token: int,
        runs: Sequence[Run],
        queued: Mapping[str, int],
        end: int,
        tier: str,
        hidden: float,
    ) -> float | None:
        """Return the seconds that loading the blocks up to `end` saves against computing these
        blocks, the last of which lies in `tier`. The first `hidden` seconds of the load do not
        count. None if computing is quicker; near break-even the saving may be slightly negative."""
        compute = self._compute(first_token, end) or 0.0
        load = max(0.0, self._estimate_load(runs, queued, 0, end) - hidden)
        stays = self._loaded_last.get((tier, end.bit_length()), True)
        return compute - load if load < (STAY if stays else RETURN) * compute else None

    def _queue_seconds(self, num_tokens: int) -> float:
        return (self.prefill.seconds_per_token or 0.0) * num_tokens

    def _meet(
        self,
        first_token: int,
        runs: Sequence[Run],
        queued: Mapping[str, int],
        num_blocks: int,
        num_sharing: int,
    ) -> tuple[int, float]:
        """Return the number of blocks computed when the frontiers meet, and the seconds before."""
        low, high = 0, num_blocks
        # Each piece costs the fixed seconds of its links again.
        more = self._estimate_load(runs, queued, 0, 1) * (OVERLAP_PARTS / PIECES_AT_ONCE - 1)
        while low < high:
            middle = (low + high) // 2
            load = more + self._estimate_load(runs, queued, middle, num_blocks)
            if num_sharing * (self._compute(first_token, middle) or 0.0) < load:
                low = middle + 1
            else:
                high = middle
        return low, num_sharing * (self._compute(first_token, low) or 0.0)

    def _compute(self, first_token: int, num_blocks: int) -> float | None:
        return self.prefill.estimate_prefill(
            first_token, first_token + num_blocks * self._block_size
        )

    def _estimate_load(
        self, runs: Sequence[Run], queued: Mapping[str, int], start: int, end: int
    ) -> float:
        """Return the seconds to load blocks `start` to `end`: parallel store reads, then a copy."""
        blocks: dict[str, int] = {}
        for tier, count in _between(runs, start, end):
            blocks[tier] = blocks.get(tier, 0) + count
        blocks.pop(self._slab, None)
        reads = [
            self._estimate_read(tier, count, queued.get(tier, 0)) for tier, count in blocks.items()
        ]
        copy = self._estimate_read(self._slab, end - start, queued.get(self._slab, 0))
        return max(reads, default=0.0) + copy

    def _estimate_read(self, tier: str, num_blocks: int, num_queued: int) -> float:
        num_needed = self._num_needed(num_blocks) + num_queued
        return self.links[tier].estimate_transfer(num_needed * self._block_bytes)

    def _pays(self, tier: str, num_blocks: int) -> bool:
        compute = self._compute(0, num_blocks)
        num_bytes = self._num_needed(num_blocks) * self._block_bytes
        load = self.links[self._slab].estimate_transfer(num_bytes)
        if tier != self._slab:
            load += self.links[tier].estimate_transfer(num_bytes)
        return compute is not None and load < compute


def _runs(tiers: Sequence[str]) -> list[Run]:
    if tiers.count(tiers[0]) == len(tiers):
        return [Run(tiers[0], len(tiers))]
    return [Run(tier, sum(1 for _ in blocks)) for tier, blocks in groupby(tiers)]


def _between(runs: Sequence[Run], start: int, end: int) -> Iterator[Run]:
    first = 0
    for tier, count in runs:
        inside = min(end, first + count) - max(start, first)
        if inside > 0:
            yield Run(tier, inside)
        first += count


def _ends(runs: Sequence[Run]) -> list[tuple[int, str]]:
    """Return the numbers of blocks after which a load may end, each with its last block's tier."""
    if len(runs) > MAX_RUNS:
        return [(sum(run.num_blocks for run in runs), runs[-1].tier)]
    return list(
        zip(accumulate(run.num_blocks for run in runs), [r.tier for r in runs], strict=True)
    )
