# SPDX-License-Identifier: Apache-2.0
"""History: the prompts and times at which blocks were used, of held and of evicted blocks.

The reuse of evicted blocks is as informative as the reuse of held blocks. So the history remembers
blocks after their eviction, up to a limit; a block takes about 400 bytes. The history reports each
reuse of blocks to the `ReuseModel`.

Blocks are grouped in runs: a run has blocks of one class that the same prompt used last, so that
the blocks of a run age together. A prompt uses a chain from the first block on, so a prompt moves
leading blocks out of the runs of earlier prompts. Each block is in one run, which belongs to the
last prompt that used the block:

    prompt 1 uses a b c d e, then prompt 2 uses a b c f g:    [a b c f g]   left behind: [d e]

Runs are ordered in queues, one for each class, cost of a miss and bin of ages. The model ranks the
queues. All runs of a queue have the same value, and the oldest run is evicted first. A run moves to
the next queue when its age leaves the bin of ages, at most a few dozen times, so no work is
repeated for each block or at short intervals."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice, takewhile
from math import log2

from .miss_cost import MissCost
from .reuse_model import Class, ReuseModel
from .run_queues import RunQueues
from .runs import Block, Prompt, Run

# The longest run of blocks of no observed prompt, which bounds the cost of sorting.
UNANNOUNCED_BLOCKS = 64
# The model is fitted after this number of prompts, or an eighth of the number of runs if larger.
LEARN_PROMPTS = 64
# The most runs from which the model is fitted, in a few milliseconds; of more runs, a sample.
LEARN_RUNS = 4096

MAX_TURN = 6
MAX_SHARED = 3
MAX_GAP = 7
MAX_LENGTH = 9
GAP_OCTAVES = 1.5  # the width of a class's range of gaps

_OWN, _SHARED, _LEFT_BEHIND = range(3)
LEFT_BEHIND: Class = (_LEFT_BEHIND,)
UNANNOUNCED: Class = (_OWN, 0, 0)


class History:
    """The remembered blocks by key, each in one run. Runs with blocks that the owner holds are in
    `queues`. `by_length`: the class of a run depends also on its prompt's length."""

    def __init__(
        self,
        limit: int,
        model: ReuseModel,
        *,
        by_length: bool = False,
        cost: MissCost | None = None,
    ) -> None:
        self.blocks: dict[bytes, Block] = {}
        self.queues = RunQueues(model)
        self.num_held = 0  # how many of `blocks` the owner holds
        self.num_prompts = 0
        self.now = 0.0
        self._limit = limit
        self._model = model
        self._by_length = by_length
        self._cost = cost or MissCost()
        self._levels: list[int] = []  # levels of the cost of a miss, by depth
        self._runs: OrderedDict[Run, None] = OrderedDict()
        self._unannounced: Run | None = None  # the last run of blocks of no prompt
        self._learn_at = LEARN_PROMPTS

    def record_prompt(self, chain: Sequence[bytes], now: float) -> int:
        """Record a prompt. Return how many of its leading blocks the owner holds."""
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
            before = None  # the blocks are of no observed prompt
        # A prompt with more than half of an earlier prompt's blocks continues that prompt. Prompts
        # with fewer common blocks only begin alike.
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
        """Fit the model to the ages of the runs, or of a sample of the runs if there are many."""
        now, every = self.now, 1 + len(self._runs) // LEARN_RUNS
        watched = islice(self._runs, 0, None, every)
        self._model.refresh((r.name, now - r.time, every * r.weight(len(r))) for r in watched)
        self.queues.reorder()
        self._learn_at = self.num_prompts + max(LEARN_PROMPTS, len(self._runs) // 8)

    def mark_held(self, keys: Iterable[bytes]) -> None:
        """Mark `keys` as held by the owner. Blocks of no observed prompt get their own runs, the
        last one hottest."""
        for key in keys:
            block = self.blocks.get(key) or self._add_unannounced(key)
            if block.held:
                continue
            run = block.run
            run.mark_held(block)
            self.num_held += 1
            if run.queue is None:
                self.queues.link(run, self.now)
        self.trim_to_limit()

    def mark_gone(self, keys: Iterable[bytes]) -> None:
        """Mark `keys` as evicted or dropped from the tier; unknown keys are ignored."""
        for key in keys:
            block = self.blocks.get(key)
            if block is not None and block.held:
                block.run.mark_gone(block)
                self.num_held -= 1
                self._drop_if_empty(block.run)

    def trim_to_limit(self) -> None:
        """Remove blocks that the owner does not hold, oldest runs first, until the limit is met."""
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

    def _add_unannounced(self, key: bytes) -> Block:
        run = self._unannounced
        if run is None or run.time != self.now or run.born >= UNANNOUNCED_BLOCKS:
            run = self._unannounced = self._new_run(UNANNOUNCED, 0, Prompt(self.now, 0, None))
        block = self.blocks[key] = Block(key, run)
        run.add_block(block, -run.born)
        run.in_order = False
        return block

    def _move_chain(self, chain: Sequence[bytes], prompt: Prompt) -> None:
        """Move the blocks of `chain` into new runs of `prompt`."""
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
                name = self._class_of(prompt, sharers)
                if run is None or (run.name, run.level) != (name, level):
                    run = self._new_run(name, level, prompt)
                    made.append(run)
            if block is None:
                block = self.blocks[key] = Block(key, run)
            else:
                used[block.run] = used.get(block.run, 0) + 1
            run.add_block(block, depth, parent)
            parent = block
        for old, count in used.items():
            self._used(old, count, prompt)
        for run in made:
            self.queues.link(run, self.now)

    def _used(self, run: Run, count: int, prompt: Prompt) -> None:
        """Report to the model that `prompt` used `count` blocks of `run`. If `prompt` continues an
        earlier prompt, the class of other blocks in `run` becomes LEFT_BEHIND."""
        age = self.now - run.time
        self._model.used(run.name, age, run.weight(count))
        self._drop_if_empty(run)
        if prompt.turn and run and run.name != LEFT_BEHIND:
            self._model.given_up(run.name, age, run.weight(len(run)))
            self.queues.unlink(run)
            run.name = LEFT_BEHIND
            run.time = self.now
            run.born = len(run)
            self.queues.link(run, self.now)

    def _new_run(self, name: Class, level: int, prompt: Prompt) -> Run:
        run = Run(name, level, prompt)
        self._runs[run] = None
        return run

    def _drop_if_empty(self, run: Run) -> None:
        if not run.blocks:
            self.queues.unlink(run)
            if not run.gone:
                self._runs.pop(run, None)
                if run is self._unannounced:
                    self._unannounced = None

    def _class_of(self, prompt: Prompt, sharers: int) -> Class:
        """Return the class of blocks in a prompt, by `sharers`, the number of other conversations
        that began with these blocks, or, if 0, by the prompt's turn and gap."""
        if sharers:
            return (_SHARED, min(MAX_SHARED, sharers.bit_length() - 1))
        gap = 0
        if prompt.gap is not None:
            gap = min(MAX_GAP, 1 + int(log2(max(1.0, prompt.gap)) / GAP_OCTAVES))
        turn = min(MAX_TURN, prompt.turn)
        if self._by_length:
            return (_OWN, turn, min(MAX_LENGTH, prompt.length.bit_length()), gap)
        return (_OWN, turn, gap)
