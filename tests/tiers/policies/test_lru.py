# SPDX-License-Identifier: Apache-2.0
"""LRU against a list that is kept in order the slow way."""

from __future__ import annotations

import random

from stratakv.tiers.policies.lru import LruPolicy


def _anyone(_key: bytes) -> bool:
    return True


def test_victims_are_the_longest_unused_and_stay() -> None:
    policy = LruPolicy()
    policy.insert([b"a", b"b", b"c"])
    policy.touch([b"a"])
    assert policy.victims(2, _anyone) == [b"b", b"c"]
    assert policy.victims(2, _anyone) == [b"b", b"c"]
    assert len(policy) == 3


def test_victims_leave_out_what_may_not_go() -> None:
    policy = LruPolicy()
    policy.insert([b"a", b"b", b"c"])
    assert policy.victims(2, lambda key: key != b"a") == [b"b", b"c"]
    assert policy.victims(3, lambda key: key == b"b") == [b"b"]
    assert policy.victims(0, _anyone) == policy.victims(-1, _anyone) == []


def test_removing_the_unknown_is_no_error() -> None:
    policy = LruPolicy()
    policy.insert([b"a"])
    policy.remove([b"b", b"a", b"a"])
    assert len(policy) == 0
    assert policy.victims(1, _anyone) == []


def test_random_use_agrees_with_a_list(rng: random.Random) -> None:
    policy, model = LruPolicy(), list[bytes]()
    names = [bytes([i]) for i in range(20)]
    for _ in range(3000):
        key = rng.choice(names)
        known = key in model
        if known:
            model.remove(key)
        if rng.random() < 0.3:
            policy.remove([key])
        else:
            (policy.touch if known else policy.insert)([key])
            model.append(key)
        count = rng.randrange(5)
        even = rng.random() < 0.5
        allowed = (lambda k: k[0] % 2 == 0) if even else _anyone
        assert policy.victims(count, allowed) == [k for k in model if allowed(k)][:count]
        assert len(policy) == len(model)
