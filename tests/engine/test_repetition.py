# SPDX-License-Identifier: Apache-2.0
"""When an answer counts as one that repeats itself."""

from __future__ import annotations

import random

import pytest

from stratakv.engine.repetition import repeats
from stratakv.engine.sampling_params import RepetitionDetection, SamplingParams


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
