# SPDX-License-Identifier: Apache-2.0
"""Whole engine steps of 256 decodes with a simulated device that takes 10 ms per step.

Scheduler, batch, the step's inputs, sampler and outputs are the engine's own; only the model's
arithmetic and its time are simulated. The device runs one step after the other. A step ends 10 ms
after its launch or, if the device was busy, 10 ms after the end of the previous step; its tokens
cannot be read earlier. The time of a step beyond 10 ms is the time that the host adds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from ...engine.config.engine_options import engine_config
from ...engine.core import engine_core
from ...engine.core.engine_core import EngineCore
from ...engine.core.executor import InProcessExecutor, StepHandle
from ...engine.request.core_messages import AddRequest
from ...engine.request.sampling_params import SamplingParams
from ...engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from ...engine.worker.model_runner import ModelRunner

DEVICE_SECONDS = 0.010
NUM_REQUESTS = 256
_PROMPT_TOKENS = 16
_MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
# A sleep may end so many seconds late, so a busy loop waits for the end of a step.
_TIMER_SECONDS = 0.0005


class ClockedExecutor(InProcessExecutor):
    """An executor with a simulated device, which computes nothing and has a fixed time per step."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        model, hidden_size = runner.model, runner.model.spec.hidden_size
        hidden = torch.zeros(runner.max_num_batched_tokens, hidden_size)
        setattr(model, "forward", lambda ids, *_, **__: hidden[: len(ids)])  # noqa: B010
        self._free_at = 0.0
        self._done_at: dict[int, float] = {}

    def dispatch(self, step: SchedulerOutput) -> StepHandle:
        handle = super().dispatch(step)
        self._free_at = max(self._free_at, time.perf_counter()) + DEVICE_SECONDS
        self._done_at[step.step_id] = self._free_at
        return handle

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        done_at = self._done_at.pop(handle.step.step_id)
        if (left := done_at - time.perf_counter()) > _TIMER_SECONDS:
            time.sleep(left - _TIMER_SECONDS)
        while time.perf_counter() < done_at:
            pass
        return super().result(handle)


class DeviceSteps:
    """An engine with computed prompts, whose requests need more than `max_steps` steps."""

    def __init__(self, model: Path, max_steps: int, *, is_async: bool) -> None:
        max_tokens = max_steps + 4
        longest = _PROMPT_TOKENS + max_tokens
        config = engine_config(
            model,
            {
                "load_format": "dummy",
                "dtype": "float32",
                "max_model_len": longest,
                "max_num_seqs": NUM_REQUESTS,
                "max_num_batched_tokens": NUM_REQUESTS * _PROMPT_TOKENS,
                "num_blocks": NUM_REQUESTS * -(-longest // 16) * 2,
                "async_scheduling": is_async,
            },
        )
        with patch.object(engine_core, "InProcessExecutor", ClockedExecutor):
            self.core = EngineCore(config, max_steps_in_flight=2 if is_async else 1)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        rng = np.random.default_rng(11)
        for number in range(NUM_REQUESTS):
            prompt = rng.integers(0, _MODEL["vocab_size"], _PROMPT_TOKENS, np.int32)
            self.core.add(AddRequest(f"r{number}", prompt.tobytes(), params))
        self.core.step()

    def step(self) -> int:
        """Run one step; return the number of its new tokens."""
        return sum(len(output.new_token_ids) for output in self.core.step())


@contextmanager
def device_engines(max_steps: int) -> Iterator[dict[str, DeviceSteps]]:
    """Yield two engines: `sync` prepares a step after the end of the previous step, `async` during
    the previous step."""
    with TemporaryDirectory(prefix="stratakv-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        engines = {
            name: DeviceSteps(Path(folder), max_steps, is_async=is_async)
            for name, is_async in (("sync", False), ("async", True))
        }
        try:
            yield engines
        finally:
            for engine in engines.values():
                engine.core.shutdown(0.0)
