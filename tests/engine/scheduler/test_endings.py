# SPDX-License-Identifier: Apache-2.0
"""How requests end: by length, by a stop id, from outside, or because something failed."""

from __future__ import annotations

import time
from typing import Any

import pytest

from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.engine.request.request import RequestStatus
from stratakv.engine.scheduler.output import ModelRunnerOutput

Make = Any


def prompt(length: int, first: int = 1) -> list[int]:
    return [first + i % 40 for i in range(length)]


def test_the_context_ends_a_request(make_engine: Make, say: Any) -> None:
    engine = make_engine(max_model_len=12)
    engine.add("r", prompt(9), max_tokens=50, ignore_eos=True)
    engine.run_all()
    assert engine.said("r") == say(prompt(9), 50, 12, ignore_eos=True)
    assert len(engine.said("r")) == 3
    assert engine.finish_reason("r") == "length"


def test_stop_ids_end_a_request_with_their_reason(make_engine: Make, say: Any) -> None:
    said = say(prompt(9), 5)
    engine = make_engine()
    engine.add("r", prompt(9), stop_token_ids=(said[2],))
    engine.run_all()
    last = engine.outputs["r"][-1]
    assert engine.said("r") == said[: said.index(said[2]) + 1]
    assert (last.finish_reason, last.stop_reason) == ("stop", said[2])


def test_tokens_after_the_end_are_dropped(make_engine: Make) -> None:
    engine = make_engine()
    request = engine.add("r", prompt(9))
    output = engine.scheduler.schedule()
    (told,) = engine.scheduler.update_from_output(output, ModelRunnerOutput({"r": [5, 0, 6]}))
    assert told.new_token_ids == [5, 0]
    assert told.finish_reason == "stop"
    assert request.output_token_ids == [5, 0]


def test_log_probabilities_end_with_their_tokens(make_engine: Make) -> None:
    engine = make_engine()
    for name in "abc":
        engine.add(name, prompt(9))
    output = engine.scheduler.schedule()
    entries = [PositionLogprobs([token], [-0.5], 1) for token in (5, 0, 6)]
    of_prompt = [None, *entries]
    result = ModelRunnerOutput(
        {"a": [5, 0, 6], "b": [7], "c": []},
        nan_request_ids={"c"},
        logprobs={"a": entries},
        prompt_logprobs={"a": of_prompt},
    )
    a, b, c = engine.scheduler.update_from_output(output, result)
    assert (a.logprobs, a.prompt_logprobs) == (entries[:2], of_prompt)
    assert (b.logprobs, b.prompt_logprobs) == (None, None)
    assert (c.finish_reason, c.logprobs, c.prompt_logprobs) == ("error", None, None)


def test_the_first_and_the_last_output_carry_the_times(make_engine: Make) -> None:
    engine = make_engine()
    began = time.monotonic()
    engine.add("r", prompt(9), max_tokens=3, ignore_eos=True)
    engine.run_all()
    spent = time.monotonic() - began
    assert [output.timings is None for output in engine.outputs["r"]] == [False, True, False]
    assert [output.num_cached_tokens for output in engine.outputs["r"]] == [0, None, None]
    times = engine.outputs["r"][-1].timings
    stages = [times[f"{stage}_seconds"] for stage in ("queue", "prefill", "decode")]
    assert all(seconds >= 0 for seconds in times.values())
    assert sum(stages) == pytest.approx(times["total_seconds"])
    assert stages[0] + stages[1] == pytest.approx(times["first_token_seconds"])
    assert times["total_seconds"] <= spent


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_an_aborted_request_gives_everything_back(make_engine: Make, steps: int) -> None:
    engine = make_engine(max_num_batched_tokens=16)
    for name in "ab":
        engine.add(name, prompt(20, ord(name)), max_tokens=20, ignore_eos=True)
    for _ in range(steps):
        engine.step()
    (told,) = engine.scheduler.finish_requests(["a", "unknown", "a"])
    assert (told.request_id, told.finish_reason) == ("a", "abort")
    assert list(engine.scheduler.requests) == ["b"]
    assert engine.step().finished_request_ids == {"a"}
    engine.run_all()
    assert engine.manager.pool.is_idle
    with pytest.raises(ValueError, match="not RUNNING"):
        engine.scheduler.finish_requests(["b"], RequestStatus.RUNNING)


