# SPDX-License-Identifier: Apache-2.0
"""Requests whose blocks a tier had and did not bring: they compute, or end if that is wished."""

from __future__ import annotations

from typing import Any

import pytest

from .test_overlapped_loads import PROMPT, keep, prompt

Make = Any


@pytest.fixture
def tiers(make_tiers: Any) -> Any:
    return make_tiers()


@pytest.mark.parametrize("came", [0, 3])
def test_a_request_whose_load_failed_ends_with_the_reason_and_alone(
    make_engine: Make, tiers: Any, say: Any, came: int
) -> None:
    engine = make_engine(tiers=tiers, fails_with_load=True)
    keep(engine, prompt(PROMPT))
    tiers.outcome = lambda load: came
    engine.add("fails", prompt(PROMPT))
    engine.add("other", prompt(20, seed=9))
    engine.run_all()
    (last,) = engine.outputs["fails"]
    assert last.finish_reason == "error"
    assert "could not be loaded: lost" in last.error
    assert "--kv-offload-load-failure" in last.error
    assert last.timings["total_seconds"] >= 0
    assert engine.said("other") == say(prompt(20, seed=9), 5)
    assert engine.manager.pool.is_idle
    # It is no reason to distrust what had come, nor the request when it is asked again.
    tiers.outcome = lambda load: len(load.keys)
    engine.add("again", prompt(PROMPT))
    engine.run_all()
    assert engine.said("again") == say(prompt(PROMPT), 5)


def test_it_computes_instead_unless_told_otherwise(make_engine: Make, tiers: Any, say: Any) -> None:
    engine = make_engine(tiers=tiers)
    keep(engine, prompt(PROMPT))
    tiers.outcome = lambda load: 3
    engine.add("r", prompt(PROMPT))
    engine.run_all()
    assert engine.said("r") == say(prompt(PROMPT), 5)


def test_a_request_that_runs_meanwhile_ends_too(make_engine: Make, tiers: Any, say: Any) -> None:
    """What is not loaded from the back would be computed by the front."""
    tiers.from_back, tiers.load_ticks = True, 1
    engine = make_engine(tiers=tiers, fails_with_load=True)
    keep(engine, prompt(PROMPT))
    tiers.piece_fails = lambda copy: copy.start == 8
    engine.add("fails", prompt(PROMPT))
    engine.add("other", prompt(20, seed=9))
    engine.run_all()
    assert engine.finish_reason("fails") == "error"
    assert "could not be loaded: torn" in engine.outputs["fails"][-1].error
    assert engine.said("other") == say(prompt(20, seed=9), 5)
    assert engine.manager.pool.is_idle


def test_a_request_that_comes_back_from_a_preemption_keeps_what_it_said(
    make_engine: Make, tiers: Any, say: Any
) -> None:
    engine = make_engine(num_blocks=16, tiers=tiers, fails_with_load=True)
    tiers.outcome = lambda load: 0
    texts = {name: prompt(24, seed) for seed, name in enumerate(("a", "b", "c"))}
    for name, text in texts.items():
        engine.add(name, text, max_tokens=20, ignore_eos=True)
    engine.run_all()
    assert engine.scheduler.counts["preemptions"]
    ends = {name: engine.finish_reason(name) for name in texts}
    assert set(ends.values()) == {"length", "error"}
    for name, text in texts.items():
        whole = say(text, 20, ignore_eos=True)
        assert engine.said(name) == whole[: len(engine.said(name))]
        assert (ends[name] == "length") == (engine.said(name) == whole)
