# SPDX-License-Identifier: Apache-2.0
"""The seam between core and worker: steps that overlap or fail, masks, calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.executor import InProcessExecutor
from stratakv.engine.sampling.token_mask import TokenMask

from .conftest import MakeCore, Reference, config_of, finish, prompt_of, request


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_two_steps_in_flight_give_the_tokens_of_one(
    tiny_model: Path, greedy_reference: Reference, runs_ahead: bool
) -> None:
    options = {"kv_offload": "cpu", "kv_offload_cpu_bytes": "2MiB", "num_blocks": 40}
    core = EngineCore(
        config_of(tiny_model, async_scheduling=runs_ahead, **options), max_steps_in_flight=2
    )
    try:
        prompts = {f"r{i}": prompt_of(20 + 11 * i, i) for i in range(6)}
        for name, prompt in prompts.items():
            core.add(request(name, prompt))
        answers = finish(core, [], len(prompts))
        for name, prompt in prompts.items():
            assert answers[name].new_token_ids == greedy_reference(prompt, 6)
    finally:
        core.shutdown(5.0)


def test_a_step_behind_one_that_failed_is_not_computed(
    tiny_model: Path, greedy_reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ends with it, its copies begin, and the worker serves those that come after."""
    core = EngineCore(config_of(tiny_model), max_steps_in_flight=2)
    try:
        assert isinstance(core.executor, InProcessExecutor)
        runner = core.executor.runner
        core.add(request("a", prompt_of(150)))  # three steps
        with monkeypatch.context() as patched:
            patched.setattr(runner.model, "forward", _raise)
            core.steps.begin_step()
        seen = len(runner.batch)
        core.steps.begin_step()
        assert len(runner.batch) == seen
        (output,) = core.step()
        assert output.finish_reason == "error"
        assert "no more memory" in (output.error or "")
        assert core.num_failed_steps == 1
        assert not core.steps.in_flight
        core.add(request("b", prompt_of(30)))
        assert finish(core, [], 1)["b"].new_token_ids == greedy_reference(prompt_of(30), 6)
    finally:
        core.shutdown(5.0)


def test_what_a_refused_step_told_is_told_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by one without tokens: else the worker would keep who has ended."""
    core = EngineCore(config_of(tiny_model, async_scheduling=False), max_steps_in_flight=2)
    try:
        assert isinstance(core.executor, InProcessExecutor)
        runner = core.executor.runner
        core.steps.depth = 1  # steps are begun here
        core.add(request("ends", prompt_of(20)))
        core.step()
        core.add(request("fails", prompt_of(20, 1)))
        with monkeypatch.context() as patched:
            patched.setattr(runner.model, "forward", _raise)
            core.steps.begin_step()
        core.abort_requests(["ends"])
        core.steps.begin_step()
        first, last = (step.handle.step for step in core.steps.in_flight)
        assert first.num_scheduled_tokens
        assert last.finished_request_ids == {"ends"}
        assert not last.num_scheduled_tokens
        core.step()
        assert "ends" in core.scheduler._states.finished_ids
        core.add(request("b", prompt_of(30)))
        finish(core, [], 1)
        core.step()
        assert not (runner._steps.requests or runner.batch.row_of)
    finally:
        core.shutdown(5.0)


def test_a_mask_says_which_tokens_may_be_chosen(make_core: MakeCore) -> None:
    core = make_core()
    core.add(request("free", prompt_of(20)))
    core.add(request("bound", prompt_of(20, 1)))
    step = core.scheduler.schedule()
    allowed = np.zeros((1, 9), np.uint32)
    allowed[0, 6] = 1 << 11  # token 203, and no other
    handle = core.executor.dispatch(step)
    core.executor.sample(handle, TokenMask(["bound"], allowed))
    result = core.executor.result(handle)
    outputs = {o.request_id: o for o in core.scheduler.update_from_output(step, result)}
    assert outputs["bound"].new_token_ids == [203]
    assert outputs["free"].new_token_ids != [203]


def test_a_mask_of_another_shape_fails_its_step(make_core: MakeCore) -> None:
    core = make_core()
    core.add(request("a", prompt_of(20)))
    step = core.scheduler.schedule()
    handle = core.executor.dispatch(step)
    core.executor.sample(handle, TokenMask(["a"], np.zeros((2, 9), np.uint32)))
    with pytest.raises(ValueError, match="a row of words for each"):
        core.executor.result(handle)


def test_a_result_is_taken_once(make_core: MakeCore) -> None:
    core = make_core()
    step = core.scheduler.schedule()
    handle = core.executor.dispatch(step)
    with pytest.raises(RuntimeError, match="was not sampled, or is over"):
        core.executor.result(handle)
    core.executor.sample(handle)
    core.executor.result(handle)
    with pytest.raises(RuntimeError, match="was not sampled, or is over"):
        core.executor.result(handle)


def _raise(*_: object, **__: object) -> None:
    raise MemoryError("no more memory")
