# SPDX-License-Identifier: Apache-2.0
"""Steps made and begun while the one before is computed, on the core's own thread: every request
gets what it gets one step at a time, whatever of its output is read on the way.

The device is the CPU, which is done at once. So that a token cannot be read before it is known, its
place on the host holds no token until it is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import InProcessExecutor
from stratakv.engine.request.core_messages import TokenOutput
from stratakv.engine.request.logprobs import PositionLogprobs
from stratakv.engine.sampling import truncation
from stratakv.engine.sampling.sampler import Choice
from stratakv.engine.worker.input_batch import ExpectedTokens, InputBatch

from .conftest import config_of, prompt_of, request, run

NO_TOKEN = 2**30
FIRST = prompt_of(40)[0]  # all prompts begin with it
WISHES: list[dict[str, Any]] = [
    # Thoughts that are used up in the prompt, or a few tokens later, and that begin anew.
    {
        "thinking_token_budget": 6,
        "reasoning_start_token_ids": (FIRST,),
        "reasoning_end_token_ids": (7, 8),
        "logit_bias": {FIRST: 60.0},
    },
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.7},
    {"temperature": 0.8, "seed": 5, "top_k": 9, "min_p": 0.02},
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"min_tokens": 9, "stop_token_ids": tuple(range(0, 200, 2))},
    {"stop_token_ids": tuple(range(0, 200, 3))},
    {"bad_words_token_ids": tuple((token,) for token in range(0, 250, 2))},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"max_tokens": 1, "prompt_logprobs": 1},
]


@pytest.fixture(autouse=True)
def no_token_before_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    real = InputBatch.expect_tokens

    def expect_tokens(self: InputBatch, rows: np.ndarray, *index: Any) -> ExpectedTokens:
        expected = real(self, rows, *index)
        fits = expected.positions < self.max_model_len
        self.token_ids[rows[fits], expected.positions[fits]] = NO_TOKEN
        return expected

    monkeypatch.setattr(InputBatch, "expect_tokens", expect_tokens)


def answers(core: EngineCore, num_requests: int = 20) -> dict[str, list[Any]]:
    """Requests of every kind that share prefixes and come one after the other."""
    found: dict[str, list[Any]] = {}

    def take(outputs: list[TokenOutput]) -> None:
        for output in outputs:
            got = found.setdefault(output.request_id, [[], [], None, None])
            got[0] += output.new_token_ids
            got[1] += map(rounded, output.logprobs or [])
            got[2] = list(map(rounded, output.prompt_logprobs or [])) or got[2]
            got[3] = output.finish_reason

    for number in range(num_requests):
        wishes = {"max_tokens": 12 + number % 5} | WISHES[number % len(WISHES)]
        prompt = prompt_of(40)[: 3 + 7 * (number % 6)] + prompt_of(1 + number % 3, number)
        take(core.add(request(f"r{number}", prompt, **wishes)))
        for _ in range(number % 4):
            take(core.step())
    while core.has_work():
        take(core.step())
    assert len(found) == num_requests
    assert not core.steps.in_flight
    assert all(answer[3] in ("stop", "length") for answer in found.values())
    return found


def rounded(entry: PositionLogprobs | None) -> Any:
    """Without the digits that depend on what else is computed in the step."""
    return entry and (entry.token_ids, [round(one, 9) for one in entry.logprobs], entry.rank)


def engine(model: Path, depth: int, **options: Any) -> Iterator[EngineCore]:
    core = EngineCore(config_of(model, **options), max_steps_in_flight=depth)
    try:
        yield core
    finally:
        core.shutdown(5.0)


@pytest.mark.parametrize("attention", ["auto", "kernels"])
@pytest.mark.parametrize("num_blocks", [20, 80])
def test_overlapping_steps_give_the_same(attention: str, num_blocks: int, tiny_model: Path) -> None:
    """With room for all, and with preemption and a tier below the pool."""
    options = {"attention_backend": attention, "num_blocks": num_blocks, "max_model_len": 96}
    if num_blocks == 20:
        options |= {"kv_offload": "cpu", "kv_offload_cpu_bytes": "2MiB"}
    found = []
    for depth in (1, 2):
        for core in engine(tiny_model, depth, **options):
            found.append(answers(core))
            assert (core.scheduler.counts["preemptions"] > 0) == (num_blocks == 20)
    assert found[0] == found[1]
    thinking = found[0]["r0"][0]
    assert [7, 8] in [thinking[at : at + 2] for at in range(len(thinking))], "an end was forced"


def test_a_step_begins_before_the_tokens_of_the_one_before_are_taken(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = Choice.wait
    monkeypatch.setattr(Choice, "wait", lambda self: (seen.append("wait"), real(self))[1])
    for core in engine(tiny_model, 2):
        assert isinstance(core.executor, InProcessExecutor)
        runner = core.executor.runner
        for name in ("launch_step", "sample"):
            method = getattr(runner, name)
            monkeypatch.setattr(
                runner, name, lambda *given, m=method, n=name: (seen.append(n), m(*given))[1]
            )
        core.add(request("a", prompt_of(9), max_tokens=4))
        while core.has_work():
            core.step()
    ahead = ["wait", "sample", "launch_step"]
    assert seen[:8] == ["launch_step", "sample", "launch_step", *ahead, *ahead[:2]]


def test_tokens_that_may_change_are_taken_first(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that is not free to look at draws top-p from few candidates first."""
    found = []
    for depth in (1, 2):
        monkeypatch.setattr(truncation, "is_free_to_look", lambda device: False)
        monkeypatch.setattr(truncation, "FIRST_CANDIDATES", 2)
        found += [answers(core) for core in engine(tiny_model, depth)]
    assert found[0] == found[1]


