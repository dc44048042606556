# SPDX-License-Identifier: Apache-2.0
"""A step trace of random lives, read again, says of each request what the engine knows of it."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from stratakv.connector.base import NullConnector
from stratakv.engine.config.engine_config import SchedulerConfig
from stratakv.engine.observer import Decision, Obstacle, StepMade
from stratakv.engine.request.request import Request
from stratakv.engine.trace.explain import explain
from stratakv.engine.trace.records import DecisionRecord, SnapshotRecord, read_records
from stratakv.engine.trace.step_trace import StepTrace
from stratakv.engine.trace.stories import State, Story, stories_of

from .conftest import Engine, MakeEngine
from .dict_tiers import DictTiers

LIVES = 200
NUM_BLOCKS = 20
LIMITS = {"max_num_batched_tokens": 16, "max_num_seqs": 3}


class CheckedTrace(StepTrace):
    """Compares each reason with the engine as it is when it is told."""

    engine: Engine
    made: list[StepMade]
    reasons: ClassVar[Counter[str]] = Counter()

    def step(self, made: StepMade) -> None:
        super().step(made)
        self.made.append(made)

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        super().decision(request, decision, cause)
        scheduler = self.engine.scheduler
        self.reasons[f"{decision.value} {cause}" if decision is Decision.WAITS else ""] += 1
        if decision is Decision.WAITS:
            assert request not in scheduler._states.running
            if cause == Obstacle.SEATS.value:
                assert scheduler.num_running == LIMITS["max_num_seqs"]
            elif cause == Obstacle.ROOM.value:
                most = scheduler.manager.pool.num_free * scheduler.manager.block_size
                assert request.num_tokens - request.num_computed_tokens > most - 2 * 4
            elif cause == Obstacle.PRESSURE.value:
                pool = scheduler.manager.pool
                assert pool.usage >= scheduler.config.admit_below - 1e-9
        elif decision is Decision.PREEMPTED and cause:
            assert cause in scheduler.requests


def live(make_engine: MakeEngine, trace: CheckedTrace, rng: random.Random) -> Engine:
    """Some requests, shared prefixes and aborts among them, until all have ended."""
    engine = make_engine(
        NUM_BLOCKS,
        tiers=DictTiers(rng) if rng.random() < 0.5 else None,
        observer=trace,
        admit_below=rng.choice([0.7, 0.9]),
        preempt_above=rng.choice([0.9, 1.0]),
        **LIMITS,
    )
    trace.engine = engine
    trace.made = []
    for number in range(rng.randrange(3, 8)):
        stem = [1 + rng.randrange(2)] * rng.randrange(0, 17)
        tokens = stem + rng.choices(range(1, 50), k=rng.randrange(1, 24))
        engine.add(f"r{number}", tokens, max_tokens=rng.randrange(1, 12), ignore_eos=True)
        for _ in range(rng.randrange(4)):
            if engine.scheduler.has_runnable_work():
                engine.step()
            elif engine.tiers:
                engine.tiers.tick()
        if rng.random() < 0.1 and engine.scheduler.requests:
            name = rng.choice(list(engine.scheduler.requests))
            engine.take(engine.scheduler.finish_requests([name]))
    engine.run_all()
    return engine


def test_the_stories_of_200_lives_are_the_engines_own(
    make_engine: MakeEngine, tmp_path: Path
) -> None:
    config = SchedulerConfig(**LIMITS)
    CheckedTrace.reasons = Counter()
    told: Counter[str] = Counter()
    for number in range(LIVES):
        path = tmp_path / f"{number}.jsonl"
        trace = CheckedTrace(
            path, config, NullConnector(), model="m", block_size=4, num_blocks=NUM_BLOCKS - 1
        )
        engine = live(make_engine, trace, random.Random(number))
        trace.close()
        told.update(check(path, engine, trace.made))
    # Every kind of reason that these lives can have was met.
    met = {reason for reason, count in CheckedTrace.reasons.items() if count and reason}
    assert met >= {
        f"waits {obstacle.value}"
        for obstacle in (Obstacle.SEATS, Obstacle.BUDGET, Obstacle.ROOM, Obstacle.PRESSURE)
    }
    assert min(told["preempted"], told["loaded"], told["behind"], told["went on"]) > 0


def check(path: Path, engine: Engine, made: list[StepMade]) -> Counter[str]:
    """Compare the trace of a life with what its engine counted and answered."""
    records = list(read_records(path))
    stories = list(stories_of(records))
    counts = engine.scheduler.counts
    snapshots = [record for record in records if isinstance(record, SnapshotRecord)]
    decisions = [record for record in records if isinstance(record, DecisionRecord)]
    assert [record.step for record in snapshots] == [record.step for record in decisions]
    assert len(decisions) == counts["steps"]
    assert sum(record.total_scheduled_tokens for record in decisions) == counts["scheduled_tokens"]
    # Steps that go on with the same requests are encoded once, and must not be another's.
    assert [record.num_scheduled_tokens for record in decisions] == [m.num_tokens for m in made]
    went_on = 0
    for before, record in pairwise(decisions):
        ids = before.num_scheduled_tokens.keys()
        went_on += len(ids) > 1 and ids == set(record.scheduled_running_ids)
    for record in decisions:
        ids = {*record.scheduled_new_ids, *record.scheduled_resumed_ids}
        assert ids.isdisjoint(record.scheduled_running_ids)
        assert ids.union(record.scheduled_running_ids) == record.num_scheduled_tokens.keys()
    assert {story.request_id for story in stories} == engine.outputs.keys()
    found: Counter[str] = Counter()
    for story in stories:
        check_story(story, engine)
        found.update(story.tokens_found())
    for place, tokens in found.items():
        assert tokens == counts[f"reused_tokens_{place}"]
    assert sum(story.num_preemptions for story in stories) == counts["preemptions"]
    return Counter(
        preempted=counts["preemptions"],
        loaded=sum(story.seconds_in(State.LOADING) > 0 for story in stories),
        behind=sum(any(behind for _, behind in story.waits()) for story in stories),
        **{"went on": went_on},
    )


def check_story(story: Story, engine: Engine) -> None:
    last = engine.outputs[story.request_id][-1]
    assert story.last is not None
    assert story.last.cause == last.finish_reason
    assert story.num_preemptions == last.timings["num_preemptions"]
    assert story.last.num_tokens - story.num_prompt_tokens == len(engine.said(story.request_id))
    # At every moment of its life it was in one state.
    moments = [story.queued, *(span.ended for span in story.spans)]
    assert [span.began for span in story.spans] == moments[:-1]
    assert moments[-1] == story.last.time
    whole = sum(story.waits().values()) + sum(
        story.seconds_in(state) for state in (State.LOADING, State.RUNNING)
    )
    assert whole == pytest.approx(story.last.time - story.queued, abs=1e-6)
    text = "\n".join(explain(story))
    assert text.count("It was preempted in step") == story.num_preemptions
    assert f"It computed {story.num_computed_tokens} tokens" in text
