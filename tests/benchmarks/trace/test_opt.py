# SPDX-License-Identifier: Apache-2.0
"""Belady's rule: by hand, against every possible choice on small traces, and as an upper bound."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from stratakv.benchmarks.trace.formats import Trace
from stratakv.benchmarks.trace.replay import replay, replay_opt
from stratakv.tiers.policies.lru import LruPolicy

from .tiny_traces import random_trace, trace_of


def test_what_comes_again_stays() -> None:
    """LRU of two blocks loses 0 and 1 to the prompts that never come again; OPT lets them by."""
    trace = trace_of([0, 1], [2], [3], [0, 1])
    assert replay(trace, LruPolicy(), 2).hit_percent == 0.0
    assert replay_opt(trace, 2).hit_percent == pytest.approx(100 * 2 / 6)


def test_of_equals_the_deepest_goes() -> None:
    assert replay_opt(trace_of([0, 1], [0, 1]), 1).hit_percent == pytest.approx(100 * 1 / 4)


def test_next_uses() -> None:
    uses = [list(each) for each in trace_of([0, 1], [0, 2], [0, 1]).next_uses]
    assert uses == [[1, 2], [2, 3], [3, 3]]


def best_hits(trace: Trace, capacity: int) -> int:
    """By trying: after each prompt, every set of blocks that a tier could hold."""
    best = {frozenset[int](): 0}
    for prompt in trace.prompts:
        after: dict[frozenset[int], int] = {}
        for held, so_far in best.items():
            missing = (i for i, block in enumerate(prompt.chain) if block not in held)
            hits = so_far + next(missing, len(prompt.chain))
            there = held | set(prompt.chain)
            for size in range(min(capacity, len(there)) + 1):
                for kept in map(frozenset, combinations(there, size)):
                    after[kept] = max(hits, after.get(kept, 0))
        best = after
    return max(best.values())


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_no_choice_hits_more(capacity: int, rng: random.Random, scale: str) -> None:
    gained = 0
    for _ in range(40 if scale == "ci" else 2_000):
        trace = random_trace(rng, requests=8, blocks=7)
        found = replay_opt(trace, capacity).hit_percent * trace.num_accesses / 100
        assert found == pytest.approx(best_hits(trace, capacity))
        lru = replay(trace, LruPolicy(), capacity).hit_percent * trace.num_accesses / 100
        assert lru <= found + 1e-9
        gained += found > lru + 0.5
    assert gained, "on none of these traces was there anything to choose"
