# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies: the order of turns, who goes back, and that nobody's tokens change by it."""

from __future__ import annotations

import random
from collections.abc import Callable
from importlib.metadata import EntryPoint

import pytest

from stratakv.engine.request.request import Request
from stratakv.engine.request.sampling_params import SamplingParams
from stratakv.engine.scheduler import policies
from stratakv.engine.scheduler.policies import (
    FCFSPolicy,
    PriorityPolicy,
    SchedulingPolicy,
    SortedQueue,
    Turn,
    open_policy,
)
from stratakv.tiers.settings.values import ConfigError

from .conftest import HASHER, Engine, MakeEngine, reference
from .dict_tiers import DictTiers


def request(name: str, priority: int = 0, arrival: float = 0.0, length: int = 9) -> Request:
    return Request(
        name,
        random.Random(name).choices(range(1, 50), k=length),
        SamplingParams(max_tokens=6, ignore_eos=True),
        arrival_seconds=arrival,
        block_hasher=HASHER,
        priority=priority,
    )


def test_the_order_is_total_and_the_same_in_every_run() -> None:
    rng = random.Random(5)
    requests = [
        request(f"r{rng.randrange(40)}", rng.randrange(3), rng.randrange(3)) for _ in range(300)
    ]
    expected = sorted(
        requests, key=lambda r: (r.priority, r.arrival_seconds, r.request_id, r.number)
    )
    for _ in range(3):
        queue = PriorityPolicy().make_queue()
        rng.shuffle(requests)
        for each in requests:
            (queue.add if rng.random() < 0.8 else queue.prepend)(each)
        gone = set(rng.sample(range(300), 150))
        for index in gone:
            assert queue.remove_request(expected[index])
            assert not queue.remove_request(expected[index])
        assert len(queue) == 150
        assert list(queue) == [each for index, each in enumerate(expected) if index not in gone]


def test_a_queue_keeps_no_more_than_twice_what_waits() -> None:
    queue = SortedQueue(PriorityPolicy())
    first = request("first", -1)
    queue.add(first)
    others = [request(f"r{number}", number) for number in range(500)]
    queue.add_all(others)
    for each in others:
        queue.remove_request(each)
    assert list(queue) == [first]
    assert len(queue._heap) <= 18


@pytest.mark.parametrize(("policy", "expected"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_who_is_let_in_first(make_engine: MakeEngine, policy: str, expected: str) -> None:
    engine = make_engine(policy=policy, max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 2), ("c", -1), ("d", 0)):
        engine.scheduler.add_request(request(name, priority, "abcd".index(name)))
    order = []
    while engine.scheduler.requests:
        output = engine.step()
        order += [each.request_id for each in output.new_requests]
    assert "".join(order) == expected


def run_until_preempted(engine: Engine) -> None:
    for _ in range(200):
        if engine.scheduler.counts["preemptions"]:
            return
        engine.step()
    raise AssertionError("nobody was sent back")


def test_the_least_important_goes_back_also_out_of_the_step(make_engine: MakeEngine) -> None:
    # The first to be let in matters least: its tokens of the step are taken back, and it waits.
    engine = make_engine(20, policy="priority", max_num_batched_tokens=64)
    least, others = request("z", 5, length=12), [request(n, 1, length=12) for n in "abc"]
    for each in (least, *others):
        each.max_tokens = 12
        each.max_num_tokens = each.num_prompt_tokens + 12
    engine.scheduler.add_request(least)
    engine.step()
    for each in others:
        engine.scheduler.add_request(each)
    run_until_preempted(engine)
    assert least.num_preemptions == 1
    assert [each.num_preemptions for each in others] == [0, 0, 0]
    engine.run_all()
    assert sum(each.num_preemptions for each in others) == 0


@pytest.mark.parametrize("seed", range(40))
def test_tokens_do_not_depend_on_priorities(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        18,
        tiers=DictTiers(rng) if seed % 2 else None,
        policy="priority",
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        max_num_seqs=rng.choice([2, 4]),
        preempt_above=rng.choice([0.9, 1.0]),
        admit_below=rng.choice([0.7, 0.9]),
        max_steps_in_flight=1 + seed % 3,
        runs_ahead=False,
    )
    asked = {}
    for number in range(12):
        stem = [1 + rng.randrange(2)] * rng.randrange(17)
        prompt = stem + rng.choices(range(1, 50), k=rng.randrange(1, 20))
        asked[f"r{number}"] = prompt
        new = Request(
            f"r{number}",
            prompt,
            SamplingParams(max_tokens=6, ignore_eos=True),
            arrival_seconds=float(rng.randrange(3)),
            block_hasher=HASHER,
            priority=rng.randrange(-2, 3),
        )
        engine.scheduler.add_request(new)
        for _ in range(rng.randrange(4)):
            if engine.scheduler.has_runnable_work():
                engine.step()
            elif engine.tiers:
                engine.tiers.tick()
    engine.run_all()
    for name, prompt in asked.items():
        assert engine.said(name) == reference(prompt, 6, ignore_eos=True)
    pool = engine.manager.pool
    assert pool.num_free == pool.num_blocks - 1


def test_deferred_requests_do_not_go_before_more_important_ones(
    make_engine: MakeEngine,
) -> None:
    tiers = DictTiers(random.Random(0))
    engine = make_engine(policy="priority", tiers=tiers, max_num_seqs=1)
    states = engine.scheduler._states
    important, deferred = request("a", 0), request("b", 3)
    engine.scheduler.add_request(deferred)
    assert states.waiting.remove_request(deferred)
    states.deferred.add(deferred)
    engine.scheduler.add_request(important)
    while not (states.running or states.loads.blocking):
        engine.step()
    assert important.status.name in ("RUNNING", "WAITING_FOR_REMOTE_KVS")
    assert important.num_computed_tokens > 0
    engine.run_all()


class Shortest(SchedulingPolicy):
    """A policy of another package: short prompts first."""

    def turn(self, request: Request) -> Turn:
        return (request.num_prompt_tokens, request.number)


def entry(monkeypatch: pytest.MonkeyPatch, load: Callable[[], object]) -> None:
    class Point(EntryPoint):
        def load(self) -> object:
            return load()

    point = Point("mine", "package.policy:Mine", policies.ENTRY_POINTS)
    monkeypatch.setattr(policies, "find_entry", lambda *_: point)


def test_a_policy_of_another_package(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry(monkeypatch, lambda: Shortest)
    engine = make_engine(policy="mine", max_num_seqs=1)
    for name, length in (("a", 9), ("b", 3), ("c", 5)):
        engine.scheduler.add_request(request(name, length=length))
    order = []
    while engine.scheduler.requests:
        order += [each.request_id for each in engine.step().new_requests]
    assert order == ["b", "c", "a"]


def test_policies_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"no scheduling policy 'lifo'; there are: fcfs, prio"):
        open_policy("lifo")
    entry(monkeypatch, lambda: dict)
    with pytest.raises(ConfigError, match="is dict; expected a SchedulingPolicy"):
        open_policy("mine")
    entry(monkeypatch, lambda: [].pop)
    with pytest.raises(ConfigError, match="could not be made: IndexError"):
        open_policy("mine")


def test_fcfs_looks_at_no_priority() -> None:
    assert not FCFSPolicy().takes_priority
    assert PriorityPolicy().takes_priority
