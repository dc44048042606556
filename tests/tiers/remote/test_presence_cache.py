# SPDX-License-Identifier: Apache-2.0
"""What a client believes of a server, and for how long."""

from __future__ import annotations

from stratakv.tiers.base import Answer
from stratakv.tiers.contract import make_keys
from stratakv.tiers.remote.presence_cache import FRESH_SECONDS, HIT_SECONDS, Beliefs

HIT, MISS, PENDING = Answer.HIT, Answer.MISS, Answer.PENDING
A, B, C = make_keys(3)


class Clock:
    now = 0.5  # soon after the machine was started

    def __call__(self) -> float:
        return self.now


def test_what_is_not_known_is_a_miss_until_it_is_asked() -> None:
    beliefs = Beliefs()
    assert beliefs.answers([A, B]) == [MISS, MISS]
    assert beliefs.to_ask([A, B, A]) == [A, B]
    beliefs.asked([A])
    assert beliefs.answers([A, B]) == [PENDING, MISS]
    assert beliefs.to_ask([A, B]) == [B]
    beliefs.answered([A], [True])
    assert beliefs.answers([A]) == [HIT]


def test_a_question_without_an_answer_leaves_what_was_believed() -> None:
    beliefs = Beliefs()
    beliefs.learn([A, B], [True, False])
    for _ in range(2):
        beliefs.asked([A, B, C])
    assert beliefs.answers([A, B, C]) == [HIT, PENDING, PENDING]
    beliefs.answered([A, B, C], None)
    assert beliefs.answers([A, B, C]) == [HIT, PENDING, PENDING]
    beliefs.answered([A, B, C], None)
    assert beliefs.answers([A, B, C]) == [HIT, MISS, MISS]


def test_beliefs_are_asked_about_again_before_they_end() -> None:
    clock = Clock()
    beliefs = Beliefs(clock=clock)
    beliefs.learn([A, B], [True, False])
    assert beliefs.to_ask([A, B]) == []
    clock.now += FRESH_SECONDS * 1.1
    assert beliefs.to_ask([A, B]) == [A, B]
    assert beliefs.answers([A, B]) == [HIT, MISS]
    clock.now += HIT_SECONDS
    assert beliefs.answers([A, B]) == [MISS, MISS]


def test_what_was_forgotten_or_displaced_is_not_counted() -> None:
    beliefs = Beliefs(most=3)
    keys = make_keys(6)
    beliefs.learn(keys[:3], [True, True, False])
    assert (len(beliefs), beliefs.hits) == (3, 2)
    assert beliefs.forget(keys[:1] + keys[5:]) == 1
    beliefs.learn(keys[1:5], [True] * 4)
    assert (len(beliefs), beliefs.hits) == (3, 3)
    assert beliefs.answers(keys) == [MISS, MISS, HIT, HIT, HIT, MISS]
    beliefs.clear()
    assert (len(beliefs), beliefs.hits) == (0, 0)
