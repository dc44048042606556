# SPDX-License-Identifier: Apache-2.0
"""Runs: the blocks that were last used by the same prompt and are alike, as one thing that ages.

A prompt uses a chain from its head on. So of what earlier prompts used it takes leading parts away,
and each block is in one run, that of the last prompt which used it:

    prompt 1 uses a b c d e, then prompt 2 uses a b c f g:    [a b c f g]   left behind: [d e]

Runs go in an order: there is a queue for each class and age, ranked by the model. Runs of one class
and one bin of ages are worth the same, and the oldest goes first. A run moves on to the next queue
when its age leaves the bin, which happens a few dozen times in its life at most, so that nothing is
done for each block or at each moment.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import log2

from ..errors import TierConfigError
from .reuse_model import NUM_BINS, UPPER, Class, ReuseModel, bin_of

MAX_TURN = 6
MAX_SHARED = 3
MAX_GAP = 7
MAX_LENGTH = 9
GAP_OCTAVES = 1.5  # of one step between classes
# Runs are looked at for their age so often at most.
ADVANCE_SECONDS = 0.25
# Steps in which the cost of a miss is told apart: half-octaves.
LEVELS_PER_OCTAVE = 2

_OWN, _SHARED, _LEFT_BEHIND = range(3)
LEFT_BEHIND: Class = (_LEFT_BEHIND,)
UNANNOUNCED: Class = (_OWN, 0, 0)


class Prompt:
    """What is remembered of a prompt. Turn: how many prompts its chain goes on from. Gap: how long
    those took to follow one another, an average that halves the weight of each by the next."""

    __slots__ = ("gap", "length", "time", "turn")

    def __init__(self, time: float, length: int, before: Prompt | None) -> None:
        self.time = time
        self.length = length
        self.turn = 0
        self.gap: float | None = None
        if before is not None:
            self.turn = before.turn + 1
            gap = time - before.time
            self.gap = gap if before.gap is None else (before.gap + gap) / 2


def class_by_pace(prompt: Prompt, sharers: int) -> Class:
    """The class of blocks that so many other conversations had begun with: by turn and gap."""
    if sharers:
        return (_SHARED, min(MAX_SHARED, sharers.bit_length() - 1))
    gap = 0
    if prompt.gap is not None:
        gap = min(MAX_GAP, 1 + int(log2(max(1.0, prompt.gap)) / GAP_OCTAVES))
    return (_OWN, min(MAX_TURN, prompt.turn), gap)


def class_by_length(prompt: Prompt, sharers: int) -> Class:
    """The same by turn, length and gap."""
    name = class_by_pace(prompt, sharers)
    if sharers:
        return name
    return (*name[:2], min(MAX_LENGTH, prompt.length.bit_length()), *name[2:])


class Run:
    """Blocks that age together."""

    __slots__ = ("blocks", "born", "gone", "in_order", "level", "name", "prompt", "queue", "time")

    def __init__(self, name: Class, level: int, prompt: Prompt) -> None:
        self.name = name
        self.level = level  # of what a miss costs, see MissCost
        self.prompt = prompt
        self.time = prompt.time
        self.blocks: dict[bytes, Block] = {}  # that the owner holds; head first where `in_order`
        self.gone: dict[bytes, Block] = {}  # that it does not
        self.born = 0  # blocks at `time`
        self.in_order = True
        self.queue: OrderedDict[Run, None] | None = None

    def __len__(self) -> int:
        return len(self.blocks) + len(self.gone)

    def weight(self, num_blocks: int) -> float:
        """Between one for a run and one for each of its blocks: a run is one observation, but
        there is more to gain by a long one."""
        return float(num_blocks / self.born**0.5)

    def mark_held(self, block: Block) -> None:
        """The owner holds this block of the run from now on."""
        self.gone.pop(block.key, None)
        self.blocks[block.key] = block
        self.in_order = False
        block.held = True
        if block.parent is not None:
            block.parent.children += 1

    def let_go(self, block: Block) -> None:
        """The owner no longer holds this block."""
        del self.blocks[block.key]
        self.gone[block.key] = block
        block.held = False
        if block.parent is not None:
            block.parent.children -= 1

    def add_block(self, block: Block) -> None:
        """Have a block from another run, or a new one; head first."""
        (self.blocks if block.held else self.gone)[block.key] = block
        block.run = self
        block.uses += 1
        self.born += 1

    def lose(self, block: Block) -> None:
        """Another run is about to take this block."""
        del (self.blocks if block.held else self.gone)[block.key]

    def tail_first(self) -> Iterator[Block]:
        """The blocks that the owner holds."""
        if not self.in_order:
            self.blocks = dict(sorted(self.blocks.items(), key=lambda item: item[1].depth))
            self.in_order = True
        return reversed(self.blocks.values())


class Block:
    """One block, held by the owner or only remembered."""

    __slots__ = ("children", "depth", "held", "key", "parent", "run", "sharers", "uses")

    def __init__(self, key: bytes, run: Run) -> None:
        self.key = key
        self.run = run
        self.depth = 0  # of two blocks in a run the deeper one goes first
        self.parent: Block | None = None
        self.children = 0  # blocks held that follow it in some chain
        self.sharers = 0
        self.uses = 0  # prompts that it was in
        self.held = False

    def set_parent(self, parent: Block | None) -> None:
        """Have a parent, which may be known anew after it had been forgotten."""
        if self.parent is not parent:
            if self.held:
                if self.parent is not None:
                    self.parent.children -= 1
                if parent is not None:
                    parent.children += 1
            self.parent = parent


# Takes a prompt, and how many other conversations share the block.
Classify = Callable[[Prompt, int], Class]


@dataclass(frozen=True, slots=True)
class MissCost:
    """Seconds that a missing block costs: to compute it, which takes longer the more blocks come
    before it, or to load it from the tier below where that is faster. All blocks cost the same by
    default."""

    compute_seconds: float = 1.0
    compute_seconds_per_depth: float = 0.0
    load_seconds: float = math.inf

    def __post_init__(self) -> None:
        dear = self.compute_seconds > 0 and self.load_seconds > 0
        if not (dear and 0 <= self.compute_seconds_per_depth < math.inf):
            raise TierConfigError(f"a miss costs time, and no less the deeper it is: {self}")

    def level(self, depth: int) -> int:
        """The cost of a block with so many before it, as a step on a logarithmic scale."""
        compute = self.compute_seconds + self.compute_seconds_per_depth * depth
        return round(LEVELS_PER_OCTAVE * math.log2(min(compute, self.load_seconds)))


ALL_THE_SAME = MissCost()


class _Queue:
    """Runs that are worth the same, the oldest first."""

    __slots__ = ("at", "level", "name", "runs", "value")

    def __init__(self, name: Class, level: int, at: int) -> None:
        self.name = name
        self.level = level
        self.at = at  # the bin of ages
        self.value = 0.0
        self.runs: OrderedDict[Run, None] = OrderedDict()


def _rank(queue: _Queue) -> tuple[float, int]:
    """Where values are equal, the older ages go first."""
    return queue.value, -queue.at


class RunQueues:
    """The runs of which the owner holds something."""

    def __init__(self, model: ReuseModel) -> None:
        self._model = model
        self._queues: dict[tuple[Class, int, int], _Queue] = {}
        self._ranked: list[_Queue] = []  # the least valuable first
        self._advanced = -math.inf

    def link(self, run: Run, now: float) -> None:
        """Take in a run, unless nothing of it is held or it is there already."""
        if not run.blocks or run.queue is not None:
            return
        place = (run.name, run.level, bin_of(now - run.time))
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = _Queue(*place)
            queue.value = self._value(*place)
            bisect.insort(self._ranked, queue, key=_rank)
        run.queue = queue.runs
        run.queue[run] = None

    def unlink(self, run: Run) -> None:
        """Take out a run, where it is there."""
        if run.queue is not None:
            del run.queue[run]
            run.queue = None

    def reorder(self) -> None:
        """The model has changed."""
        self._queues = {place: queue for place, queue in self._queues.items() if queue.runs}
        for place, queue in self._queues.items():
            queue.value = self._value(*place)
        self._ranked = sorted(self._queues.values(), key=_rank)

    def value(self, run: Run, now: float) -> float:
        """What each second of keeping a run is expected to save."""
        return self._value(run.name, run.level, bin_of(now - run.time))

    def by_value(self, now: float) -> Iterator[tuple[float, Iterable[Run]]]:
        """The least valuable first, with what they are worth."""
        self._advance(now)
        for queue in self._ranked:
            if queue.runs:
                yield queue.value, queue.runs

    def by_age(self, now: float) -> Iterator[tuple[float, Iterable[Run]]]:
        """The longest unused first; what they are worth is not asked."""
        self._advance(now)
        by_bin: dict[int, list[Iterable[Run]]] = {}
        for queue in self._queues.values():
            by_bin.setdefault(queue.at, []).append(queue.runs)
        for at in sorted(by_bin, reverse=True):
            yield 0.0, heapq.merge(*by_bin[at], key=lambda run: run.time)

    def _value(self, name: Class, level: int, at: int) -> float:
        return float(self._model.index(name, at) * 2.0 ** (level / LEVELS_PER_OCTAVE))

    def _advance(self, now: float) -> None:
        """Move runs on; the oldest ages first, so that each queue stays ordered by time."""
        if now < self._advanced + ADVANCE_SECONDS:
            return
        self._advanced = now
        filled = [queue for queue in self._queues.values() if queue.runs]
        for queue in sorted(filled, key=lambda queue: -queue.at):
            while queue.runs and queue.at + 1 < NUM_BINS:
                run = next(iter(queue.runs))
                if now - run.time < UPPER[queue.at]:
                    break
                self.unlink(run)
                self.link(run, now)
