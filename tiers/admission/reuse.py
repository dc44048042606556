# SPDX-License-Identifier: Apache-2.0
"""ReuseFilter: admits a block that will probably be used again before the tier below evicts it.

The filter learns from observed prompts how soon blocks are used again, by the conversation's turn,
the prompt's length and the time between prompts. A write is worth its cost if a use is likely
enough before the tier below evicts the block. The tier below keeps a block until the whole tier has
been written once more, so the more blocks are written, the fewer are worth a write. Even if almost
every block will be used again, the tenth with the least chance is refused.

A refused block that a prompt uses again is admitted at its next eviction from the tier above,
whatever its chance, unless its conversation has continued without it. The blocks before an admitted
block in its chain are admitted too, because a block is useless if a block before it is missing.

The filter remembers four times as many blocks as the tier below holds, at least `MIN_BLOCKS` and at
most `MAX_BLOCKS`; a block takes about 400 bytes."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from ..policies.history import LEFT_BEHIND, History
from ..policies.reuse_model import ReuseModel
from ..policies.runs import Run
from .base import AdmissionFilter

# The least chance of use at which a block is written: the cost of a write over the gain of a use.
MIN_CHANCE = 0.28
# Uses after this time do not count, even if the tier below keeps a block for longer.
HORIZON_SECONDS = 3600.0
CAPACITIES = 4
MIN_BLOCKS = 16_384
MAX_BLOCKS = 262_144
# The share of offered blocks that is always refused, by an adaptive lower limit of the chance.
WORST = 0.1
STEP = 0.02
# In the rate of writes, a write of this age counts 1/e of a new write.
RATE_SECONDS = 600.0


class ReuseFilter(AdmissionFilter):
    """Admits blocks that will likely be used while a tier of `blocks_below` blocks has them."""

    learns = True

    def __init__(self, blocks_below: int, min_chance: float = MIN_CHANCE) -> None:
        self._blocks_below = blocks_below
        self._min_chance = min_chance
        self._model = ReuseModel()
        self._limit = min(MAX_BLOCKS, max(MIN_BLOCKS, CAPACITIES * blocks_below))
        self._refused: OrderedDict[bytes, int] = OrderedDict()  # key → uses at the refusal
        # Keys of the direct predecessors of admitted blocks. A prompt's last blocks are evicted
        # first, so most predecessors have not been offered yet.
        self._needed: OrderedDict[bytes, None] = OrderedDict()
        # The filter holds no blocks, so the history's queues stay empty.
        self._history = History(self._limit, self._model, by_length=True)
        self._low = 0.0
        self._written = 0.0
        self._seconds = 0.0
        self._now: float | None = None

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self._history.record_prompt(chain, now)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        self._pass_time(now)
        stays = HORIZON_SECONDS
        if self._written:
            stays = min(stays, self._blocks_below * self._seconds / self._written)
        by_run: dict[Run, bool] = {}
        verdicts = []
        for key in keys:
            block = self._history.blocks.get(key)
            if block is None:  # a block of no observed prompt is admitted
                verdicts.append(True)
                continue
            run = block.run
            worth = by_run.get(run)
            if worth is None:
                age = now - run.time
                chance = self._model.chance(run.name, age, age + stays)
                worth = by_run[run] = chance >= max(self._min_chance, self._low)
                self._low += STEP * (WORST - (chance < self._low))
            # The block was refused before, and has been used since.
            recalled = self._refused.pop(key, block.uses) < block.uses
            needed = key in self._needed
            self._needed.pop(key, None)
            admitted = worth or needed or (recalled and run.name != LEFT_BEHIND)
            verdicts.append(admitted)
            if not admitted:
                self._refused[key] = block.uses
            elif block.parent is not None:
                self._needed[block.parent.key] = None
        for names in (self._refused, self._needed):
            while len(names) > self._limit:
                names.popitem(last=False)
        self._written += sum(verdicts)
        return verdicts

    def _pass_time(self, now: float) -> None:
        if self._now is not None:
            passed = max(0.0, now - self._now)
            keep = math.exp(-passed / RATE_SECONDS)
            self._written *= keep
            self._seconds = self._seconds * keep + passed
        self._now = now
