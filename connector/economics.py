# SPDX-License-Identifier: Apache-2.0
"""Load, recompute, or overlap the two: what the tiers hold of a prompt is taken from them only as
far as that is quicker than computing it.

    load       wait for the blocks, then compute what follows them
    recompute  compute everything
    overlap    compute from the front while blocks are loaded from the back, until they meet; only
               where nobody else computes, since in a busy engine others do so while it waits.
               Several requests with overlapped loads share what computing there is

The leading run of blocks up to a change of tier is loaded for which most seconds are saved, if any
are. What others compute before a request's turn hides as much of its load. Near break-even the last
choice for as many blocks from the same tier stands. What was found too slow to load is tried again,
a few blocks of it, by every `PROBE_EVERY`-th request that could have used it, so that a tier that
is quick again is noticed. All seconds are estimates; nothing is known here of requests, keys or
tickets.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from itertools import accumulate, groupby
from typing import NamedTuple

from ..tiers.hierarchy.hierarchy import Hierarchy
from .base import ConnectorMetadata, ConnectorWorkerOutput, CopyJob, TierEstimates
from .rates import LinkRate, PrefillRate
from .transfer import CopySignal, JobIds

log = logging.getLogger(__name__)

COPIES = 3  # the quickest counts: what else the machine does only adds
COPY_BYTES = 32 * 1024**2  # of each: more than caches hold
# Smaller reads say nothing about a disk's speed.
LEAST_READ_BYTES = 2 * 1024**2
_TYPICAL_PROMPT = 1024  # tokens


class Calibration(TierEstimates):
    """Times loads of one connector before its first request, so that it is decided on as well as
    later ones.

        stores   each reads a little of what it holds and throws it away
        slab     slots that hold nothing yet are copied to blocks of the pool that are nobody's
    """

    def __init__(
        self, economics: Economics, hierarchy: Hierarchy, signal: CopySignal, job_ids: JobIds
    ) -> None:
        self._economics = economics
        self._links = economics.links
        self._slab_link = self._links[hierarchy.tiers[0]]
        self._hierarchy = hierarchy
        self._signal = signal
        self._job_ids = job_ids
        self._num_copies = 0  # begun
        self._job: CopyJob | None = None  # under way
        self._quickest = math.inf  # seconds a byte

    def build_calibration_meta(self, block_ids: Sequence[int], seconds: float) -> ConnectorMetadata:
        if self._job is not None or self._num_copies == COPIES or not block_ids:
            return ConnectorMetadata()
        if not self._num_copies:
            self._read_stores(seconds)
        self._job = self._next_copy(block_ids)
        self._signal.jobs_given(1)
        return ConnectorMetadata(loads=[self._job])

    def describe(self) -> str:
        return in_words(self._economics, self.tiers_down())

    def tiers_down(self) -> list[str]:
        return [store.name for store in self._hierarchy.stores if not store.is_up]

    def take(self, output: ConnectorWorkerOutput) -> int:
        """Take the trial's job out of what has ended; how many that are."""
        job = self._job
        if job is None:
            return 0
        for ids in (output.finished_loads, output.failed_loads):
            if job.job_id in ids:
                ids.remove(job.job_id)
                break
        else:
            return 0
        self._job = None
        # Beside other loads nobody knows which of them took how long.
        if not (output.finished_loads or output.failed_loads):
            if ids is output.finished_loads:
                self._learn(len(job.slots) * self._hierarchy.block_bytes, output.load_copy_seconds)
            output.load_copy_seconds = 0.0
        return 1

    def _read_stores(self, seconds: float) -> None:
        """Have each store read for its part of the time, one after the other."""
        stores = self._hierarchy.stores
        for store in stores:
            try:
                sample = store.trial_read(seconds / len(stores))
                if sample is not None and sample.num_bytes >= LEAST_READ_BYTES:
                    self._links[store.name].believe(*sample)
            except Exception as error:  # noqa: BLE001 - a tier of others may raise anything
                log.warning("the %s tier could not be tried: %s", store.name, error)

    def _next_copy(self, block_ids: Sequence[int]) -> CopyJob:
        num_slots = self._hierarchy.num_slots
        most = max(1, COPY_BYTES // self._hierarchy.block_bytes)
        num_blocks = min(len(block_ids), num_slots, most)
        # Other memory each time, or caches would answer.
        start = self._num_copies * num_blocks
        places = range(start, start + num_blocks)
        self._num_copies += 1
        return CopyJob(
            self._job_ids.next(),
            [block_ids[place % len(block_ids)] for place in places],
            # Backwards: blocks of a request are seldom neighbours on both sides.
            [place % num_slots for place in reversed(places)],
        )

    def _learn(self, num_bytes: int, seconds: float) -> None:
        if 0.0 < seconds / num_bytes < self._quickest:
            self._quickest = seconds / num_bytes
            self._slab_link.believe(num_bytes, seconds)


def in_words(economics: Economics, down: Collection[str] = ()) -> str:
    """The estimates and what follows from them, for a person: one line. Of tiers that are `down`
    nobody knows anything."""
    compute = economics.prefill.seconds(0, _TYPICAL_PROMPT)
    parts = ["prefill not measured"]
    if compute:
        parts = [f"prefill {_TYPICAL_PROMPT / compute:,.0f} tokens/s"]
    for name, link in economics.links.items():
        if name in down:
            parts.append(f"{name} is down")
            continue
        rate = f"{1e-9 / link.seconds_per_byte:.2g} GB/s"
        parts.append(f"{name} loads {rate}{'' if link.is_measured else ' (not measured)'}")
    if not compute:
        return ", ".join(parts)
    up = [name for name in economics.links if name not in down]
    from_on = {name: economics.break_even_tokens(name) for name in up}
    pays = [
        f"never from {name}" if tokens is None else f"from {tokens} tokens ({name})"
        for name, tokens in from_on.items()
    ]
    return f"{', '.join(parts)}: loading pays {', '.join(pays)}"


# Assumed until measured: seconds of a transfer, however small, and bytes a second.
SLAB_PRIOR = (1e-3, 4e9)  # a waiting request also pays for a step or two
STORE_PRIOR = (2e-3, 1e9)
# How much dearer loading may get before it is given up, and how much cheaper before it is resumed.
STAY, RETURN = 1.15, 0.85
PROBE_EVERY = 16  # requests
PROBE_BLOCKS = 16
# A load is never given up earlier: threads are late by as much on a busy machine.
GRACE_SECONDS = 0.01
# Nor later while nobody knows what computing takes.
UNMEASURED_SECONDS = 0.5
# In so many parts each of the two goes until they meet, and so many pieces are read at once.
OVERLAP_PARTS = 4
PIECES_AT_ONCE = 2
# Both at once has to beat the better of the two by this factor. A prompt computed in such parts
# takes up to a fifth longer than in one (measured with the embedded model, 1,000 tokens).
OVERLAP_MARGIN = 1.25
# Changes of tier within one prefix that are looked at one by one.
MAX_RUNS = 8
_BREAK_EVEN_LIMIT = 2**20  # tokens


NONE_READ: Mapping[str, int] = {}


class Choice(Enum):
    """Choose by the estimates, or always the same, for drills and measurements."""

    AUTO = "auto"
    LOAD = "always"
    OVERLAP = "both"


class Plan(NamedTuple):
    """Blocks to load, the leading ones; with `compute_blocks`, about how many of them will have
    been computed before the two meet."""

    num_blocks: int
    compute_blocks: int = 0


class Run(NamedTuple):
    """Neighbouring blocks in one tier."""

    tier: str
    num_blocks: int


NOTHING = Plan(0)


class Economics:
    """The estimates and choices for one hierarchy; `tiers` names the slab first. `num_needed` says
    how many blocks so many positions take. `prefill` is told by whoever runs steps."""

    def __init__(
        self,
        tiers: Sequence[str],
        block_size: int,
        block_bytes: int,
        choice: Choice = Choice.AUTO,
        *,
        num_needed: Callable[[int], int] = int,
        prefill: PrefillRate | None = None,
    ) -> None:
        self.choice = choice
        self.prefill = PrefillRate() if prefill is None else prefill
        self._slab = tiers[0]
        self.links = {name: LinkRate(*STORE_PRIOR) for name in tiers}
        self.links[self._slab] = LinkRate(*SLAB_PRIOR)
        self.queued: Mapping[str, int] = {}  # blocks already on their way, by tier
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._num_needed = num_needed
        self._loaded_last: dict[tuple[str, int], bool] = {}  # by last tier and log2 of the blocks
        self._declined = 0  # plans since the last probe
        self.probes = 0
        self.declined_tokens: dict[str, int] = {}  # that a tier had and that were computed

    def plan(
        self,
        first_token: int,
        tiers: Sequence[str],
        *,
        num_sharing: int = 0,
        num_queued_tokens: int = 0,
        num_read_ahead: Mapping[str, int] = NONE_READ,
    ) -> Plan:
        """The plan for blocks that lie in `tiers`, the first one at `first_token`. Changes
        nothing. `num_sharing` requests, this one included, would share the engine if its load was
        overlapped; 0: others compute. `num_queued_tokens` of others are computed before it. Of
        `queued`, `num_read_ahead` are these blocks."""
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
        hidden = self._queue_seconds(num_queued_tokens)
        for end, tier in _ends(runs):
            saving = self._saving(first_token, runs, queued, end, tier, hidden)
            if saving is not None and (not chosen or saving > saved):
                chosen, saved = end, saving
        if num_sharing and num_blocks > 1:
            computed, seconds = self._meet(first_token, runs, queued, num_blocks, num_sharing)
            if seconds * OVERLAP_MARGIN <= compute - saved and 0 < computed < num_blocks:
                return Plan(num_blocks, computed)
        return Plan(chosen)

    def decide(
        self,
        first_token: int,
        tiers: Sequence[str],
        *,
        num_sharing: int = 0,
        num_queued_tokens: int = 0,
        num_read_ahead: Mapping[str, int] = NONE_READ,
    ) -> Plan:
        """`plan`, for a request that will follow it; the choice is remembered."""
        plan = self.plan(
            first_token,
            tiers,
            num_sharing=num_sharing,
            num_queued_tokens=num_queued_tokens,
            num_read_ahead=num_read_ahead,
        )
        if self.choice is not Choice.AUTO or self.prefill.seconds_per_token is None:
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
            declined = self.declined_tokens.get(tier, 0)
            self.declined_tokens[tier] = declined + self._block_size
        return plan

    def max_wait_seconds(
        self, first_token: int, num_blocks: int, *, num_queued_tokens: int = 0
    ) -> float | None:
        """How long to wait for blocks at most, in seconds: as long as computing them takes, and
        what is queued before them. None: until they come."""
        if self.choice is not Choice.AUTO:
            return None
        compute = self._compute(first_token, num_blocks)
        if compute is None:
            return UNMEASURED_SECONDS
        return max(GRACE_SECONDS, compute + self._queue_seconds(num_queued_tokens))

    def break_even_tokens(self, tier: str) -> int | None:
        """The shortest prompt that is quicker to load from `tier` than to compute; None while
        nothing was measured, and where there is none."""
        num_blocks = 1
        while num_blocks * self._block_size <= _BREAK_EVEN_LIMIT:
            if self._pays(tier, num_blocks):
                break
            num_blocks *= 2
        else:
            return None
        low, high = num_blocks // 2, num_blocks  # pays not, pays
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._pays(tier, middle) else (middle, high)
        return high * self._block_size

    def stats(self) -> dict[str, object]:
        """The estimates, as plain values."""
        price = self.prefill.seconds_per_token
        return {
            "prefill_tokens_per_second": 1.0 / price if price else None,
            "bytes_per_second": {n: 1.0 / r.seconds_per_byte for n, r in self.links.items()},
            "fixed_seconds": {n: r.fixed_seconds for n, r in self.links.items()},
            "break_even_tokens": {name: self.break_even_tokens(name) for name in self.links},
        }

    def _saving(
        self,
        first_token: int,
        runs: Sequence[Run],
        queued: Mapping[str, int],
        end: int,
        tier: str,
        hidden: float,
    ) -> float | None:
        """Seconds that loading the blocks up to `end`, the last one from `tier`, saves of computing
        them, where `hidden` seconds of a load delay nobody. None if it is not to be done; near
        break-even it may save a little less than none."""
        compute = self._compute(first_token, end) or 0.0
        load = max(0.0, self._load(runs, queued, 0, end) - hidden)
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
        """After how many computed blocks the frontiers meet, and when."""
        low, high = 0, num_blocks
        # Pieces pay for the fixed part of their links more than once.
        more = self._load(runs, queued, 0, 1) * (OVERLAP_PARTS / PIECES_AT_ONCE - 1)
        while low < high:
            middle = (low + high) // 2
            load = more + self._load(runs, queued, middle, num_blocks)
            if num_sharing * (self._compute(first_token, middle) or 0.0) < load:
                low = middle + 1
            else:
                high = middle
        return low, num_sharing * (self._compute(first_token, low) or 0.0)

    def _compute(self, first_token: int, num_blocks: int) -> float | None:
        return self.prefill.seconds(first_token, first_token + num_blocks * self._block_size)

    def _load(self, runs: Sequence[Run], queued: Mapping[str, int], start: int, end: int) -> float:
        """Seconds to load the blocks from `start` to `end`: all stores at once, then the copy."""
        blocks: dict[str, int] = {}
        for tier, count in _between(runs, start, end):
            blocks[tier] = blocks.get(tier, 0) + count
        blocks.pop(self._slab, None)
        reads = [self._read(tier, count, queued.get(tier, 0)) for tier, count in blocks.items()]
        copy = self._read(self._slab, end - start, queued.get(self._slab, 0))
        return max(reads, default=0.0) + copy

    def _read(self, tier: str, num_blocks: int, num_queued: int) -> float:
        num_needed = self._num_needed(num_blocks) + num_queued
        return self.links[tier].seconds(num_needed * self._block_bytes)

    def _pays(self, tier: str, num_blocks: int) -> bool:
        compute = self._compute(0, num_blocks)
        num_bytes = self._num_needed(num_blocks) * self._block_bytes
        load = self.links[self._slab].seconds(num_bytes)
        if tier != self._slab:
            load += self.links[tier].seconds(num_bytes)
        return compute is not None and load < compute


def _runs(tiers: Sequence[str]) -> list[Run]:
    if tiers.count(tiers[0]) == len(tiers):
        return [Run(tiers[0], len(tiers))]
    return [Run(tier, sum(1 for _ in blocks)) for tier, blocks in groupby(tiers)]


def _between(runs: Sequence[Run], start: int, end: int) -> Iterator[Run]:
    """The part of each run that lies between two blocks."""
    first = 0
    for tier, count in runs:
        inside = min(end, first + count) - max(start, first)
        if inside > 0:
            yield Run(tier, inside)
        first += count


def _ends(runs: Sequence[Run]) -> list[tuple[int, str]]:
    """The blocks after which a load may end, each with the tier of its last block."""
    if len(runs) > MAX_RUNS:
        return [(sum(run.num_blocks for run in runs), runs[-1].tier)]
    return list(
        zip(accumulate(run.num_blocks for run in runs), [r.tier for r in runs], strict=True)
    )
