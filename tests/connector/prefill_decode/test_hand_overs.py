# SPDX-License-Identifier: Apache-2.0
"""What a hand-over says is missing where the shared store does not answer in time."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.connector.prefill_decode import hand_overs as handover
from stratakv.connector.prefill_decode.hand_overs import MOST_SECONDS, HandOvers
from stratakv.tiers.base import Answer

KEYS = [b"a", b"b", b"c"]
SHARD = b"!"


@pytest.mark.parametrize("num_there", range(len(KEYS) + 1))
def test_a_lease_without_an_answer_promises_no_more_than_is_known(
    num_there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [Answer.HIT] * num_there + [Answer.MISS] * (len(KEYS) - num_there)
    leased: list[Callable[[list[bool]], None]] = []
    hierarchy: Any = SimpleNamespace(
        shared_version=(0, 0),
        shared=lambda _keys, **_options: answers,
        lease=lambda _keys, _seconds, done: leased.append(done),  # nobody answers
    )
    alarm: Any = SimpleNamespace(at=lambda _moment: None)
    now = 1000.0
    monkeypatch.setattr(handover, "time", SimpleNamespace(monotonic=lambda: now))
    parts = SimpleNamespace(shards=(SHARD,))
    connector: Any = SimpleNamespace(hierarchy=hierarchy, parts=parts, alarm=alarm)
    hand_overs = HandOvers(connector)
    hand_overs.hand_over("p", KEYS)
    hand_overs.poll_hand_overs()
    assert not hand_overs.ended
    now += MOST_SECONDS
    hand_overs.poll_hand_overs()
    assert hand_overs.take_handed_over() == [("p", KEYS[num_there:])]
    assert not hand_overs.moving
    [answer] = leased
    answer([True] * len(KEYS))  # after all, when nobody waits for it
    assert not hand_overs.ended


def test_a_name_that_is_used_again_has_one_hand_over() -> None:
    leased: list[Callable[[list[bool]], None]] = []
    hierarchy: Any = SimpleNamespace(
        shared_version=(0, 0),
        shared=lambda keys, **_options: [Answer.HIT] * len(keys),
        lease=lambda _keys, _seconds, done: leased.append(done),
    )
    alarm: Any = SimpleNamespace(at=lambda _moment: None)
    parts = SimpleNamespace(shards=(SHARD,))
    connector: Any = SimpleNamespace(hierarchy=hierarchy, parts=parts, alarm=alarm)
    hand_overs = HandOvers(connector)
    hand_overs.hand_over("p", KEYS)
    hand_overs.hand_over("p", KEYS)
    assert len(hand_overs.moving) == 1
    first, second = leased
    first([True] * len(KEYS))  # what the first one asked for says nothing of the second
    assert not hand_overs.ended
    second([True] * len(KEYS))
    assert hand_overs.take_handed_over() == [("p", [])]
