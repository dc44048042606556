# SPDX-License-Identifier: Apache-2.0
"""The calibration at start: bounded, without traces, and never in the way of a start."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from stratakv.connector.costs.rates import PrefillRate
from stratakv.connector.messages import ConnectorMetadata, ConnectorWorkerOutput
from stratakv.engine.core.engine_core import EngineCore
from stratakv.engine.core.prefill_savings import MIN_PROMPT_TOKENS, PrefillSavings, PromptCost
from stratakv.engine.core.setup import start_calibration as calibration
from stratakv.engine.core.setup.start_calibration import Calibration, CalibrationBudget, calibrate
from stratakv.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput

from .conftest import MakeCore, prompt_of, request, run


class Runner:
    """Takes `seconds_of(tokens, context)` for a step, and holds what requests it knows."""

    def __init__(self, seconds_of: Callable[[int, int], float]) -> None:
        self._seconds_of = seconds_of
        self.known: set[str] = set()
        self.steps: list[tuple[int, int]] = []  # tokens, context
        self.now = 0.0

    def monotonic(self) -> float:
        """The clock of the calibration: only steps take time."""
        return self.now

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.known -= output.finished_request_ids
        for new in output.new_requests:
            assert new.request_id not in self.known
            self.known.add(new.request_id)
            count = output.num_scheduled_tokens[new.request_id]
            assert len(new.prompt_token_ids) == new.num_computed_tokens + count
            assert 0 not in new.block_ids[0], "the null block is never written"
            self.steps.append((count, new.num_computed_tokens))
            self.now += self._seconds_of(count, new.num_computed_tokens)
        return ModelRunnerOutput({})

    def start_copies(self, meta: ConnectorMetadata) -> None:
        """A copy that never ends."""

    def poll_copies(self) -> ConnectorWorkerOutput:
        return ConnectorWorkerOutput()


def budget(**changes: int) -> CalibrationBudget:
    sizes = {"block_size": 16, "num_blocks": 600, "max_model_len": 9000,
             "max_num_batched_tokens": 512}  # fmt: skip
    return CalibrationBudget(**(sizes | changes))


def measured(runner: Runner, budget: CalibrationBudget) -> list[PromptCost]:
    costs: list[PromptCost] = []
    with mock.patch.object(calibration, "time", runner):
        Calibration(runner, budget, costs.append).prefill()
    assert runner.known == set()
    return costs


def test_a_prompt_and_one_far_on_are_measured() -> None:
    runner = Runner(lambda count, context: count * (2e-5 + 2e-8 * context))
    near, far = measured(runner, budget())
    assert near[:2] == (512, 512 * 511 // 2)
    assert far[:2] == (512, 512 * 2048 + 512 * 511 // 2)
    assert near.seconds == pytest.approx(512 * 2e-5)
    assert far.seconds > 2 * near.seconds


def test_a_slow_model_is_asked_for_little() -> None:
    runner = Runner(lambda count, context: 0.1 * count / MIN_PROMPT_TOKENS)
    [cost] = measured(runner, budget())
    assert cost.num_tokens == MIN_PROMPT_TOKENS
    assert len(runner.steps) <= 3
    assert runner.now < 0.4


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"max_num_batched_tokens": 100}, (64, 256)),
        ({"max_model_len": 200}, (128, 0)),
        ({"max_model_len": 300, "block_size": 32}, (256, 0)),
    ],
)
def test_it_stays_within_what_a_step_and_a_request_may_take(
    changes: dict[str, int], most: tuple[int, int]
) -> None:
    runner = Runner(lambda count, context: 0.0)
    size = budget(**changes)
    assert measured(runner, size)
    for count, context in runner.steps:
        assert count <= size.max_num_batched_tokens
        assert count + context < size.max_model_len
        assert context % size.block_size == 0
    assert max(runner.steps) == (most[0], most[1])


def test_steps_too_small_to_be_measured_are_not_made() -> None:
    runner = Runner(lambda count, context: 0.0)
    assert measured(runner, budget(max_num_batched_tokens=MIN_PROMPT_TOKENS - 1)) == []
    assert runner.steps == []


class CountingRate(PrefillRate):
    """Counts what it is told."""

    notes = 0

    def record_prefill(self, num_tokens: int, num_context_tokens: int, seconds: float) -> None:
        self.notes += 1
        super().record_prefill(num_tokens, num_context_tokens, seconds)


class Stuck:
    """Estimates by a copy that never ends."""

    def __init__(self, *, copies: bool = True) -> None:
        self._meta = ConnectorMetadata(overtaken=[1] if copies else [])

    def build_calibration_meta(self, block_ids: object, seconds: float) -> ConnectorMetadata:
        return self._meta

    def describe(self) -> str:
        return "nothing"


def test_nobody_is_served_beside_a_copy_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could still write to its blocks when they are a request's."""
    monkeypatch.setattr(calibration, "STUCK_SECONDS", 0.05)
    rate = CountingRate()
    both, savings = Stuck(), PrefillSavings(rate)
    with pytest.raises(RuntimeError, match="did not end within"):
        calibrate(Runner(lambda *_: 0.0), budget(), both, both, savings)  # type: ignore[arg-type]
    assert rate.notes == 2
    assert savings.seconds_per_token is not None


def test_a_runner_that_fails_does_not_fail_the_start(caplog: pytest.LogCaptureFixture) -> None:
    def fail(count: int, context: int) -> float:
        raise RuntimeError("no such device")

    both, savings = Stuck(copies=False), PrefillSavings()
    with caplog.at_level(logging.ERROR):
        line = calibrate(Runner(fail), budget(), both, both, savings)  # type: ignore[arg-type]
    assert line.startswith("offload: nothing")
    assert "no such device" in caplog.text


def test_a_start_with_tiers_measures_and_says_so(make_core: MakeCore, tmp_path: Path) -> None:
    said: list[str] = []
    core = make_core(
        progress=said.append, kv_offload="cpu,ssd", kv_offload_cpu_bytes="2MiB",
        kv_offload_ssd_path=str(tmp_path), kv_offload_ssd_bytes="32MiB",
    )  # fmt: skip
    [line] = [text for text in said if text.startswith("offload: prefill ")]
    assert "tokens/s, cpu loads" in line and "ssd loads 1 GB/s (not measured)" in line
    estimates = core.call("stats", "")["connector"]["estimates"]
    assert estimates["prefill_tokens_per_second"] > 0
    check_untouched(core)
    assert run(core, request("a", prompt_of(100)))["a"].error is None


def check_untouched(core: EngineCore) -> None:
    stats = core.call("stats", "")
    assert not core.has_work()
    assert stats["scheduler"]["num_free_blocks"] == core.num_blocks - 1
    assert stats["connector"]["load_bytes"] == 0
    assert stats["core"]["iteration_tokens"]["total"] == 0
    assert stats["core"]["saved_seconds"] == {}


def test_without_tiers_nothing_is_tried(make_core: MakeCore) -> None:
    said: list[str] = []
    core = make_core(progress=said.append)
    assert not [text for text in said if text.startswith("offload")]
    assert core.call("stats", "")["core"]["seconds_per_token"] is None
