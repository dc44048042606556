# SPDX-License-Identifier: Apache-2.0
"""Runs: blocks that were last used by the same prompt and are alike, so that they age together."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from .reuse_model import Class


class Run:
    """Blocks that age together."""

    __slots__ = ("blocks", "born", "gone", "in_order", "level", "name", "prompt", "queue", "time")

    def __init__(self, name: Class, level: int, prompt: Prompt) -> None:
        self.name = name
        self.level = level  # of the cost of a miss, see MissCost
        self.prompt = prompt
        self.time = prompt.time
        self.blocks: dict[bytes, Block] = {}  # that the owner holds; head first where `in_order`
        self.gone: dict[bytes, Block] = {}  # that the owner does not hold
        self.born = 0  # blocks at `time`
        self.in_order = True
        self.queue: OrderedDict[Run, None] | None = None

    def __len__(self) -> int:
        return len(self.blocks) + len(self.gone)

    def weight(self, num_blocks: int) -> float:
        """The weight of `num_blocks` of the run. A whole run weighs between 1 and its number of
        blocks: it is one observation, but a long run brings more gain."""
        return float(num_blocks / self.born**0.5)

    def mark_held(self, block: Block) -> None:
        """Mark this block of the run as held by the owner."""
        self.gone.pop(block.key, None)
        self.blocks[block.key] = block
        self.in_order = False
        block.held = True
        if block.parent is not None:
            block.parent.children += 1

    def mark_gone(self, block: Block) -> None:
        """Mark this block as no longer held by the owner."""
        del self.blocks[block.key]
        self.gone[block.key] = block
        block.held = False
        if block.parent is not None:
            block.parent.children -= 1

    def add_block(self, block: Block, depth: int, parent: Block | None = None) -> None:
        """Move a block here from its run, or add a new block; head first. `depth` is its position
        in the chain of the prompt that used it, behind `parent`."""
        before = block.run
        (before.blocks if block.held else before.gone).pop(block.key, None)
        (self.blocks if block.held else self.gone)[block.key] = block
        block.run = self
        block.depth = depth
        block.set_parent(parent)
        block.uses += 1
        self.born += 1

    def tail_first(self) -> Iterator[Block]:
        """The blocks that the owner holds, the tail first."""
        if not self.in_order:
            self.blocks = dict(sorted(self.blocks.items(), key=lambda item: item[1].depth))
            self.in_order = True
        return reversed(self.blocks.values())


class Block:
    """A block, held by the owner or only remembered."""

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
        """Set the parent; a forgotten parent may have come back as a new block."""
        if self.parent is not parent:
            if self.held:
                if self.parent is not None:
                    self.parent.children -= 1
                if parent is not None:
                    parent.children += 1
            self.parent = parent


class Prompt:
    """A remembered prompt. `turn`: the number of earlier prompts that its chain continues. `gap`:
    the average seconds between these prompts; each gap halves the weight of the earlier gaps."""

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
