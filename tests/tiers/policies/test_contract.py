# SPDX-License-Identifier: Apache-2.0
"""What every eviction policy promises, held against an owner that behaves in every way it may."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.policies.adaptive import MIN_GONE, AdaptivePolicy
from stratakv.tiers.policies.base import EvictionPolicy
from stratakv.tiers.policies.known_policies import DEFAULT_POLICY, POLICIES, policy_factory

CAPACITY = 12


def block(session: int, depth: int) -> bytes:
    """Sessions share their first two blocks in pairs, as with a system prompt."""
    return b"%d/%d" % (session // 2 if depth < 2 else 100 + session, depth)


def chain_of(session: int, length: int) -> list[bytes]:
    return [block(session, depth) for depth in range(length)]


PARENTS = {
    key: parent
    for session in range(6)
    for parent, key in zip(chain_of(session, 9), chain_of(session, 10)[1:], strict=True)
}
KEYS = sorted({*PARENTS, *PARENTS.values()})


def trusting() -> EvictionPolicy:
    """The adaptive policy as it is once it has learned: never LRU, and always learning."""
    policy = AdaptivePolicy(CAPACITY)
    policy._trial.is_trusted = True
    policy._history._learn_at = 1
    return policy


MAKERS: dict[str, Callable[[], EvictionPolicy]] = {
    name: partial(make, CAPACITY) for name, make in POLICIES.items()
}
MAKERS["adaptive, trusted"] = trusting
# Those that let no block go while blocks behind it are held, where prompts are announced.
TAILS_FIRST = {"adaptive", "adaptive, trusted"}


class Owner(RuleBasedStateMachine):
    """A tier of `CAPACITY` blocks in front of one policy."""

    name: str

    def __init__(self) -> None:
        super().__init__()
        self.policy: EvictionPolicy = MAKERS[self.name]()
        self.held: set[bytes] = set()
        self.now = 0.0

    @rule(
        session=st.integers(0, 5),
        length=st.integers(1, 10),
        seconds=st.sampled_from([0.0, 1.0, 30.0, 4000.0]),
        optional=st.booleans(),
    )
    def prompt(self, session: int, length: int, seconds: float, optional: bool) -> None:
        chain = chain_of(session, length)
        self.now += seconds
        self.policy.observe(chain, self.now)
        new = [key for key in chain if key not in self.held]
        excess = len(new) + len(self.held) - CAPACITY

        def may_evict(key: bytes) -> bool:
            return key not in chain

        if optional:
            victims = self.policy.displaced_by(new, excess, may_evict)
            assert victims == self.policy.victims(excess, may_evict)[: len(victims)]
        else:
            victims = self.policy.victims(excess, may_evict)
        self.evict(victims)
        kept = new[: CAPACITY - len(self.held)]
        self.policy.insert(reversed(kept))
        self.policy.touch([key for key in reversed(chain) if key in self.held])
        self.held.update(kept)

    @rule(key=st.binary(min_size=3, max_size=3))
    def unannounced(self, key: bytes) -> None:
        """A block that no prompt told of, as after a restart."""
        if key not in self.held and len(self.held) < CAPACITY:
            self.policy.insert([key])
            self.policy.touch([key])
            self.held.add(key)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=4))
    def drop(self, keys: list[bytes]) -> None:
        """Any keys, known or not, more than once."""
        self.policy.remove(keys)
        self.held.difference_update(keys)

    @rule(count=st.integers(0, 6), take=st.integers(0, 6))
    def evict_some(self, count: int, take: int) -> None:
        """The owner may take a part of what it was told."""
        self.evict(self.policy.victims(count, lambda _key: True)[:take])

    @rule(count=st.integers(-1, 15), pinned=st.sets(st.sampled_from(KEYS), max_size=20))
    def ask(self, count: int, pinned: set[bytes]) -> None:
        allowed = self.held - pinned
        victims = self.policy.victims(count, lambda key: key not in pinned)
        assert len(victims) == len(set(victims)) == min(max(0, count), len(allowed))
        assert allowed.issuperset(victims)
        assert victims == self.policy.victims(count, lambda key: key not in pinned), "no change"

    @invariant()
    def knows_what_is_held(self) -> None:
        assert len(self.policy) == len(self.held)
        assert set(self.policy.victims(len(self.held) + 1, lambda _key: True)) == self.held

    @invariant()
    def tails_go_before_heads(self) -> None:
        left = set(self.held) if self.name in TAILS_FIRST else set()
        for key in self.policy.victims(len(left), lambda _key: True):
            left.remove(key)
            assert not any(PARENTS.get(other) == key for other in left), key

    def evict(self, victims: list[bytes]) -> None:
        for key in victims:
            self.held.remove(key)
        self.policy.remove(victims)


@pytest.mark.parametrize("name", MAKERS)
def test_every_owner_is_served_as_promised(name: str) -> None:
    machine = type(f"Owner of {name}", (Owner,), {"name": name})
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=30))


@pytest.mark.parametrize("name", POLICIES)
def test_keys_given_together_are_ordered_as_given(name: str) -> None:
    policy = POLICIES[name](100)
    keys = [b"%d" % i for i in range(20)]
    policy.insert(keys)
    assert policy.victims(20, lambda _key: True) == keys
    assert policy.victims(2, lambda key: key != keys[0]) == keys[1:3]


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_bounded(name: str) -> None:
    """A policy still refers to no more keys than it says after many came and went."""
    policy = POLICIES[name](CAPACITY)
    chains = [[b"%d/%d" % (i, j) for j in range(8)] for i in range(4000)]
    before = [sys.getrefcount(key) for chain in chains for key in chain]
    held: list[bytes] = []
    for i, chain in enumerate(chains):
        policy.observe(chain, float(i))
        victims = policy.victims(len(held) + 8 - CAPACITY, lambda _key: True)
        policy.remove(victims)
        held = [key for key in held if key not in victims] + chain
        policy.insert(reversed(chain))
    del held, victims, chain
    after = [sys.getrefcount(key) for chain in chains for key in chain]
    known = sum(new > old for old, new in zip(before, after, strict=True))
    limit = 4 * CAPACITY + MIN_GONE if name == "adaptive" else 2 * CAPACITY
    assert CAPACITY - 8 <= known <= limit


def test_policies_have_names() -> None:
    assert policy_factory(DEFAULT_POLICY) is POLICIES["adaptive"]
    assert set(POLICIES) == {"lru", "arc", "s3-fifo", "adaptive"}
    with pytest.raises(TierConfigError, match="no eviction policy 'fifo'; there are: lru, arc"):
        policy_factory("fifo")
