# SPDX-License-Identifier: Apache-2.0
"""Blocks of runs, in the order in which they may go: none before those that follow it in a chain.

A block without the blocks before it serves nobody. Knows nothing of why the runs are ordered as
they are. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .runs import Block, Run


def take_tails_first(
    runs: Iterable[Run], count: int, may_go: Callable[[bytes], bool]
) -> dict[Block, None]:
    """Up to `count` blocks of the runs, the first run first. A block whose followers are held and
    stay is passed over, with all before it in its run, and taken as soon as they are taken."""
    taken: dict[Block, None] = {}
    left: dict[Block, int] = {}  # of parents of taken blocks: the followers that stay
    waiting: set[Run] = set()  # passed over for the sake of followers
    for first in runs:
        to_do = [first]
        while to_do:
            run = to_do.pop()
            for block in run.tail_first():
                if len(taken) >= count:
                    return taken
                if block in taken:
                    continue
                if left.get(block, block.children):
                    waiting.add(run)
                    break
                if not may_go(block.key):
                    break
                taken[block] = None
                parent = block.parent
                if parent is None:
                    continue
                left[parent] = left.get(parent, parent.children) - 1
                if not left[parent] and parent.run in waiting:
                    waiting.discard(parent.run)
                    to_do += [run, parent.run]
                    break
    return taken
