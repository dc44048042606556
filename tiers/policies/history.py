# SPDX-License-Identifier: Apache-2.0
"""The history: which blocks prompts used and when, whether their owner holds them or not.

What was evicted teaches as much as what was kept, so blocks are remembered beyond their eviction:
up to a limit; one takes about 400 bytes. Tells the model when runs are used again, and the queues
which runs there are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile

from .reuse_model import Class, ReuseModel
from .runs import (
    ALL_THE_SAME,
    LEFT_BEHIND,
    UNANNOUNCED,
    Block,
    Classify,
    MissCost,
    Prompt,
    Run,
    RunQueues,
    class_by_pace,
)

# Runs of blocks that no prompt announced are cut at this length, which bounds the cost of sorting.
UNANNOUNCED_BLOCKS = 64
# The model learns after so many prompts, and after an eighth of the runs that are watched.
LEARN_PROMPTS = 64
# Of more runs than this it looks at some only, so that learning takes a few milliseconds.
LEARN_RUNS = 4096


class History:
    """Blocks by key, each in one run."""

    def __init__(
        self,
        limit: int,
        model: ReuseModel,
        queues: RunQueues,
        *,
        classify: Classify = class_by_pace,
        cost: MissCost = ALL_THE_SAME,
    ) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.num_prompts = 0
        self.now = 0.0
        self._limit = limit
        self._model = model
        self._queues = queues
        self._classify = classify
        self._cost = cost
        self._levels: list[int] = []  # by depth
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._unannounced: Run | None = None  # the last one, if it is still there
        self._learn_at = LEARN_PROMPTS

    def record_prompt(self, chain: Sequence[bytes], now: float) -> int:
        """A prompt arrived; how many of its leading blocks the owner holds."""
        self.now = now = max(now, self.now)
        self.num_prompts += 1
        matched: list[Block] = []
        for key in chain:
            block = self.blocks.get(key)
            if block is None:
                break
            matched.append(block)
        hits = sum(1 for _ in takewhile(lambda block: block.held, matched))
        before = matched[-1].run.prompt if matched else None
        if before is not None and not before.length:
            before = None  # no prompt announced those
        # A prompt that keeps more than half of another one goes on from it; one that keeps less
        # only begins alike.
        goes_on = before is not None and 2 * len(matched) > before.length
        prompt = Prompt(now, len(chain), before if goes_on else None)
        if before is not None and not goes_on:
            for block in matched:
                block.sharers += 1
        self._move_chain(chain, prompt)
        self.trim_to_limit()
        if self.num_prompts >= self._learn_at:
            self.learn()
        return hits

    def learn(self) -> None:
        """Refresh the model from what is being watched."""
        now, every = self.now, 1 + len(self._runs) // LEARN_RUNS
        watched = islice(self._runs, 0, None, every)
        self._model.refresh((r.name, now - r.time, every * r.weight(len(r))) for r in watched)
        self._queues.reorder()
        self._learn_at = self.num_prompts + max(LEARN_PROMPTS, len(self._runs) // 8)

    def gather(self, keys: Iterable[bytes]) -> None:
        """Make runs of blocks that no prompt announced, the last one hottest."""
        run = self._unannounced
        for key in keys:
            if run is None or run.time != self.now or run.born >= UNANNOUNCED_BLOCKS:
                run = self._unannounced = self._new_run(UNANNOUNCED, 0, Prompt(self.now, 0, None))
            block = self.blocks.get(key)
            if block is None:
                block = self.blocks[key] = Block(key, run)
            else:
                block.run.lose(block)
                if block.run is not run:
                    self._drop_if_empty(block.run)
            block.depth = -run.born
            run.add_block(block)
            run.in_order = False
            self._queues.link(run, self.now)

    def trim_to_limit(self) -> None:
        """Keep to the limit: the oldest runs first, and of them what the owner does not hold."""
        for _ in range(len(self._runs)):
            if len(self.blocks) <= self._limit:
                break
            run = next(iter(self._runs))
            if run.gone:
                self._model.given_up(run.name, self.now - run.time, run.weight(len(run.gone)))
            for key in run.gone:
                del self.blocks[key]
            run.gone.clear()
            self._runs.move_to_end(run)
            self._drop_if_empty(run)

    def _move_chain(self, chain: Sequence[bytes], prompt: Prompt) -> None:
        """Put the chain's blocks into runs of this prompt."""
        used: dict[Run, int] = {}
        made: list[Run] = []
        levels = self._levels
        levels += map(self._cost.level, range(len(levels), len(chain)))
        sharers = -1
        run: Run | None = None
        parent: Block | None = None
        for depth, key in enumerate(chain):
            block = self.blocks.get(key)
            level = levels[depth]
            if run is None or level != run.level or (block.sharers if block else 0) != sharers:
                sharers = block.sharers if block else 0
                name = self._classify(prompt, sharers)
                if run is None or (run.name, run.level) != (name, level):
                    run = self._new_run(name, level, prompt)
                    made.append(run)
            if block is None:
                block = self.blocks[key] = Block(key, run)
            else:
                used[block.run] = used.get(block.run, 0) + 1
                block.run.lose(block)
            block.depth = depth
            block.set_parent(parent)
            run.add_block(block)
            parent = block
        for old, count in used.items():
            self._used(old, count, prompt)
        for run in made:
            self._queues.link(run, self.now)

    def _used(self, run: Run, count: int, prompt: Prompt) -> None:
        """So many blocks of a run were used, by a prompt which has taken them."""
        age = self.now - run.time
        self._model.used(run.name, age, run.weight(count))
        self._drop_if_empty(run)
        if prompt.turn and run and run.name != LEFT_BEHIND:
            self._model.given_up(run.name, age, run.weight(len(run)))
            self._queues.unlink(run)
            run.name = LEFT_BEHIND
            run.time = self.now
            run.born = len(run)
            self._queues.link(run, self.now)

    def _new_run(self, name: Class, level: int, prompt: Prompt) -> Run:
        run = Run(name, level, prompt)
        self._runs[run] = None
        return run

    def _drop_if_empty(self, run: Run) -> None:
        if not run.blocks:
            self._queues.unlink(run)
        if not run:
            self._runs.pop(run, None)
            if run is self._unannounced:
                self._unannounced = None
