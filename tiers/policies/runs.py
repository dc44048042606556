# SPDX-License-Identifier: Apache-2.0
"""Runs: groups of blocks of one class that the same prompt used last, and so age together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .reuse_model import Class


class Run:
    """A group of blocks of one class and one cost of a miss that were last used together."""

    __slots__ = ("blocks", "born", "gone", "in_order", "level", "name", "prompt", "queue", "time")

    def __init__(self, name: Class, level: int, prompt: Prompt) -> None:
        self.name = name
        self.level = level  # the level of the cost of a miss (`MissCost`)
        self.prompt = prompt
        self.time = prompt.time
        self.blocks: dict[bytes, Block] = {}  # held by the owner; head first if `in_order`
        self.gone: dict[bytes, Block] = {}  # not held by the owner
        self.born = 0  # number of blocks at `time`
        self.in_order = True
        self.queue: OrderedDict[Run, None] | None = None

    def __len__(self) -> int:
        return len(self.blocks) + len(self.gone)

    def weight(self, num_blocks: int) -> float:
        """Return the weight of `num_blocks` of the run in the model. A whole run weighs the square
        root of its number of blocks: a run is one observation, but a long run brings more gain."""
        return float(num_blocks / self.born**0.5)

    def mark_held(self, block: Block) -> None:
        """Mark a block of the run as held by the owner."""
        self.gone.pop(block.key, None)
        self.blocks[block.key] = block
        self.in_order = False
        block.held = True
        if block.parent is not None:
            block.parent.children += 1

    def mark_gone(self, block: Block) -> None:
        """Mark a block of the run as no longer held by the owner."""
        del self.blocks[block.key]
        self.gone[block.key] = block
        block.held = False
        if block.parent is not None:
            block.parent.children -= 1

    def add_block(self, block: Block, depth: int, parent: Block | None = None) -> None:
        """Move a block from its run to this run, or add a new block. Blocks are added head first.
        `depth` is the block's position in the prompt's chain, `parent` the block before it."""
        before = block.run
        (before.blocks if block.held else before.gone).pop(block.key, None)
        (self.blocks if block.held else self.gone)[block.key] = block
        block.run = self
        block.depth = depth
        block.set_parent(parent)
        block.uses += 1
        self.born += 1

    def tail_first(self) -> Iterator[Block]:
        """Return the blocks of the run that the owner holds, the deepest in the chain first."""
        if not self.in_order:
            self.blocks = dict(sorted(self.blocks.items(), key=lambda item: item[1].depth))
            self.in_order = True
        return reversed(self.blocks.values())


class Block:
    """A block that the owner holds, or that the history only remembers."""

    __slots__ = ("children", "depth", "held", "key", "parent", "run", "sharers", "uses")

    def __init__(self, key: bytes, run: Run) -> None:
        self.key = key
        self.run = run
        self.depth = 0  # of two blocks in a run, the deeper one is evicted first
        self.parent: Block | None = None
        self.children = 0  # held blocks that follow this block in a chain
        self.sharers = 0
        self.uses = 0  # number of prompts with this block
        self.held = False

    def set_parent(self, parent: Block | None) -> None:
        """Set the block before this block. A parent that was removed may exist as a new `Block`."""
        if self.parent is not parent:
            if self.held:
                if self.parent is not None:
                    self.parent.children -= 1
                if parent is not None:
                    parent.children += 1
            self.parent = parent


class Prompt:
    """A remembered prompt. `turn` is the number of earlier prompts of its conversation. `gap` is
    the mean time in seconds between these prompts; each gap halves the weight of earlier gaps."""

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
