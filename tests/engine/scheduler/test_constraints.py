# SPDX-License-Identifier: Apache-2.0
"""The limits of a step, one by one: what they stop, for those that run and for those that wait.
Adapters and encoders, which other engines have limits for too, are not served here."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stratakv.engine.models.layer_attention import full, window

from .conftest import Engine, digest_of, fingerprint
from .dict_tiers import SIZE, DictTiers

MakeEngine = Callable[..., Engine]


def prompt(number: int, length: int) -> list[int]:
    return [1 + (number * 7 + i) % 49 for i in range(length)]


def scheduled(engine: Engine) -> dict[str, int]:
    return engine.step().num_scheduled_tokens


def test_without_tokens_left_both_rounds_end(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_batched_tokens=10, max_num_seqs=4)
    for name, length in (("a", 8), ("b", 25), ("c", 8)):
        engine.add(name, prompt(ord(name), length), ignore_eos=True)
    assert scheduled(engine) == {"a": 8, "b": 2}
    assert scheduled(engine) == {"a": 1, "b": 9}  # nothing is left for c
    assert scheduled(engine) == {"a": 1, "b": 9}
    assert scheduled(engine) == {"a": 1, "b": 5, "c": 4}


def test_no_more_run_than_may(make_engine: MakeEngine) -> None:
    engine = make_engine(max_num_seqs=2)
    for name in "abc":
        engine.add(name, prompt(ord(name), 4), max_tokens=2, ignore_eos=True)
    assert set(scheduled(engine)) == {"a", "b"}
    assert set(scheduled(engine)) == {"a", "b"}
    assert set(scheduled(engine)) == {"c"}


def keep(engine: Engine, tokens: Sequence[int]) -> None:
    """Have the tiers keep all full blocks of these tokens."""
    assert engine.tiers is not None
    held = fingerprint(tokens)
    for index in range(len(tokens) // SIZE):
        name = digest_of(tokens, index)
        engine.contents[name] = held[SIZE * index : SIZE * (index + 1)]
        engine.tiers.kept[name + b"\0\0"] = engine.contents[name]


def test_one_that_waits_for_something_else_holds_up_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(tiers=DictTiers())
    keep(engine, prompt(1, 12))
    engine.add("loads", prompt(1, 14))
    engine.add("behind", prompt(2, 6))
    assert scheduled(engine) == {"behind": 6}
    assert engine.tiers is not None
    engine.tiers.load_ticks = 0
    engine.run_all()
    assert len(engine.said("loads")) > 0


def test_without_blocks_the_last_one_goes_back_and_nobody_is_let_in(
    make_engine: MakeEngine,
) -> None:
    """Six usable blocks. What waits stays, also the short request behind the long one."""
    engine = make_engine(7)
    engine.add("a", prompt(1, 8), max_tokens=12, ignore_eos=True)
    engine.add("b", prompt(2, 12), max_tokens=4, ignore_eos=True)
    engine.add("long", prompt(3, 16), max_tokens=1)
    engine.add("short", prompt(4, 2), max_tokens=1)
    # Five blocks are taken; the long one needs four, and the short one is not asked.
    assert set(scheduled(engine)) == {"a", "b"}
    # Both want another block and one is left: b makes room for a.
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 1}
    assert output.preempted_request_ids == {"b"}


def test_a_window_makes_room_for_itself(make_engine: MakeEngine) -> None:
    """The same pool would not hold 60 tokens of both groups without the window's own blocks."""
    attention = (full(), window(6))
    engine = make_engine(1 + 15 + 4, attention=attention, max_num_batched_tokens=8)
    engine.add("a", prompt(1, 40), max_tokens=20, ignore_eos=True)
    engine.run_all()
    assert len(engine.said("a")) == 20
    assert engine.scheduler.counts["preemptions"] == 0


def test_one_without_tokens_to_compute_is_passed_over(make_engine: MakeEngine) -> None:
    """The next token of a request is still being chosen: those behind it go on."""
    engine = make_engine(max_steps_in_flight=2, max_num_batched_tokens=8)
    engine.add("a", prompt(1, 6))
    engine.add("b", prompt(2, 9))
    first = engine.scheduler.schedule()
    assert first.num_scheduled_tokens == {"a": 6, "b": 2}
    second = engine.scheduler.schedule()
    assert second.num_scheduled_tokens == {"b": 7}
    for output in (first, second):
        engine.take(engine.scheduler.update_from_output(output, engine.run(output)))
    engine.run_all()
