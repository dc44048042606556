# SPDX-License-Identifier: Apache-2.0
"""An observer that writes everything down knows at any moment what the engine knows."""

from __future__ import annotations

import logging
import random

import pytest

from stratakv.engine.observer import Decision, Observer
from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams

from ...recorder import Recorder
from .conftest import HASHER, MakeEngine, reference
from .dict_tiers import DictTiers


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


@pytest.mark.parametrize("seed", range(12))
def test_it_knows_what_the_engine_knows(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    recorder = Recorder()
    engine = make_engine(
        24,
        tiers=DictTiers(rng) if seed % 2 else None,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        observer=recorder,
    )
    asked = {}
    for number in range(150):
        luck = rng.random()
        if luck < 0.25:
            stem = prompt(16, rng.randrange(3))[: rng.randrange(1, 17)]
            name = f"r{number}"
            asked[name] = stem + prompt(rng.randrange(1, 9), number)
            engine.add(name, asked[name], max_tokens=8, ignore_eos=True)
        elif luck < 0.28 and engine.scheduler.requests:
            engine.scheduler.finish_requests([rng.choice(list(engine.scheduler.requests))])
        elif luck < 0.3:
            engine.scheduler.reset_prefix_cache(False)
        elif luck < 0.32 and engine.scheduler.has_runnable_work():
            output = engine.scheduler.schedule()
            if output.num_scheduled_tokens:
                engine.follow(output)
                engine._store()
                engine._store_ahead()
                engine.has_failed = True
                engine.take(engine.scheduler.fail_step(output, "it failed"))
        elif engine.scheduler.has_runnable_work():
            engine.step()
        elif engine.tiers:
            engine.tiers.tick()
        recorder.check_keys(engine.scheduler)
    engine.run_all()
    recorder.check_keys(engine.scheduler)
    recorder.check_all_ended(engine.scheduler)
    assert len(recorder.stories) == len(asked)
    # What a name stands for is told with it.
    for key, tokens in recorder.cached.items():
        request = Request("x", tokens, SamplingParams(), block_hasher=HASHER)
        assert request.block_hashes[-1] == key[:32]


def test_an_observer_that_fails_costs_nothing(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Observer):
        def named(self, *_: object) -> None:
            raise KeyError("of its own")

    engine = make_engine(observer=Broken())
    engine.add("a", prompt(20))
    with caplog.at_level(logging.ERROR):
        engine.run_all()
    assert engine.said("a") == reference(prompt(20), 5)
    assert caplog.text.count("hears nothing more") == 1


def test_keys_are_told_only_where_somebody_hears_them(make_engine: MakeEngine) -> None:
    """A block is cached in every sixteenth decode, and a trace has no use for it."""

    class Ends(Observer):
        def __init__(self) -> None:
            self.ended: list[str] = []

        def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
            if decision is Decision.FINISHED:
                self.ended.append(request.request_id)

    ends = Ends()
    engine = make_engine(observer=ends)
    engine.add("a", prompt(20))
    engine.run_all()
    assert ends.ended == ["a"]
    assert engine.manager.pool.observer is None
    assert make_engine(observer=Recorder()).manager.pool.observer is not None
