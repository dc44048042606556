# SPDX-License-Identifier: Apache-2.0
"""The trial: a policy that serves less than LRU is set aside, and gets another chance."""

from __future__ import annotations

from stratakv.tiers.policies.adaptive import SUSPEND, WARM_UP, Trial
from stratakv.tiers.policies.lru import LruPolicy

CHAIN = [b"a", b"b", b"c"]


def _warm(trial: Trial) -> None:
    for _ in range(WARM_UP):
        assert not trial.is_trusted
        trial.compare_prompt(CHAIN, 3)
    assert trial.is_trusted


def test_it_is_trusted_after_the_warm_up_and_while_it_serves_as_much() -> None:
    trial = Trial(10)
    _warm(trial)
    for _ in range(2000):
        trial.compare_prompt(CHAIN, 3)
        assert trial.is_trusted


def test_one_bad_prompt_is_chance_and_many_are_not() -> None:
    trial = Trial(10)
    _warm(trial)
    trial.compare_prompt(CHAIN, 0)
    assert trial.is_trusted
    prompts = 0
    while trial.is_trusted:
        trial.compare_prompt(CHAIN, 0)
        prompts += 1
    assert prompts < 10


def test_each_time_it_is_set_aside_for_twice_as_long() -> None:
    trial = Trial(10)
    _warm(trial)
    for times in (1, 2, 4):
        while trial.is_trusted:
            trial.compare_prompt(CHAIN, 0)
        aside = 0
        while not trial.is_trusted:
            trial.compare_prompt(CHAIN, 0)
            aside += 1
        assert aside == times * SUSPEND


def test_its_lru_is_lru() -> None:
    trial, lru, held = Trial(5), LruPolicy(), set[bytes]()
    for i in range(400):
        chain = [b"%d/%d" % (i * i % 7, depth) for depth in range(1 + i % 4)]
        hits = next((n for n, key in enumerate(chain) if key not in held), len(chain))
        assert trial._replay(chain) == hits
        new = [key for key in chain if key not in held]
        lru.insert(new)
        lru.touch(reversed(chain))
        held.update(new)
        gone = lru.victims(len(held) - 5, lambda _key: True)
        lru.remove(gone)
        held.difference_update(gone)