def test_an_abort_while_the_step_runs(make_engine: Make, say: Any) -> None:
    engine = make_engine()
    engine.add("a", prompt(10))
    output = engine.scheduler.schedule()
    done = engine.run(output)
    engine.scheduler.finish_requests(["a"])
    engine.add("a", prompt(3, 30))  # the id is free again, and this is not the one that ran
    assert engine.scheduler.update_from_output(output, done) == []
    # The step wrote its blocks all the same, and they can be found.
    engine.add("b", prompt(10))
    engine.run_all()
    assert engine.outputs["b"][0].num_cached_tokens == 8
    assert engine.said("a") == say(prompt(3, 30), 5)


def test_logits_that_are_no_numbers_fail_their_request_alone(make_engine: Make, say: Any) -> None:
    engine = make_engine()
    engine.add("good", prompt(10))
    engine.add("bad", prompt(10))
    engine.bad = {"bad"}
    engine.step()
    (told,) = engine.outputs["bad"]
    assert told.finish_reason == "error"
    assert "not finite" in told.error
    assert told.new_token_ids == []
    engine.bad = set()
    # Its blocks are not found, the shared ones among them.
    engine.add("again", prompt(10))
    engine.run_all()
    assert engine.outputs["again"][0].num_cached_tokens == 0
    assert engine.said("good") == engine.said("again") == say(prompt(10), 5)


def test_a_worker_that_forgets_a_token_fails_that_request(make_engine: Make) -> None:
    engine = make_engine()
    engine.add("r", prompt(10))
    output = engine.scheduler.schedule()
    (told,) = engine.scheduler.update_from_output(output, ModelRunnerOutput({"r": []}))
    assert told.error == "the worker returned no token for this request"
    assert engine.manager.pool.is_idle


def test_a_failed_step_takes_its_requests_and_no_others(make_engine: Make, say: Any) -> None:
    engine = make_engine(max_num_batched_tokens=12, max_num_seqs=3)
    engine.add("old", prompt(8, 5), max_tokens=1)
    engine.run_all()
    engine.add("a", prompt(20, 1))
    engine.add("b", prompt(10, 20))
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": 12}
    (told,) = engine.scheduler.fail_step(output, RuntimeError("boom"))
    assert (told.request_id, told.finish_reason) == ("a", "error")
    assert told.error == "the step that computed this request failed: boom"
    # What the step should have written is not found; what was there before is.
    engine.add("a", prompt(20, 1))
    engine.add("old2", prompt(9, 5))
    engine.run_all()
    assert engine.outputs["a"][0].num_cached_tokens == 0
    assert engine.outputs["old2"][0].num_cached_tokens == 8
    assert engine.said("b") == say(prompt(10, 20), 5)
    assert engine.manager.pool.is_idle


def test_a_failed_step_repeats_what_the_worker_may_have_missed(make_engine: Make) -> None:
    engine = make_engine(7, max_model_len=20)
    engine.add("a", prompt(11, 1), max_tokens=8, ignore_eos=True)
    engine.add("b", prompt(11, 9), max_tokens=8, ignore_eos=True)
    engine.add("c", prompt(3, 30))
    engine.step()
    engine.step()
    engine.scheduler.finish_requests(["c"])
    output = engine.scheduler.schedule()
    assert (output.preempted_request_ids, output.finished_request_ids) == ({"b"}, {"c"})
    engine.scheduler.fail_step(output, "boom")
    output = engine.scheduler.schedule()
    assert output.preempted_request_ids == {"b"}
    assert output.finished_request_ids == {"a", "c"}
    assert output.cached_requests.resumed_request_ids == {"b"}


def test_steps_come_back_one_by_one(make_engine: Make) -> None:
    engine = make_engine()
    engine.scheduler.schedule()
    empty = engine.scheduler.schedule()  # without tokens nothing is in flight
    assert engine.scheduler.update_from_output(empty, ModelRunnerOutput({})) == []
    engine.add("r", prompt(3))
    output = engine.scheduler.schedule()
    with pytest.raises(RuntimeError, match="must be updated or failed"):
        engine.scheduler.schedule()
    engine.take(engine.scheduler.update_from_output(output, engine.run(output)))
    with pytest.raises(RuntimeError, match="not the step in flight"):
        engine.scheduler.update_from_output(output, ModelRunnerOutput({}))
