# SPDX-License-Identifier: Apache-2.0
"""Pausing: what stands still, what goes on, and that nothing is lost."""

from __future__ import annotations

import random

import pytest

from stratakv.connector.messages import Match, MatchKind
from stratakv.engine.scheduler.scheduler import Pause

from .conftest import MakeEngine, reference
from .dict_tiers import DictTiers


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 50), k=length)


def test_new_requests_wait_and_running_ones_finish(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(9), max_tokens=4, ignore_eos=True)
    engine.step()
    engine.scheduler.pause(Pause.NEW)
    engine.add("b", prompt(7, 1))
    while engine.scheduler.has_runnable_work():
        assert "b" not in engine.step().num_scheduled_tokens
    assert engine.said("a") == reference(prompt(9), 4, ignore_eos=True)
    assert list(engine.scheduler.requests) == ["b"]
    engine.scheduler.resume()
    engine.run_all()
    assert engine.said("b") == reference(prompt(7, 1), 5)


def test_all_stand_still_and_keep_their_blocks(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.add("a", prompt(9), max_tokens=6, ignore_eos=True)
    engine.step()
    table = engine.table("a")
    engine.scheduler.pause(Pause.ALL)
    engine.add("b", prompt(7, 1))
    while engine.scheduler.has_runnable_work():
        assert engine.step().num_scheduled_tokens == {}
    assert engine.table("a") == table
    assert engine.scheduler.paused is Pause.ALL
    engine.scheduler.finish_requests(["b"])
    engine.scheduler.resume()
    engine.run_all()
    assert engine.said("a") == reference(prompt(9), 6, ignore_eos=True)
    assert engine.finish_reason("a") == "length"


def test_who_was_sent_back_counts_as_running(make_engine: MakeEngine) -> None:
    """Else what had begun would not finish, and the one that waits ahead of it would be let in."""
    engine = make_engine(9)
    for number, name in enumerate(("a", "b")):
        engine.add(name, prompt(12, number), max_tokens=14, ignore_eos=True)
    engine.step()
    engine.add("new", prompt(5, 7))
    engine.scheduler.pause(Pause.NEW)
    while engine.scheduler.has_runnable_work():
        assert "new" not in engine.step().num_scheduled_tokens
    assert engine.scheduler.counts["preemptions"] > 0
    for number, name in enumerate(("a", "b")):
        assert engine.said(name) == reference(prompt(12, number), 14, ignore_eos=True)
    assert list(engine.scheduler.requests) == ["new"]


def test_loads_end_during_a_pause(make_engine: MakeEngine) -> None:
    tiers = DictTiers()
    engine = make_engine(9, tiers=tiers)
    engine.add("a", prompt(24), max_tokens=1)
    engine.run_all()
    engine.add("other", prompt(28, 1), max_tokens=1)
    engine.run_all()
    engine.add("again", prompt(24), max_tokens=2, ignore_eos=True)
    engine.step()
    assert tiers.loads
    engine.scheduler.pause(Pause.ALL)
    for _ in range(20):
        tiers.tick()
        if engine.scheduler.has_runnable_work():
            assert engine.step().num_scheduled_tokens == {}
    assert not tiers.loads
    assert not engine.scheduler.has_runnable_work()
    engine.scheduler.resume()
    engine.run_all()
    assert engine.said("again") == reference(prompt(24), 2, ignore_eos=True)


def test_who_was_sent_back_loads_where_a_paused_one_has_loaded(make_engine: MakeEngine) -> None:
    """Seven blocks. `new` has loaded five of them and may not run; the three that `back` needs for
    its load come from nobody else."""
    tiers = DictTiers()
    engine = make_engine(8, tiers=tiers, max_model_len=28)
    engine.add("keep", prompt(22, 2), max_tokens=1)
    engine.run_all()
    for number, name in enumerate(("a", "back")):
        engine.add(name, prompt(12, number), max_tokens=12, ignore_eos=True)
        engine.step()
    while "preemptions" not in engine.scheduler.counts:
        engine.step()
    engine.scheduler.finish_requests(["a"])
    assert engine.scheduler.reset_prefix_cache(reset_tiers=False)
    for name, held in engine.contents.items():
        tiers.kept[name + b"\0\0"] = held
    # It stands aside for a moment, so that `new` begins to load before the pause.
    ask = tiers.get_matched_tokens
    answers = {"back": Match(0, MatchKind.RETRY)}
    tiers.get_matched_tokens = lambda request, num_tokens, **_: (  # type: ignore[method-assign]
        answers.pop(request.request_id, None) or ask(request, num_tokens)
    )
    engine.add("new", prompt(22, 2), max_tokens=2, ignore_eos=True)
    engine.step()
    assert [load.request_id for load in tiers.loads] == ["new"]
    engine.scheduler.pause(Pause.NEW)
    for _ in range(60):
        tiers.tick()
        if engine.scheduler.has_runnable_work():
            assert "new" not in engine.step().num_scheduled_tokens
    assert engine.said("back") == reference(prompt(12, 1), 12, ignore_eos=True)
    assert engine.scheduler.counts["resumed_by_load"] == 12
    engine.scheduler.resume()
    engine.run_all()
    assert engine.said("new") == reference(prompt(22, 2), 2, ignore_eos=True)


@pytest.mark.parametrize("seed", range(6))
def test_random_pauses_change_nothing(make_engine: MakeEngine, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(16, tiers=DictTiers(), max_num_batched_tokens=16)
    asked = {}
    for number in range(120):
        action = rng.random()
        if action < 0.2:
            asked[f"r{number}"] = text = prompt(rng.randrange(1, 20), rng.randrange(5))
            engine.add(f"r{number}", text, max_tokens=6, ignore_eos=True)
        elif action < 0.3:
            engine.scheduler.pause(rng.choice(list(Pause)))
        elif action < 0.45:
            engine.scheduler.resume()
        elif engine.scheduler.has_runnable_work():
            engine.step()
        else:
            assert engine.tiers is not None
            engine.tiers.tick()
    engine.scheduler.resume()
    engine.run_all()
    for name, text in asked.items():
        assert engine.said(name) == reference(text, 6, ignore_eos=True)
