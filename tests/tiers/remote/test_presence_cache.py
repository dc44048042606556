# SPDX-License-Identifier: Apache-2.0
"""What a client believes of a server, and for how long."""

from __future__ import annotations

from stratakv.tiers.base import Answer
from stratakv.tiers.contract import make_keys
from stratakv.tiers.remote.presence_cache import FRESH_SECONDS, HIT_SECONDS, PresenceCache

HIT, MISS, PENDING = Answer.HIT, Answer.MISS, Answer.PENDING
A, B, C = make_keys(3)


class Clock:
    now = 0.5  # soon after the machine was started

    def __call__(self) -> float:
        return self.now


def test_what_is_not_known_is_a_miss_until_it_is_asked() -> None:
    presence = PresenceCache()
    assert presence.answers([A, B]) == [MISS, MISS]
    assert presence.to_ask([A, B, A]) == [A, B]
    presence.asked([A])
    assert presence.answers([A, B]) == [PENDING, MISS]
    assert presence.to_ask([A, B]) == [B]
    presence.answered([A], [True])
    assert presence.answers([A]) == [HIT]


def test_a_question_without_an_answer_leaves_what_was_believed() -> None:
    presence = PresenceCache()
    presence.learn([A, B], [True, False])
    for _ in range(2):
        presence.asked([A, B, C])
    assert presence.answers([A, B, C]) == [HIT, PENDING, PENDING]
    presence.answered([A, B, C], None)
    assert presence.answers([A, B, C]) == [HIT, PENDING, PENDING]
    presence.answered([A, B, C], None)
    assert presence.answers([A, B, C]) == [HIT, MISS, MISS]


def test_beliefs_are_asked_about_again_before_they_end() -> None:
    clock = Clock()
    presence = PresenceCache(clock=clock)
    presence.learn([A, B], [True, False])
    assert presence.to_ask([A, B]) == []
    clock.now += FRESH_SECONDS * 1.1
    assert presence.to_ask([A, B]) == [A, B]
    assert presence.answers([A, B]) == [HIT, MISS]
    clock.now += HIT_SECONDS
    assert presence.answers([A, B]) == [MISS, MISS]


def test_what_was_forgotten_or_displaced_is_not_counted() -> None:
    presence = PresenceCache(most=3)
    keys = make_keys(6)
    presence.learn(keys[:3], [True, True, False])
    assert (len(presence), presence.hits) == (3, 2)
    assert presence.invalidate_keys(keys[:1] + keys[5:]) == 1
    presence.learn(keys[1:5], [True] * 4)
    assert (len(presence), presence.hits) == (3, 3)
    assert presence.answers(keys) == [MISS, MISS, HIT, HIT, HIT, MISS]
    presence.clear()
    assert (len(presence), presence.hits) == (0, 0)
