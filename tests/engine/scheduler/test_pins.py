# SPDX-License-Identifier: Apache-2.0
"""Pins of agents' turns: when they are made, how they end, and that they cost nobody anything."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler import pins as pins_module
from stratakv.engine.scheduler import request_states as states_module
from stratakv.engine.scheduler import scheduler as scheduler_module
from stratakv.engine.scheduler.pins import PIN_SECONDS, Pins, ToolEstimator
from stratakv.tiers.settings.values import ConfigError

from ...clock import Clock
from .conftest import HASHER, Engine, MakeEngine, reference
from .dict_tiers import DictTiers

JOB = b"\0job"
SIZE = 4


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (states_module, scheduler_module):
        monkeypatch.setattr(module, "time", clock)
    return clock


def turn(
    name: str,
    prompt: list[int],
    job: str = "job",
    *,
    last: bool = False,
    tokens: int = 4,
    tenant: str = "",
) -> Request:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return Request(
        name,
        prompt,
        params,
        block_hasher=HASHER,
        job_id=job,
        is_last_step=last,
        tenant=tenant,
    )


def run(engine: Engine, request: Request, tool: str = "") -> list[int]:
    """Add a request and wait for its end; all of its tokens."""
    engine.scheduler.add_request(request, tool=tool)
    engine.run_all()
    return [*request.prompt_token_ids.tolist(), *engine.said(request.request_id)]


def pins_of(engine: Engine) -> Pins:
    pins = engine.scheduler._states.pins
    assert pins is not None
    return pins


def is_whole(engine: Engine) -> bool:
    pool = engine.manager.pool
    return pool.num_free == pool.num_blocks - 1


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


def test_a_turn_is_kept_until_the_next_one_has_ended(make_engine: MakeEngine, clock: Clock) -> None:
    engine = make_engine(30, policy="continuum")
    text = run(engine, turn("a", prompt(14)))
    assert list(pins_of(engine).jobs) == [JOB]
    assert pins_of(engine).num_blocks == 5
    # Others take all they like: what is pinned stays.
    for number in range(6):
        run(engine, turn(f"o{number}", prompt(60, number + 1), job=""))
    again = turn("b", [*text, 7, 8])
    run(engine, again)
    assert again.num_cached_tokens == 16  # of 18 computed, the full blocks
    assert len(pins_of(engine)) == 1
    run(engine, turn("c", prompt(9), last=True))
    assert not pins_of(engine).jobs
    assert is_whole(engine)
    assert engine.scheduler.counts["pins"] == 2


def test_pages_of_checkpoints_count(make_engine: MakeEngine, clock: Clock) -> None:
    """A pinned turn holds the states at its end too: jobs never have more than half of the pool."""
    engine = make_engine(60, policy="continuum", num_state_pages=6)
    pool = engine.manager.pool
    for number in range(6):
        run(engine, turn(f"t{number}", prompt(14, number), job=f"job{number}"))
        held = pool.num_blocks - 1 - pool.num_free
        assert pins_of(engine).num_blocks == held <= pool.num_usable // 2
        assert held == 11 * min(number + 1, 2)
    clock.now += PIN_SECONDS
    engine.step()
    assert is_whole(engine)


@pytest.mark.parametrize(
    ("policy", "job", "last"), [("fcfs", "job", False), ("continuum", "", False),
                                ("continuum", "job", True)],
)  # fmt: skip
def test_no_pin_without_policy_job_or_next_turn(
    make_engine: MakeEngine, policy: str, job: str, last: bool
) -> None:
    engine = make_engine(policy=policy)
    run(engine, turn("a", prompt(14), job, last=last))
    assert is_whole(engine)


def test_a_request_that_is_aborted_leaves_no_pin(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="continuum")
    engine.scheduler.add_request(turn("a", prompt(14)))
    engine.step()
    engine.take(engine.scheduler.finish_requests(["a"]))
    engine.step()
    assert is_whole(engine)


def test_a_pin_ends_by_itself_first_thing_in_a_step(make_engine: MakeEngine, clock: Clock) -> None:
    engine = make_engine(policy="continuum")
    run(engine, turn("a", prompt(14)))
    assert engine.scheduler.pin_seconds == PIN_SECONDS
    assert not engine.scheduler.has_runnable_work()
    clock.now += PIN_SECONDS
    assert engine.scheduler.pin_seconds == 0.0
    assert engine.scheduler.has_runnable_work()
    engine.step()
    assert is_whole(engine)
    assert not engine.scheduler.has_runnable_work()
    assert engine.scheduler.counts["pins_expired"] == 1


def test_the_oldest_pin_goes_before_anybody_is_sent_back(
    make_engine: MakeEngine, clock: Clock
) -> None:
    engine = make_engine(21, policy="continuum")
    for name in "abc":
        run(engine, turn(name, prompt(8, ord(name)), job=name))
    assert engine.scheduler.stats()["num_pinned"] == 3
    run(engine, turn("big", prompt(58), job="", tokens=8))
    assert engine.scheduler.counts["preemptions"] == 0
    assert [pin.job_id for pin in pins_of(engine).jobs.values()] == ["c"]
    assert engine.scheduler.counts["pins_given_up"] == 2


def test_pins_together_hold_no_more_than_their_share(make_engine: MakeEngine) -> None:
    engine = make_engine(41, policy="continuum")
    for number in range(30):
        run(engine, turn(f"r{number}", prompt(8, number), job=f"j{number}"))
        assert pins_of(engine).num_blocks <= 20
    run(engine, turn("huge", prompt(100), job="huge"))
    assert b"\0huge" not in pins_of(engine)


def test_what_a_tenant_asks_beyond_its_share_is_not_pinned(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(41, policy="continuum", pin_tenant_share=0.5)  # 10 of 20 blocks
    for number in range(6):
        run(engine, turn(f"a{number}", prompt(8, number), job=f"a{number}", tenant="a"))
    assert [pin.job_id for pin in pins_of(engine).jobs.values()] == ["a0", "a1", "a2"]
    assert engine.scheduler.counts["pins_over_quota"] == 3
    assert caplog.text.count("tenant 'a' has 9 kept, and may have 10") == 1
    # Others have theirs, and a job that has one may have its next one.
    run(engine, turn("b", prompt(8, 9), job="b", tenant="b"))
    run(engine, turn("more", prompt(12), job="a0", tenant="a"))
    assert [pin.job_id for pin in pins_of(engine).jobs.values()] == ["a1", "a2", "b", "a0"]
    engine.scheduler.reset_prefix_cache(False)
    assert not pins_of(engine)._of_tenants


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_tenants_share_is_a_share(make_engine: MakeEngine, share: float) -> None:
    with pytest.raises(ConfigError, match="--pin-tenant-share takes a share from 0 to 1"):
        make_engine(policy="continuum", pin_tenant_share=share)


def test_tools_that_take_long_get_no_pin(make_engine: MakeEngine, clock: Clock) -> None:
    engine = make_engine(policy="continuum")
    run(engine, turn("a", prompt(9)))
    clock.now += 3.0
    run(engine, turn("b", prompt(9)), tool="search")
    # The job's last tool took 3 seconds, so the next one is expected to.
    assert not pins_of(engine).jobs
    # Another job is pinned, until it is said that it has called the same.
    run(engine, turn("c", prompt(9), job="other"))
    assert len(pins_of(engine)) == 1
    engine.scheduler.tool_called(b"\0other", "quick")
    assert len(pins_of(engine)) == 1
    engine.scheduler.tool_called(b"\0other", "search")
    assert is_whole(engine)


def test_jobs_with_a_pin_come_first_and_go_back_last(make_engine: MakeEngine) -> None:
    engine = make_engine(60, policy="continuum", max_num_seqs=1)
    text = run(engine, turn("a", prompt(14), job="warm"))
    for name in "xy":
        engine.scheduler.add_request(turn(name, prompt(9, ord(name)), job=name))
    engine.scheduler.add_request(turn("w", [*text, 3], job="warm"))
    order = []
    while engine.scheduler.requests:
        order += [each.request_id for each in engine.step().new_requests]
    assert order == ["w", "x", "y"]
    policy = engine.scheduler._context.policy
    warm, cold = turn("m", [1], job="warm"), turn("n", [1], job="cold")
    assert b"\0warm" in policy.warm_jobs
    assert policy.victim([cold, warm]) is cold
    assert policy.victim([warm, warm]) is warm


def test_resetting_the_cache_gives_pins_up(make_engine: MakeEngine) -> None:
    engine = make_engine(policy="continuum")
    run(engine, turn("a", prompt(14)))
    assert engine.scheduler.reset_prefix_cache(False)
    assert is_whole(engine)


def test_pinned_blocks_are_stored_meanwhile(make_engine: MakeEngine) -> None:
    tiers = DictTiers(random.Random(1))
    tiers.num_wanted_ahead = lambda: 8  # type: ignore[method-assign]
    engine = make_engine(policy="continuum", tiers=tiers)
    text = run(engine, turn("a", prompt(14)))
    assert len(pins_of(engine)) == 1
    engine.step()
    assert len(tiers.kept) == len(text) // SIZE


class Failing(ToolEstimator):
    def tool_seconds(self, job: bytes, tool: str) -> float | None:
        raise KeyError("of its own")


class Nonsense(ToolEstimator):
    def tool_seconds(self, job: bytes, tool: str) -> float | None:
        return float("nan")


@pytest.mark.parametrize("kind", [Failing, Nonsense])
def test_an_estimator_that_fails_costs_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, kind: Callable[[], ToolEstimator]
) -> None:
    monkeypatch.setattr(pins_module, "ToolEstimator", kind)
    engine = make_engine(policy="continuum")
    run(engine, turn("a", prompt(14)))
    assert len(pins_of(engine)) == 1


def test_the_estimator_forgets_what_is_old_and_minds_no_clock_that_goes_back() -> None:
    estimator = ToolEstimator()
    estimator.turn_ended(b"a", 100.0)
    estimator.turn_arrives(b"a", "tool", 50.0)
    assert estimator.tool_seconds(b"", "tool") == 0.0
    for number in range(pins_module.MOST_TOOLS + 5):
        estimator.turn_ended(b"a", 0.0)
        estimator.turn_arrives(b"a", f"t{number}", 1.0)
    assert estimator.tool_seconds(b"", "tool") is None
    assert len(estimator._average) == pins_module.MOST_TOOLS
    for number in range(pins_module.MOST_JOBS + 5):
        estimator.turn_ended(b"%d" % number, 0.0)
    assert len(estimator._ended) == pins_module.MOST_JOBS


@pytest.mark.parametrize("seed", range(40))
def test_jobs_under_pressure_say_what_they_say_alone(
    make_engine: MakeEngine, clock: Clock, seed: int
) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        22,
        tiers=DictTiers(rng) if seed % 2 else None,
        policy="continuum",
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_num_seqs=rng.choice([2, 4]),
        preempt_above=rng.choice([0.9, 1.0]),
        admit_below=rng.choice([0.7, 0.9]),
    )
    texts = {f"j{number}": prompt(rng.randrange(1, 12), number) for number in range(4)}
    for number in range(20):
        job = rng.choice(list(texts))
        name, text = f"r{number}", texts[job]
        if len(text) > 40:
            text = text[:5]
        engine.scheduler.add_request(
            turn(name, text, rng.choice([job, job, ""]), last=rng.random() < 0.1, tokens=3),
            tool=rng.choice(["", "a", "b"]),
        )
        texts[job] = [*text, *reference(text, 3, ignore_eos=True), rng.randrange(1, 50)]
        for _ in range(rng.randrange(6)):
            clock.now += rng.choice([0.0, 0.1, 4.0])
            if engine.scheduler.has_runnable_work():
                engine.step()
            elif engine.tiers:
                engine.tiers.tick()
        if rng.random() < 0.3:
            engine.run_all()
            assert engine.said(name) == reference(text, 3, ignore_eos=True)
    engine.run_all()
    clock.now += PIN_SECONDS
    engine.step()
    assert is_whole(engine)


def test_the_tiers_learn_how_long_a_turn_is_wanted(make_engine: MakeEngine, clock: Clock) -> None:
    """Whether it is pinned in the pool or not."""
    tiers = DictTiers(random.Random(1))
    told: list[tuple[object, ...]] = []
    retention: Any = SimpleNamespace()
    for name in ("turn_ended", "turn_expected", "job_ended"):
        setattr(retention, name, lambda *given, name=name: told.append((name, *given)))
    tiers.job_retention = retention
    engine = make_engine(policy="continuum", tiers=tiers)
    first = turn("a", prompt(14))
    run(engine, first)
    assert told == [("turn_ended", JOB, first.block_hashes, pins_module.TIER_SECONDS, None)]
    clock.now += 10.0
    second = turn("b", prompt(14, 2))
    run(engine, second, tool="build")
    assert told[1:] == [("turn_ended", JOB, second.block_hashes, 20.0, 8.0)]
    assert not pins_of(engine).jobs
    engine.scheduler.tool_called(JOB, "build")
    engine.scheduler.tool_called(JOB, "unknown")
    run(engine, turn("c", prompt(9), last=True))
    assert told[2:] == [("turn_expected", JOB, 8.0), ("job_ended", JOB)]
