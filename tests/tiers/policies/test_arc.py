# SPDX-License-Identifier: Apache-2.0
"""ARC, step by step as the paper has it, with four keys."""

from __future__ import annotations

import random

from stratakv.tiers.policies.arc import ArcPolicy


def _anyone(_key: bytes) -> bool:
    return True


def _make_room(policy: ArcPolicy) -> bytes:
    (victim,) = policy.victims(1, _anyone)
    policy.remove([victim])
    return victim


def test_ghosts_move_the_target() -> None:
    policy = ArcPolicy(4)
    policy.insert([b"a", b"b", b"c", b"d"])
    policy.touch([b"a", b"b"])  # t1: c d   t2: a b
    assert policy.victims(4, _anyone) == [b"c", b"d", b"a", b"b"]
    assert _make_room(policy) == b"c"
    policy.insert([b"e"])
    assert _make_room(policy) == b"d"  # b1: c d
    policy.insert([b"c"])
    assert policy.target == 1, "c was evicted too early from t1"
    # t1: e   t2: a b c   b1: d. t1 has no more than the target, so t2 loses.
    assert _make_room(policy) == b"a"
    policy.insert([b"a"])
    assert policy.target == 0, "a was evicted too early from t2, and b2 is no shorter than b1"
    assert policy.victims(2, _anyone) == [b"e", b"b"]


def test_a_step_is_as_long_as_the_other_ghosts_outnumber_these() -> None:
    policy = ArcPolicy(8)
    policy.insert([b"%d" % i for i in range(8)])
    policy.touch([b"%d" % i for i in range(6)])
    policy.remove([b"6"])  # b1: 6
    policy.remove([b"0", b"1", b"2"])  # b2: 0 1 2
    policy.insert([b"6"])
    assert policy.target == 3


def test_one_list_helps_out_where_the_other_may_not_go() -> None:
    policy = ArcPolicy(4)
    policy.insert([b"a", b"b", b"c", b"d"])
    policy.touch([b"a", b"b"])
    assert policy.victims(3, lambda key: key not in (b"c", b"d")) == [b"a", b"b"]
    assert policy.victims(3, lambda key: key != b"a") == [b"c", b"d", b"b"]


def test_the_directory_stays_within_the_papers_bounds(rng: random.Random) -> None:
    policy, capacity = ArcPolicy(10), 10
    keys = [b"%d" % i for i in range(40)]
    held: set[bytes] = set()
    for _ in range(4000):
        key = keys[min(int(rng.expovariate(0.12)), 39)]
        if key in held:
            policy.touch([key])
        else:
            if len(held) == capacity:
                held.remove(_make_room(policy))
            policy.insert([key])
            held.add(key)
        t1, t2, b1, b2 = policy._t1, policy._t2, policy._b1, policy._b2
        assert len(t1) + len(t2) == len(held)
        assert len(t1) + len(b1) <= capacity
        assert len(t1) + len(t2) + len(b1) + len(b2) <= 2 * capacity
        assert 0 <= policy.target <= capacity
        assert len({*t1, *t2, *b1, *b2}) == len(t1) + len(t2) + len(b1) + len(b2)
