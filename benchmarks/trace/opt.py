# SPDX-License-Identifier: Apache-2.0
"""The best that any policy can do: Belady's rule with bypass, which knows what comes.

Of what is resident and what has just been asked for, the blocks whose next use is nearest stay; of
equal ones the deepest goes. That is exact for block hits under the prefix rule, because a chain's
block is never asked for later than the blocks behind it.
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from .replay import Outcome, outcome
from .trace import Trace

_ABSENT = -1


def replay_opt(trace: Trace, capacity_blocks: int) -> Outcome:
    """Run a trace through an empty tier that knows the rest of it."""
    prompts = trace.prompts
    never = len(prompts)
    depths = 1 + max((len(prompt.chain) for prompt in prompts), default=0)
    # By block: the prompt it is kept for. The heap holds prompt and depth as one number, the
    # farthest first; an entry counts only while its block is kept for that very prompt.
    kept_for = array("q", [_ABSENT]) * trace.num_blocks
    farthest: list[int] = []
    num_kept = 0
    hits_by_prompt = []
    for prompt, uses in zip(prompts, trace.next_uses, strict=True):
        hits = 0
        for block in prompt.chain:
            if kept_for[block] == _ABSENT:
                break
            hits += 1
        hits_by_prompt.append(hits)
        for depth, (block, use) in enumerate(zip(prompt.chain, uses, strict=True)):
            if use == never:
                num_kept -= kept_for[block] != _ABSENT
                kept_for[block] = _ABSENT
                continue
            num_kept += kept_for[block] == _ABSENT
            kept_for[block] = use
            heappush(farthest, -(use * depths + depth))
        while num_kept > capacity_blocks:
            use, depth = divmod(-heappop(farthest), depths)
            block = prompts[use].chain[depth]
            if kept_for[block] == use:
                kept_for[block] = _ABSENT
                num_kept -= 1
    return outcome(trace, hits_by_prompt)
