# SPDX-License-Identifier: Apache-2.0
"""Adapters of a step: never more than there are slots, and each request gets its turn."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from stratakv.connector.page_keys import group_suffix
from stratakv.engine.request.adapter import Adapter
from stratakv.engine.scheduler.scheduler import Pause
from stratakv.engine.scheduler.waiting import adapter_budget
from stratakv.engine.scheduler.waiting.adapter_budget import MOST_OVERTAKES

from .conftest import Engine, MakeEngine, digests_of, fingerprint, reference
from .dict_tiers import SIZE
from .test_random_lives import check_end, check_invariants
from .test_random_lives import step as step_with_faults

ADAPTERS = {name: Adapter(name, name.encode() * 32) for name in "ABCDE"}
PROMPT = list(range(1, 10))


def add(engine: Engine, name: str, adapter: str = "", **options: Any) -> None:
    """A request of an adapter; "" is the model alone."""
    prompt = options.pop("prompt", [*PROMPT, len(name)])
    options = {"max_tokens": 4, "ignore_eos": True, **options}
    engine.add(name, prompt, adapter=ADAPTERS.get(adapter), **options)


def running(engine: Engine) -> list[str]:
    return [each.request_id for each in engine.scheduler._states.running]


def make(make_engine: MakeEngine, most: int = 2, **options: Any) -> Engine:
    return make_engine(max_adapters=most, **{"max_num_seqs": 16, **options})


def test_different_adapters_have_a_limit_and_other_requests_none(make_engine: MakeEngine) -> None:
    engine = make(make_engine)
    for name in ("A1", "B1", "C1", "A2", "D1", "-1", "B2", "C2", "-2"):
        add(engine, name, name[0].strip("-"))
    engine.step()
    assert running(engine) == ["A1", "B1", "A2", "-1", "B2", "-2"]
    assert engine.scheduler.adapter_counts() == {
        "running": {"A": 2, "B": 2}, "waiting": {"C": 2, "D": 1},
    }  # fmt: skip
    engine.run_all()
    assert all(engine.finish_reason(name) == "length" for name in engine.outputs)
    assert engine.scheduler.adapter_counts() == {"running": {}, "waiting": {}}
    for name in ("A1", "C2", "D1", "-1"):
        key = ADAPTERS[name[0]].fingerprint if name[0] != "-" else b""
        expected = reference([*PROMPT, 2], 4, ignore_eos=True, adapter=key)
        assert engine.said(name) == expected


def test_equal_adapters_share_a_place(make_engine: MakeEngine) -> None:
    engine = make(make_engine, most=1)
    for name in ("one", "two"):
        same = Adapter(name, b"f" * 32)
        engine.add(name, PROMPT, adapter=same, ignore_eos=True)
    engine.step()
    assert running(engine) == ["one", "two"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "continuum"])
def test_an_endless_stream_of_two_adapters_starves_no_third(
    make_engine: MakeEngine, policy: str
) -> None:
    engine = make(make_engine, policy=policy)
    add(engine, "A", "A", max_tokens=6)
    add(engine, "B", "B", max_tokens=6)
    engine.step()
    add(engine, "first", "C")
    add(engine, "second", "D")
    started = {}
    number = 0
    for turn in range(400):
        for adapter in "AB":
            number += 1
            add(engine, f"{adapter}{number}", adapter, max_tokens=6)
        engine.step()
        for name in running(engine):
            started.setdefault(name, turn)
        if {"first", "second"} <= started.keys():
            break
    assert started["first"] < started["second"]
    overtook = [name for name, turn in started.items() if turn < started["first"]]
    assert MOST_OVERTAKES <= len(overtook) <= MOST_OVERTAKES + 40
    # Only one of the two had to end; the other went on.
    of_stream = Counter(name[0] for name in overtook)
    assert min(of_stream.values()) > 1


def test_the_one_that_waited_first_gets_the_place(make_engine: MakeEngine) -> None:
    engine = make(make_engine, most=1)
    add(engine, "A", "A", max_tokens=3)
    engine.step()
    for name in ("C", "B", "D", "B2"):
        add(engine, name, name[0], max_tokens=3)
    order: list[str] = []
    while engine.scheduler.requests:
        engine.step()
        order += [name for name in running(engine) if name not in order]
    assert order == ["A", "C", "B", "B2", "D"]


def test_a_better_priority_takes_no_place_from_the_first(make_engine: MakeEngine) -> None:
    engine = make(make_engine, most=1, policy="priority")
    add(engine, "A", "A", max_tokens=3)
    engine.step()
    add(engine, "C", "C", priority=5)
    engine.step()
    add(engine, "D", "D")
    for _ in range(2):
        engine.step()
    assert running(engine) == ["C"]
    engine.run_all()


def test_the_first_that_leaves_gives_its_turn_away(make_engine: MakeEngine) -> None:
    engine = make(make_engine, most=1)
    add(engine, "A", "A", max_tokens=2)
    engine.step()
    add(engine, "C", "C")
    add(engine, "D", "D")
    engine.step()
    engine.take(engine.scheduler.finish_requests(["C"]))
    engine.step()
    engine.step()
    assert running(engine) == ["D"]
    engine.run_all()


def test_many_without_a_place_keep_no_other_waiting(make_engine: MakeEngine) -> None:
    engine = make(make_engine, most=1)
    add(engine, "A", "A", max_tokens=60)
    engine.step()
    for number in range(100):
        add(engine, f"C{number}", "C", max_tokens=1)
    add(engine, "A2", "A")
    add(engine, "bare")
    engine.step()
    assert running(engine) == ["A", "A2", "bare"]
    engine.run_all()


def test_so_many_without_a_place_that_a_round_ends(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_budget, "MOST_REFUSED", 5)
    engine = make(make_engine, most=1)
    add(engine, "A", "A", max_tokens=20)
    engine.step()
    for number in range(60):
        add(engine, f"C{number}", "C", max_tokens=1)
    add(engine, "bare")
    while "bare" not in engine.outputs:
        engine.step()
    engine.run_all()
    assert all(engine.finish_reason(name) for name in engine.outputs)


def test_a_preempted_request_keeps_no_place(make_engine: MakeEngine) -> None:
    engine = make(make_engine, most=1)
    add(engine, "A", "A", max_tokens=20)
    engine.step()
    add(engine, "B", "B", max_tokens=3)
    engine.step()
    [request] = engine.scheduler._states.running
    engine.scheduler._states.preempt(request)
    engine.step()
    assert running(engine) == ["B"], "which waited first"
    engine.run_all()
    adapter = ADAPTERS["A"].fingerprint
    assert engine.said("A") == reference([*PROMPT, 1], 20, ignore_eos=True, adapter=adapter)


def test_a_pause_for_new_ones_lets_those_that_ran_end(make_engine: MakeEngine) -> None:
    """A new request waits for the only place: while no new one may start it is kept for none."""
    engine = make(make_engine, most=1)
    add(engine, "A", "A", max_tokens=9)
    engine.step()
    add(engine, "C", "C")
    engine.step()
    engine.scheduler.pause(Pause.NEW)
    [request] = engine.scheduler._states.running
    engine.scheduler._states.preempt(request)
    while "A" in engine.scheduler.requests:
        assert engine.scheduler.has_runnable_work()
        engine.step()
    assert len(engine.said("A")) == 9
    engine.scheduler.resume()
    engine.run_all()


def test_a_request_whose_blocks_were_loaded_has_its_place(
    make_engine: MakeEngine, make_tiers: Any
) -> None:
    """The request holds a place, so it must run, however long another one waits for a place."""
    tiers = make_tiers()
    engine = make(make_engine, tiers=tiers)
    long, key = [7, *range(1, 33)], ADAPTERS["B"].fingerprint
    numbers = fingerprint(long, adapter=key)
    for index, digest in enumerate(digests_of(tuple(long), key)):
        tiers.kept[digest + group_suffix(0)] = numbers[SIZE * index : SIZE * (index + 1)]
    for number in range(3):
        add(engine, f"A{number}", "A", max_tokens=60)
    engine.step()
    add(engine, "B", "B", prompt=long)
    engine.step()
    assert [each.request_id for each in engine.scheduler._states.loads.blocking] == ["B"]
    add(engine, "C", "C")
    engine.step()
    assert "C" not in running(engine), "the load has the other place"
    engine.scheduler._admission.adapters._num_overtakes = MOST_OVERTAKES
    add(engine, "A", "A")
    for _ in range(3):
        tiers.tick()
    for _ in range(3):
        engine.step()
    assert "B" in running(engine)
    engine.run_all()
    assert engine.said("B") == reference(long, 4, ignore_eos=True, adapter=key)
    assert engine.outputs["B"][0].cached_tokens_by_tier != {}


@pytest.mark.parametrize("with_tiers", [False, True], ids=["pool", "tiers"])
@pytest.mark.parametrize("case", range(3))
def test_random_lives_with_adapters(
    case: int, with_tiers: bool, seed: int, scale: str, make_engine: Any, make_tiers: Any
) -> None:
    rng = random.Random(seed)
    for _ in range(8 if scale == "ci" else 1_000):
        check_life(rng, make_engine, make_tiers(rng) if with_tiers else None)


def check_life(rng: random.Random, make_engine: Any, tiers: Any) -> None:
    most, faults = rng.randint(1, 3), rng.random() < 0.5
    max_model_len = rng.randint(16, 40)
    engine = make_engine(
        1 + max_model_len // 4 + 1 + rng.choice([0, 2, 10, 50]), tiers=tiers,
        max_model_len=max_model_len, max_adapters=most, max_num_seqs=rng.randint(1, 6),
        max_num_batched_tokens=6 + rng.randint(0, 30),
        reserve=rng.choice(["none", "prompt", "full"]),
        policy=rng.choice(["fcfs", "priority", "continuum"]),
    )  # fmt: skip
    prompts: dict[str, tuple[list[int], int, bytes]] = {}
    spoilt: set[str] = set()
    documents = [[rng.randint(1, 49) for _ in range(max_model_len)] for _ in range(2)]
    takes_priority = engine.scheduler.takes_priority

    def step() -> None:
        step_with_faults(rng, engine, spoilt, faults)
        states = engine.scheduler._states
        holders = [*states.running, *states.loaded, *states.loads.blocking]
        held = {each.adapter.fingerprint for each in holders if each.adapter is not None}
        assert len(held) <= most
        check_invariants(engine)

    for number in range(rng.randint(2, 14)):
        tokens = rng.choice(documents)[: rng.randint(1, max_model_len - 3)]
        name, chosen = str(number), rng.choice(["", *"ABCDE"])
        adapter = ADAPTERS.get(chosen)
        prompts[name] = (tokens, rng.randint(1, 9), b"" if adapter is None else adapter.fingerprint)
        engine.add(name, tokens, adapter=adapter, max_tokens=prompts[name][1],
                   priority=rng.randint(-1, 1) if takes_priority else 0)  # fmt: skip
        for _ in range(rng.choice([0, 0, 1, 3])):
            step()
    for _ in range(3_000):
        if not engine.scheduler.requests and not (tiers and tiers.is_busy):
            break
        step()

    def say(tokens: list[int], max_tokens: int, length: int, seed: bytes) -> list[int]:
        return reference(tokens, max_tokens, length, adapter=seed)

    check_end(engine, prompts, spoilt, max_model_len, say)  # type: ignore[arg-type]
    assert engine.scheduler.adapter_counts() == {"running": {}, "waiting": {}}
