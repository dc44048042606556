# SPDX-License-Identifier: Apache-2.0
"""The adaptive policy: LRU until it knows better, then what it has learned."""

from __future__ import annotations

import random

import pytest

from stratakv.tiers.errors import TierConfigError
from stratakv.tiers.policies.adaptive import AdaptivePolicy
from stratakv.tiers.policies.base import EvictionPolicy
from stratakv.tiers.policies.lru import LruPolicy
from stratakv.tiers.policies.miss_cost import MissCost


def _anyone(_key: bytes) -> bool:
    return True


def chain_of(name: str, length: int) -> list[bytes]:
    return [f"{name}/{depth}".encode() for depth in range(length)]


class Tier:
    """Serves prompts from `capacity` blocks and counts the hits."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self.policy = policy
        self.capacity = capacity
        self.held: set[bytes] = set()
        self.hits = 0

    def prompt(self, chain: list[bytes], now: float) -> None:
        self.policy.observe(chain, now)
        hits = 0
        while hits < len(chain) and chain[hits] in self.held:
            hits += 1
        self.hits += hits
        new = [key for key in chain[hits:] if key not in self.held]
        excess = len(new) + len(self.held) - self.capacity
        victims = self.policy.displaced_by(new, excess, lambda key: key not in chain)
        self.policy.remove(victims)
        self.held.difference_update(victims)
        kept = new[: self.capacity - len(self.held)]
        self.policy.insert(reversed(kept))
        self.policy.touch(reversed(chain[:hits]))
        self.held.update(kept)


def chats_and_questions(tier: Tier, seconds: int, rng: random.Random) -> None:
    """Eight chats that go on every 16 seconds or so, and one question a second that nobody asks
    again."""
    lengths = [4] * 8
    for now in range(seconds):
        tier.prompt(chain_of(f"question {now}", 6), now)
        chat = rng.randrange(16)
        if chat < 8:
            lengths[chat] += 1
            if lengths[chat] > 20:
                lengths[chat] = 4
            tier.prompt(chain_of(f"chat {chat} {now // 400}", lengths[chat]), now + 0.5)


def test_it_keeps_what_goes_on_and_lets_the_rest_pass(seed: int) -> None:
    adaptive, lru = Tier(AdaptivePolicy(100), 100), Tier(LruPolicy(), 100)
    for tier in (adaptive, lru):
        chats_and_questions(tier, 2000, random.Random(seed))
    assert adaptive.hits > 1.3 * lru.hits


def test_what_comes_in_may_be_worth_less_than_what_is_there(rng: random.Random) -> None:
    policy = AdaptivePolicy(100)
    tier = Tier(policy, 100)
    chats_and_questions(tier, 2000, rng)
    question, chat = chain_of("a new question", 90), chain_of("chat 1 4", 22)
    tier.prompt(chat, 2001)
    policy.observe(question, 2002)
    kept = policy.displaced_by(question, 100, _anyone)
    assert len(kept) < 100, "what is worth more stays"
    assert not set(kept) & set(chat[:20])
    assert len(policy.victims(100, _anyone)) == 100, "unless room must be made"


def test_without_prompts_it_is_lru(rng: random.Random) -> None:
    policy, lru = AdaptivePolicy(1000), LruPolicy()
    held: list[bytes] = []
    for step in range(1500):
        new = [b"%d/%d" % (step, i) for i in range(rng.randrange(3))]
        used = rng.sample(held, min(len(held), rng.randrange(4)))
        gone = rng.sample(held, 1) if rng.random() < 0.2 and held else []
        for each in (policy, lru):
            each.insert(new)
            each.touch(used)
            each.remove(gone)
        held = [key for key in [*held, *new] if key not in gone]
        if step % 50 == 0:
            assert policy.victims(len(held), _anyone) == lru.victims(len(held), _anyone)


def test_what_was_there_before_the_first_prompt_is_as_old_as_that() -> None:
    """The clock of a host that has run for weeks says nothing of blocks that a disk brought."""
    policy = AdaptivePolicy(10)
    policy.insert([b"cold", b"warm"])
    policy.observe([b"new"], 3_000_000.0)
    assert policy._history.blocks[b"cold"].run.time == 3_000_000.0
    assert policy.victims(2, _anyone) == [b"cold", b"warm"]


def test_what_a_conversation_left_behind_goes_first(rng: random.Random) -> None:
    policy = AdaptivePolicy(200)
    tier = Tier(policy, 200)
    chats_and_questions(tier, 2000, rng)
    tier.prompt(chain_of("draft", 8), 2000)
    edited = [*chain_of("draft", 5), *chain_of("edited", 3)]
    tier.prompt(edited, 2010)
    tier.prompt(chain_of("chat 9", 8), 2011)
    assert tier.held.issuperset(edited)
    left_behind = tier.held.intersection(chain_of("draft", 8)[5:])
    order = policy.victims(200, _anyone)
    assert max(map(order.index, left_behind), default=-1) < min(map(order.index, edited))


def test_dear_blocks_outlive_cheap_ones() -> None:
    """Deep blocks take longer to compute; but none costs more than to load it from below."""

    def order(cost: MissCost) -> list[str]:
        policy = AdaptivePolicy(1000, cost)
        policy._trial.is_trusted = True
        head = chain_of("head", 400)
        for now, name in enumerate(("deep", "flat")):
            chain = [*head, *chain_of(name, 2)] if name == "deep" else chain_of(name, 2)
            policy.observe(chain, 0.1 * now)
            policy.insert(key for key in reversed(chain) if key not in head)
        policy._history.learn()
        return [key.decode() for key in policy.victims(4, _anyone)]

    dear = order(MissCost(0.01, 0.02))
    assert dear == ["flat/1", "flat/0", "deep/1", "deep/0"], "though it is newer"
    assert order(MissCost(0.01, 0.02, load_seconds=0.01))[:2] == ["deep/1", "deep/0"]


@pytest.mark.parametrize("length", [0, 1])
def test_odd_prompts_do_no_harm(length: int) -> None:
    policy = AdaptivePolicy(4)
    policy.observe([b"twice"] * 2, 5.0)
    policy.insert([b"twice"])
    policy.observe([b"twice"][:length], 4.0)  # a clock that runs backwards
    assert policy.victims(9, _anyone) == [b"twice"]
    assert policy.displaced_by([], 9, _anyone) == [b"twice"]


@pytest.mark.parametrize(
    "bad",
    [{"compute_seconds": 0.0}, {"load_seconds": -1.0}, {"compute_seconds_per_depth": float("nan")}],
)
def test_a_miss_that_costs_nothing_is_refused(bad: dict[str, float]) -> None:
    with pytest.raises(TierConfigError, match="a miss costs time"):
        MissCost(**bad)
