# SPDX-License-Identifier: Apache-2.0
"""Reuse: a block is written if it will probably be asked for while the tier below still has it.

From the prompts it is told of it learns, by turn, length and gap, how soon blocks are used again. A
write pays if the chance of a use outweighs it, before the block would be displaced below: what is
written now stays for as long as it takes to write the whole tier anew, so the more is written, the
shorter that is and the less is worth writing. Where almost everything will be used again, the tenth
with the least chance is still left out.

What was refused and is asked for again is admitted when it is lost next, whatever the model says of
it, unless its conversation has gone on without it. What comes before an admitted block is admitted
too, since a block behind a hole serves nobody.

Blocks are remembered for four times the tier below, at least `MIN_BLOCKS` and no more than
`MAX_BLOCKS`; one takes about 400 bytes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from ..policies.history import LEFT_BEHIND, History
from ..policies.reuse_model import ReuseModel
from ..policies.runs import Run
from .base import AdmissionFilter

# A write is worth as much of a use as this.
MIN_CHANCE = 0.28
# Uses later than this are not counted on, however long the tier below keeps a block.
HORIZON_SECONDS = 3600.0
CAPACITIES = 4
MIN_BLOCKS = 16_384
MAX_BLOCKS = 262_144
# This share of what is offered is left out in any case; its limit is found in steps of the chance.
WORST = 0.1
STEP = 0.02
# What was written so long ago counts 1/e of what is written now.
RATE_SECONDS = 600.0


class ReuseFilter(AdmissionFilter):
    """Admits what will probably be used again while a tier of `blocks_below` blocks has it."""

    learns = True

    def __init__(self, blocks_below: int, min_chance: float = MIN_CHANCE) -> None:
        self._blocks_below = blocks_below
        self._min_chance = min_chance
        self._model = ReuseModel()
        self._limit = min(MAX_BLOCKS, max(MIN_BLOCKS, CAPACITIES * blocks_below))
        self._refused: OrderedDict[bytes, int] = OrderedDict()  # with its uses until then
        # What stands directly before an admitted block. Tails are lost before their heads, so it is
        # mostly still to come.
        self._needed: OrderedDict[bytes, None] = OrderedDict()
        # Nothing is held here, so its queues stay empty.
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
            if block is None:  # no prompt told of it, so nothing speaks against it
                verdicts.append(True)
                continue
            run = block.run
            worth = by_run.get(run)
            if worth is None:
                age = now - run.time
                chance = self._model.chance(run.name, age, age + stays)
                worth = by_run[run] = chance >= max(self._min_chance, self._low)
                self._low += STEP * (WORST - (chance < self._low))
            # A "no" that was wrong: asked for again.
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
