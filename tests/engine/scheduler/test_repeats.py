# SPDX-License-Identifier: Apache-2.0
"""When an answer counts as one that repeats itself."""

from __future__ import annotations

import random

import pytest

from stratakv.engine.request.sampling_params import RepetitionDetection, SamplingParams
from stratakv.engine.scheduler.output import repeats


def by_definition(tokens: list[int], low: int, high: int, count: int) -> bool:
    return any(
        tokens[-length:] * count == tokens[-length * count :]
        for length in range(low, high + 1)
        if length * count <= len(tokens)
    )


@pytest.mark.parametrize("seed", range(20))
def test_it_is_what_the_definition_says(seed: int) -> None:
    rng = random.Random(seed)
    found = 0
    for _ in range(2000):
        letters = rng.choice([1, 2, 3])
        tokens = rng.choices(range(letters), k=rng.randint(0, 14))
        tokens += rng.choices(range(letters), k=rng.randint(1, 4)) * rng.randint(0, 5)
        low = rng.randint(1, 4)
        asked = (low, rng.randint(low, 6), rng.randint(2, 5))
        assert repeats(tokens, *asked) == by_definition(tokens, *asked), (tokens, asked)
        found += repeats(tokens, *asked)
    assert 200 < found < 1900


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_pattern_size": 0}, "max_pattern_size must be between 1 and 256, got 0"),
        ({"max_pattern_size": 3, "min_pattern_size": 4}, "must be between 1 and 3, got 4"),
        ({"max_pattern_size": 3, "min_count": 1}, "min_count must be between 2 and 1024, got 1"),
        ({"max_pattern_size": 3, "times": 4}, "unknown field `times`"),
        ({"max_pattern_size": 2.5}, "Expected `int`"),
        ({}, "missing required field `max_pattern_size`"),
        ("often", "repetition_detection must be an object with max_pattern_size"),
    ],
)
def test_what_cannot_be_asked(given: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(repetition_detection=given)  # type: ignore[arg-type]


def test_a_map_is_as_good() -> None:
    params = SamplingParams(repetition_detection={"max_pattern_size": 9})  # type: ignore[arg-type]
    assert params.repetition_detection == RepetitionDetection(max_pattern_size=9)


@pytest.mark.parametrize(
    ("text", "asked", "expected"),
    [
        ([], (1, 4, 2), False),
        ([7], (1, 4, 2), False),
        ([7, 7], (1, 4, 2), True),
        ([7, 7], (2, 4, 2), False),
        ([7] * 4, (2, 2, 2), True),  # a pattern may itself repeat
        ([1, 2, 1, 2, 1], (2, 2, 2), True),  # wherever it is cut
        ([1, 2, 1, 2, 3], (1, 4, 2), False),  # over
        ([1, 2, 3] * 3, (1, 2, 3), False),  # too long a pattern
        ([1, 2, 3] * 3, (4, 9, 2), False),  # too short a one
        ([1, 2, 3] * 3, (1, 3, 4), False),  # too seldom
    ],
)
def test_edges(text, asked, expected):
    assert repeats(text, *asked) is expected
    assert repeats(tuple(text), *asked) is expected
    assert by_definition(text, *asked) is expected


class Watched(list[int]):
    """Counts the tokens that are read."""

    read = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        if isinstance(place, slice):
            copy = Watched(found)
            Watched.read += len(found)
            return copy
        Watched.read += 1
        return found


@pytest.mark.parametrize("text", [[5] * 5000, [5] * 4000 + [6] + [5] * 1000, [1, 2] * 2500])
def test_the_worst_case_is_bounded(text):
    """However much the text agrees with itself, and however long it is."""
    Watched.read = 0
    repeats(Watched(text), 100, 200, 6)
    assert 0 < Watched.read < 6 * 200 * 6


def test_a_new_token_is_seen_at_once():
    Watched.read = 0
    assert not repeats(Watched([*range(5000)]), 1, 64, 4)
    assert Watched.read < 64 + 8


@pytest.mark.parametrize("asked", [(0, 4, 2), (3, 2, 2), (1, 4, 1), (-1, -1, 2)])
def test_what_is_no_repetition_is_refused(asked):
    with pytest.raises(ValueError, match="at least twice"):
        repeats([1, 1, 1, 1], *asked)
