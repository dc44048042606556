# SPDX-License-Identifier: Apache-2.0
"""A check that an eviction policy keeps the contract in `base.py`.

Authors of policies, also outside this project, call `check_policy_contract` with their policy's
factory. The check uses the policy like a tier: it inserts, touches and removes keys and requests
victims in every allowed way. Every run does the same calls, in some tens of milliseconds. The check
does not judge whether an order of eviction is good."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

from ..contract import ContractBroken
from .base import EvictionPolicy

BLOCKS = 12  # the owner's capacity
_STEPS = 300


def check_policy_contract(make: Callable[[int], EvictionPolicy]) -> None:
    """Check every property on which the owner of a policy relies. `make` takes the number of blocks
    that the owner can hold, and returns a policy. Raises ContractBroken with expected and actual
    value."""
    _keeps_the_order_it_is_given(_made(make))
    owner = _Owner(_made(make))
    for _ in range(_STEPS):
        owner.run_random_action()


def _made(make: Callable[[int], EvictionPolicy]) -> EvictionPolicy:
    policy = make(BLOCKS)
    if not isinstance(policy, EvictionPolicy):
        raise ContractBroken(f"expected an EvictionPolicy, got {type(policy).__name__}")
    _expect("`learns` to be True or False", bool, type(policy.learns))
    _expect("no keys in a new policy", 0, len(policy))
    _expect("no victims of a new policy", [], policy.victims(3, lambda _key: True))
    return policy


def _keeps_the_order_it_is_given(policy: EvictionPolicy) -> None:
    keys = [b"%d" % i for i in range(BLOCKS)]
    policy.insert(iter(keys))
    _expect("keys given together as given", keys, policy.victims(BLOCKS, lambda _key: True))
    allowed = policy.victims(2, lambda key: key != keys[0])
    _expect("the coldest keys that may go", keys[1:3], allowed)


class _Owner:
    """A simulated tier of `BLOCKS` blocks: the policy under test, and the keys that it holds."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._held: set[bytes] = set()
        self._now = 0.0
        self._rng = random.Random(7)  # noqa: S311 - keys of no secrecy

    def run_random_action(self) -> None:
        """Run one random action of an owner, then check the number of keys held."""
        doing = (
            self._prompt,
            self._prompt,
            self._unannounced,
            self._remove_any_keys,
            self._evict,
            self._query_policy,
        )
        self._rng.choice(doing)()
        _expect("the number of keys held", len(self._held), len(self._policy))

    def _prompt(self) -> None:
        """Simulate a prompt of one of several conversations, some of which begin with the same
        blocks. Make room for the prompt's blocks with `displaced_by` or with `victims`."""
        session, rng = self._rng.randrange(6), self._rng
        chain = [self._key(session, depth) for depth in range(rng.randint(1, 10))]
        self._now += rng.choice((0.0, 1.0, 30.0, 4000.0))
        if rng.random() < 0.8:
            self._policy.observe(chain, self._now)
        new = [key for key in chain if key not in self._held]
        excess = len(new) + len(self._held) - BLOCKS
        if excess > 0 and rng.random() < 0.5:
            victims = self._policy.displaced_by(new, excess, lambda key: key not in chain)
            again = self._policy.displaced_by(new, excess, lambda key: key not in chain)
            _expect("the same answer, for nothing changed", victims, again)
            self._check_victims(victims, excess, self._held.difference(chain), exactly=False)
        else:
            victims = self._victims(excess, self._held.difference(chain))
        self._remove_victims(victims)
        kept = new[: BLOCKS - len(self._held)]
        self._policy.insert(reversed(kept))
        self._policy.touch([key for key in reversed(chain) if key in self._held])
        self._held.update(kept)

    def _unannounced(self) -> None:
        """Insert a block that no call of `observe` has reported, as happens after a restart."""
        key = b"%d!" % self._rng.randrange(20)
        if key not in self._held and len(self._held) < BLOCKS:
            self._policy.insert([key])
            self._policy.touch([key])
            self._held.add(key)

    def _remove_any_keys(self) -> None:
        known = sorted(self._held)[:2]
        self._policy.remove([*known, *known[:1], b"never seen"])
        self._held.difference_update(known)

    def _evict(self) -> None:
        self._remove_victims(
            self._victims(self._rng.randint(0, 6), self._held)[: self._rng.randint(0, 6)]
        )

    def _query_policy(self) -> None:
        pinned = {key for key in self._held if self._rng.random() < 0.5}
        self._victims(self._rng.randint(-1, BLOCKS + 3), self._held - pinned)
        victims = self._policy.victims(1, lambda _key: True)

        def is_next(keys: Iterable[bytes], count: int) -> bool:
            return self._policy.may_be_next(dict.fromkeys(keys).keys(), count)

        _expect("nothing to be among no victims", False, is_next(self._held, 0))
        _expect("what is not held not to be a victim", False, is_next([b"never seen"], BLOCKS))
        for key in sorted(self._held):
            _expect("all to be among all victims", True, is_next([b"?", key], len(self._held)))
        _expect("the coldest to be next", bool(victims), is_next(victims, len(self._held)))

    def _victims(self, count: int, allowed: set[bytes]) -> list[bytes]:
        victims = self._policy.victims(count, allowed.__contains__)
        again = self._policy.victims(count, allowed.__contains__)
        _expect("the same answer, for nothing changed", victims, again)
        self._check_victims(victims, count, allowed, exactly=True)
        return victims

    def _check_victims(
        self, victims: list[bytes], count: int, allowed: set[bytes], *, exactly: bool
    ) -> None:
        _expect("a list of victims", list, type(victims))
        _expect("each victim once", len(victims), len(set(victims)))
        _expect("only keys that are held and may go", set(), set(victims) - allowed)
        most = max(0, min(count, len(allowed)))
        if exactly:
            _expect(f"as many of {len(allowed)} keys that may go", most, len(victims))
        elif len(victims) > most:
            raise ContractBroken(f"expected at most {most} victims, got {len(victims)}")

    def _remove_victims(self, keys: list[bytes]) -> None:
        self._policy.remove(keys)
        self._held.difference_update(keys)

    def _key(self, session: int, depth: int) -> bytes:
        """Return the key of a session's block; pairs of sessions share their first two blocks."""
        return b"%d/%d" % (session // 2 if depth < 2 else 100 + session, depth)


def _expect(what: str, expected: object, got: object) -> None:
    if expected != got:
        raise ContractBroken(f"expected {what}: {expected!r}, got {got!r}")
