# SPDX-License-Identifier: Apache-2.0
"""What policies are held against, besides the best possible: LRU told of heads before tails.

A cache that uses the blocks of a prompt in the order they are computed does this, and loses heads
while their tails stay, which are worth nothing without them.
"""

from __future__ import annotations

from collections import OrderedDict

from .replay import Outcome, outcome
from .trace import Trace


def replay_heads_first(trace: Trace, capacity_blocks: int) -> Outcome:
    """LRU that takes block after block of each prompt, the head first."""
    order: OrderedDict[int, None] = OrderedDict()
    hits_by_prompt = []
    for prompt in trace.prompts:
        misses = (depth for depth, block in enumerate(prompt.chain) if block not in order)
        hits_by_prompt.append(next(misses, len(prompt.chain)))
        for block in prompt.chain:
            if block in order:
                order.move_to_end(block)
                continue
            if len(order) == capacity_blocks:
                order.popitem(last=False)
            order[block] = None
    return outcome(trace, hits_by_prompt)