def test_the_first_of_two_steps_is_delivered_where_the_second_fails(tiny_model: Path) -> None:
    """Its requests end with the reason, and nobody is counted twice."""
    for core in engine(tiny_model, 2):
        assert isinstance(core.executor, InProcessExecutor)
        runner = core.executor.runner
        core.add(request("a", prompt_of(9), max_tokens=8))
        core.add(request("b", prompt_of(19), max_tokens=8))
        tokens = {"a": 0, "b": 0}
        for output in core.step():
            tokens[output.request_id] += len(output.new_token_ids)
        real, runner.model.logits = runner.model.logits, _raise  # type: ignore[method-assign]
        outputs = core.step()  # its own forward pass had begun
        assert [(o.request_id, len(o.new_token_ids)) for o in outputs] == [("a", 1), ("b", 1)]
        outputs = core.step()
        runner.model.logits = real  # type: ignore[method-assign]
        assert [(o.request_id, o.finish_reason) for o in outputs] == [
            ("a", "error"),
            ("b", "error"),
        ]
        assert all("no more memory" in (o.error or "") for o in outputs)
        assert core.scheduler.counts["generated_tokens"] == 4
        assert core.num_failed_steps == 1
        core.add(request("c", prompt_of(30), max_tokens=3))
        last = [output for _ in range(6) if core.has_work() for output in core.step()]
        assert sum(len(output.new_token_ids) for output in last) == 3
        assert not runner.batch.row_of or set(runner.batch.row_of) == {"c"}


def test_an_id_that_is_used_again_gets_its_own_prompt_logprobs(tiny_model: Path) -> None:
    """Its bearer's first token is under way when the id goes to another one, whose prompt takes
    several steps."""
    found = []
    for depth in (1, 2):
        for core in engine(tiny_model, depth, max_num_batched_tokens=16):
            core.add(request("a", prompt_of(9), max_tokens=8, prompt_logprobs=1))
            if depth == 2:
                core.steps.begin_step()
            core.abort_requests(["a"])
            outputs = core.add(request("a", prompt_of(40, 1), max_tokens=3, prompt_logprobs=1))
            while core.has_work():
                outputs += core.step()
            told = [output.prompt_logprobs for output in outputs if output.prompt_logprobs]
            assert len(told) == 1, "once"
            found.append([list(map(rounded, told[0])), [o.new_token_ids for o in outputs]])
    assert found[0] == found[1]


def test_a_pause_lets_the_steps_that_have_begun_come_back(tiny_model: Path) -> None:
    found = []
    for core in engine(tiny_model, 2):
        for number in range(3):
            core.add(request(f"r{number}", prompt_of(9 + number), max_tokens=9))
        said: dict[str, list[int]] = {f"r{number}": [] for number in range(3)}

        def step(core: EngineCore = core, said: dict[str, list[int]] = said) -> int:
            outputs = core.step()
            for output in outputs:
                said[output.request_id] += output.new_token_ids
            return sum(len(output.new_token_ids) for output in outputs)

        step()
        assert len(core.steps.in_flight) == 1
        core.call("pause", "all")
        assert core.has_work(), "a step is under way"
        assert step() == 3
        while core.has_work():  # one without tokens may be under way
            assert step() == 0
        core.call("resume", "")
        while core.has_work():
            step()
        found.append(said)
    for core in engine(tiny_model, 1):
        whole = {f"r{number}": prompt_of(9 + number) for number in range(3)}
        outputs = run(core, *[request(name, p, max_tokens=9) for name, p in whole.items()])
        assert found == [{name: outputs[name].new_token_ids for name in whole}]


def _raise(*_: object, **__: object) -> None:
    raise MemoryError("no more memory")
