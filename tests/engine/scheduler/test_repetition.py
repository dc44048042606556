# SPDX-License-Identifier: Apache-2.0
"""An answer that repeats itself ends with a status of its own, at the token that shows it."""

from __future__ import annotations

import pytest

from stratakv.engine.scheduler.output import ModelRunnerOutput, repeats

from .conftest import Engine, MakeEngine

LOOP = [7, 8, 9]


def run_with(engine: Engine, said: list[int]) -> list[int]:
    """A worker that says this, whatever it is asked."""
    tokens = iter(said)
    while engine.scheduler.requests:
        output = engine.scheduler.schedule()
        engine.follow(output)
        sampled = {name: [next(tokens)] for name in output.num_scheduled_tokens}
        engine.take(engine.scheduler.update_from_output(output, ModelRunnerOutput(sampled)))
    return engine.said("a")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_detection": {"max_pattern_size": 3, "min_count": 3}}, [1, 2, *LOOP * 3]),
        ({"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}, None),
        ({"repetition_detection": {"max_pattern_size": 9, "min_pattern_size": 4}}, None),
        ({}, None),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}, "min_tokens": 13},
            [1, 2, *LOOP * 4][:13],
        ),
    ],
)
def test_the_end(make_engine: MakeEngine, options: dict, expected: list[int] | None) -> None:
    engine = make_engine()
    said = [1, 2, *LOOP * 4, 3, 4, 5, 6]
    engine.add("a", [1, 2, 3], max_tokens=len(said), ignore_eos=True, **options)
    assert run_with(engine, said) == (said if expected is None else expected)
    assert engine.finish_reason("a") == ("length" if expected is None else "repetition")
    assert engine.scheduler.counts["ended_repetition"] == (expected is not None)
    if expected:
        detection = options["repetition_detection"]
        assert repeats(expected, 1, detection["max_pattern_size"], detection.get("min_count", 4))
