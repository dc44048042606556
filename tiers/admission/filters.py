# SPDX-License-Identifier: Apache-2.0
"""Admission filters by name, and those that need no reuse model: while-used, doorkeeper, budget."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from ..errors import TierConfigError
from ..registry import find_entry, installed
from .base import AdmissionFilter, AdmitAll
from .contract import check_filter_contract
from .reuse import ReuseFilter

# The least share of written blocks to be read again. A read saves some fifty times a write's cost:
# 3.1 ms against 0.06 ms with the embedded model on two cores (not measured on a GPU).
MIN_USES = 0.02
SAMPLE = 8  # while sampling, one of SAMPLE stretches is written
STRETCHES = 64  # stretches per turnover of the tier; of MIN_STRETCH blocks or more
MIN_STRETCH = 16

CAPACITIES = 4
MIN_NAMES = 16_384
MAX_NAMES = 262_144

SECONDS_PER_DAY = 86_400.0
BURST_SECONDS = 3_600.0

ENTRY_POINTS = "stratakv.admission"

DEFAULT_FILTER = "while-used"
ALIASES = {"second-sight": "doorkeeper"}  # older name → name


class WhileUsed(AdmissionFilter):
    """Admits every block to a tier of `blocks_below` blocks, until too few of them are reused.

    If a disk was filled once and hardly any of its blocks were read again, writes cost more than
    they gain: they wear the disk and take processor time from the model. From then on, only a
    sample is written: one stretch in eight of the blocks that the slab evicts. The slab evicts one
    prompt after the other, so a stretch is mostly whole prompts, and the sample is typical of all
    blocks. When enough blocks of the sample are read again, every block is written again.

        written and read again, both fading over one turnover of the tier below

        share read again ≥ MIN_USES  ──► write all     (and before the first turnover is over)
                         < MIN_USES  ──► write a sample

    The filter keeps only counts, no keys."""

    def __init__(self, blocks_below: int) -> None:
        self._turnover = max(1, blocks_below)
        self._stretch = max(MIN_STRETCH, self._turnover // STRETCHES)
        self._unjudged = self._turnover  # blocks still to be written before the first decision
        self._written = 0.0
        self._used = 0.0
        self._offered = 0  # blocks since the sampling began; the first stretch is written

    @property
    def is_sampling(self) -> bool:
        """Whether only a sample is written now, because too few written blocks were read again."""
        return not self._unjudged and self._used < MIN_USES * self._written

    def promoted(self, count: int) -> None:
        self._used += count

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        if not self.is_sampling:
            self._offered = 0
            self._decay_counts(len(keys))
            return [True] * len(keys)
        first, self._offered = self._offered, self._offered + len(keys)
        verdicts = [place // self._stretch % SAMPLE == 0 for place in range(first, self._offered)]
        self._decay_counts(sum(verdicts))
        return verdicts

    def _decay_counts(self, written: int) -> None:
        kept = math.exp(-written / self._turnover)
        self._written = self._written * kept + written
        self._used *= kept
        self._unjudged = max(0, self._unjudged - written)


class Doorkeeper(AdmissionFilter):
    """Admits a block that two or more prompts have contained (TinyLFU's doorkeeper).

    The filter remembers the keys of four times `blocks_below` blocks, at least `MIN_NAMES` and at
    most `MAX_NAMES`, and forgets the least recently seen key first. A key takes about 200 bytes."""

    learns = True

    def __init__(self, blocks_below: int) -> None:
        self._limit = min(MAX_NAMES, max(MIN_NAMES, CAPACITIES * blocks_below))
        self._seen_again: OrderedDict[bytes, bool] = OrderedDict()

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        seen = self._seen_again
        for key in reversed(chain):
            seen[key] = key in seen
            seen.move_to_end(key)
        while len(seen) > self._limit:
            seen.popitem(last=False)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        return [self._seen_again.get(key, False) for key in keys]


class WriteBudget(AdmissionFilter):
    """A filter that admits at most `blocks_per_day` of the blocks that `inner` admits.

    A token bucket fills evenly over the day and holds one hour's share. So short bursts pass, and
    no day has more writes than the limit plus one bucket. Without a token, a block is refused."""

    def __init__(self, inner: AdmissionFilter, blocks_per_day: float) -> None:
        if not blocks_per_day >= 1:
            raise TierConfigError(
                f"a daily bound must let one block pass, not {blocks_per_day:g} of them; raise it"
            )
        self._inner = inner
        self.learns = inner.learns
        self._per_second = blocks_per_day / SECONDS_PER_DAY
        self._most = max(1.0, self._per_second * BURST_SECONDS)
        self._left = self._most
        self._filled_at: float | None = None

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self._inner.observe(chain, now)

    def promoted(self, count: int) -> None:
        self._inner.promoted(count)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        if self._filled_at is not None:
            gained = max(0.0, now - self._filled_at) * self._per_second
            self._left = min(self._most, self._left + gained)
        self._filled_at = now
        verdicts = self._inner.admit(keys, now)
        for index, admitted in enumerate(verdicts):
            if admitted and self._left < 1:
                verdicts[index] = False
            elif admitted:
                self._left -= 1
        return verdicts


# A function that makes a filter from the number of blocks that the tier below can hold.
FilterFactory = Callable[[int], AdmissionFilter]
FILTERS: Mapping[str, FilterFactory] = {
    "while-used": WhileUsed,
    "all": lambda _blocks: AdmitAll(),
    "doorkeeper": Doorkeeper,
    "reuse": ReuseFilter,
}


def known_filters() -> list[str]:
    """Return the names of built-in filters and of other packages' filters, with older names."""
    return list(dict.fromkeys([*FILTERS, *installed(ENTRY_POINTS), *ALIASES]))


def make_filter(name: str, blocks_below: int) -> AdmissionFilter:
    """Make a built-in or installed filter. Raises TierConfigError if the filter cannot be used."""
    name = ALIASES.get(name, name)
    if name in FILTERS:
        return FILTERS[name](blocks_below)
    point = find_entry(ENTRY_POINTS, "admission filter", name, tuple(FILTERS))
    try:
        make: FilterFactory = point.load()
        check_filter_contract(make)
        return make(blocks_below)
    except Exception as error:  # another package may raise any error
        raise TierConfigError(
            f"the admission filter {name} ({point.value}) cannot be used: "
            f"{type(error).__name__}: {error}"
        ) from error
