# SPDX-License-Identifier: Apache-2.0
"""S3-FIFO, step by step as the paper has it, and against its pseudo code on random use."""

from __future__ import annotations

import random
from collections import deque

from stratakv.tiers.policies.s3_fifo import S3FifoPolicy


def _anyone(_key: bytes) -> bool:
    return True


def test_keys_used_more_than_once_go_to_main_and_come_round_again() -> None:
    policy = S3FifoPolicy(20)  # small: 2, ghost: 18
    policy.insert([b"a", b"b", b"c"])
    policy.touch([b"a", b"b"])
    policy.touch([b"a"])
    # a was used twice and goes to main; b was used once, which is not enough.
    assert policy.victims(1, _anyone) == [b"b"]
    policy.remove([b"b"])
    policy.insert([b"b"])  # known as a ghost: main is now a (2 uses left), b
    policy.insert([b"d"])
    # Small is c d. Without c it is short, so main loses: a goes round, b goes, a goes round again.
    assert policy.victims(4, _anyone) == [b"c", b"b", b"a", b"d"]


def test_a_plan_does_not_bring_back_what_was_dropped() -> None:
    policy = S3FifoPolicy(20)
    policy.insert([b"a", b"b", b"c"])
    policy.touch([b"a", b"a"])
    assert policy.victims(1, _anyone) == [b"b"]
    policy.remove([b"a"])
    policy.remove([b"b"])
    assert len(policy) == 1
    assert policy.victims(9, _anyone) == [b"c"]


def test_what_may_not_go_keeps_its_place() -> None:
    policy = S3FifoPolicy(20)
    policy.insert([b"a", b"b", b"c", b"d"])
    policy.remove(policy.victims(2, lambda key: key not in (b"a", b"c")))
    assert policy.victims(2, _anyone) == [b"a", b"c"]


class _PaperS3Fifo:
    """The paper's pseudo code, with an eviction from a full main taken as the one asked for."""

    def __init__(self, size: int) -> None:
        self.small: deque[bytes] = deque()
        self.main: deque[bytes] = deque()
        self.ghost: deque[bytes] = deque(maxlen=size - size // 10)
        self.size = size
        self.uses: dict[bytes, int] = {}

    def use(self, key: bytes) -> None:
        if key in self.uses:
            self.uses[key] = min(3, self.uses[key] + 1)
            return
        while len(self.uses) >= self.size:
            if len(self.small) >= self.size // 10:
                self.evict_small()
            else:
                self.evict_main()
        if key in self.ghost:
            self.ghost.remove(key)
            self.main.append(key)
        else:
            self.small.append(key)
        self.uses[key] = 0

    def evict_small(self) -> None:
        key = self.small.popleft()
        if self.uses[key] > 1:
            self.main.append(key)
        else:
            self.ghost.append(key)
            del self.uses[key]

    def evict_main(self) -> None:
        while self.uses[self.main[0]] > 0:
            self.uses[self.main[0]] -= 1
            self.main.rotate(-1)
        del self.uses[self.main.popleft()]


def test_random_use_agrees_with_the_pseudo_code(rng: random.Random) -> None:
    policy, paper = S3FifoPolicy(30), _PaperS3Fifo(30)
    for _ in range(5000):
        key = b"%d" % int(rng.expovariate(0.02))
        if key in paper.uses:
            policy.touch([key])
        else:
            policy.remove(policy.victims(len(policy) + 1 - 30, _anyone))
            policy.insert([key])
        paper.use(key)
        assert set(policy.victims(99, _anyone)) == set(paper.uses)
