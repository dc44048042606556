# SPDX-License-Identifier: Apache-2.0
"""One tier, replayed: a trace against an eviction policy, without moving a byte.

A prompt is served from the leading run of its blocks that are resident (the prefix rule); then the
others come in, as the CPU slab takes them: room is made by the policy, blocks of the call itself
are not evicted for one another, and what still does not fit is the tail. Requests run one by one,
only the blocks of prompts are kept, and the tier starts empty.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from ...tiers.policies.base import EvictionPolicy
from .trace import BLOCK_TOKENS, Trace

_WEIGHT_FLOPS = 2 * 8.0e9  # for each token
_ATTENTION_FLOPS = 4 * 32 * 4096  # for each token and each one before it: layers, hidden size
_ATTENTION_PER_BLOCK = _ATTENTION_FLOPS * BLOCK_TOKENS / _WEIGHT_FLOPS


def prefill_work(blocks: int) -> float:
    """Of the first `blocks` blocks of a prompt; that of others is the difference."""
    return blocks + _ATTENTION_PER_BLOCK * blocks * blocks / 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a tier served of a trace."""

    hit_percent: float  # of the prompts' blocks
    work_percent: float  # of the prefill work


class ReplayTier:
    """What `CpuSlab` does with keys, and nothing of what it does with bytes."""

    def __init__(self, policy: EvictionPolicy, capacity_blocks: int) -> None:
        self.policy = policy
        self.capacity_blocks = capacity_blocks
        self.resident: set[bytes] = set()

    def leading_hits(self, chain: Sequence[bytes]) -> int:
        """The length of the leading run of `chain` that is resident. Changes nothing."""
        resident = self.resident
        for index, key in enumerate(chain):
            if key not in resident:
                return index
        return len(chain)

    def make_room(
        self, count: int, wanted: Sequence[bytes], coming: Sequence[bytes] | None = None
    ) -> list[bytes]:
        """Evict until `count` blocks fit, as far as that goes without a block of `wanted`, and as
        far as the policy finds those worth it that are `coming`: all lacking of `wanted`."""
        excess = count - (self.capacity_blocks - len(self.resident))
        if excess <= 0:
            return []
        kept = frozenset(wanted)
        if coming is None:
            coming = [key for key in wanted if key not in self.resident]
        victims = self.policy.displaced_by(coming, excess, lambda key: key not in kept)
        self.policy.remove(victims)
        self.resident.difference_update(victims)
        return victims

    def take_in(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Keep blocks that are not resident, head first, as many as fit; those kept."""
        kept = keys[: self.capacity_blocks - len(self.resident)]
        self.resident.update(kept)
        return kept


def replay(trace: Trace, policy: EvictionPolicy, capacity_blocks: int) -> Outcome:
    """Run a trace through an empty tier of `capacity_blocks`."""
    tier = ReplayTier(policy, capacity_blocks)
    resident = tier.resident
    hits_by_prompt = []
    for prompt, chain in zip(trace.prompts, trace.keyed_chains, strict=True):
        policy.observe(chain, prompt.arrival_seconds)
        hits = tier.leading_hits(chain)
        hits_by_prompt.append(hits)
        missing = [key for key in chain[hits:] if key not in resident]
        tier.make_room(len(missing), chain)
        kept = tier.take_in(missing)
        # Tails first, so that they are evicted first, and what was used after what is new.
        policy.insert(reversed(kept))
        policy.touch(reversed(chain[:hits]))
    return outcome(trace, hits_by_prompt)


def outcome(trace: Trace, hits_by_prompt: Sequence[int]) -> Outcome:
    """The shares that so many leading blocks of each prompt make up."""
    saved = work = 0.0
    for prompt, hits in zip(trace.prompts, hits_by_prompt, strict=True):
        saved += prefill_work(hits)
        work += prefill_work(len(prompt.chain))
    return Outcome(100 * sum(hits_by_prompt) / trace.num_accesses, 100 * saved / work)


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
