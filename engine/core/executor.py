# SPDX-License-Identifier: Apache-2.0
"""Executors: the engine core's interface to the worker, which computes the steps.

    handle = dispatch(step)     starts copies, changes of the batch and the forward pass
    sample(handle, mask)        starts sampling of tokens that the mask allows
    result(handle)              waits for the tokens

Steps are computed in the order in which they were dispatched, and each handle goes through the
three calls once. A step may be dispatched after `sample` of the step before; its input may be
tokens that are still being sampled. So the engine core calls `dispatch 1 · sample 1 · dispatch 2 ·
result 1 · sample 2 · dispatch 3 · result 2`, and the device never waits. A mask may depend on the
tokens of all earlier steps, because it is made during the forward pass.

`result` raises the error of a step, even if an earlier call caused the error. A step that was
already dispatched when an earlier step failed is refused (`SchedulerOutput.last_failed_id`). The
copies of both steps are still made and reported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...connector.base import CLOSE_SECONDS, KVConnectorWorker
from ...connector.messages import ConnectorMetadata, ConnectorWorkerOutput
from ..config.engine_config import EngineConfig
from ..models.dtypes import dtype_name
from ..models.model_source import ModelSource
from ..models.model_spec import ModelSpec
from ..sampling.processor_loading import load_processors
from ..sampling.token_mask import TokenMask
from ..scheduler.output import ModelRunnerOutput, SchedulerOutput
from ..worker.adapter_slots import ReadAdapter
from ..worker.begun_step import BegunStep
from ..worker.model_runner import ModelRunner
from ..worker.runtime.placement import Placement
from ..worker.speculation.proposers import make_proposer


class ExecutorDied(RuntimeError):
    """The worker has ended or no longer answers; it computes no more steps."""


@dataclass(slots=True)
class StepHandle:
    """A step that was dispatched to an executor."""

    step: SchedulerOutput


class Executor(ABC):
    """Computes steps with a worker. Called by the engine's step thread only."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """The number of blocks of the KV pool, the null block included."""

    @property
    @abstractmethod
    def max_model_len(self) -> int:
        """The number of tokens of the longest request that the pool can hold."""

    @property
    def is_alive(self) -> bool:
        """Whether the executor can still compute. Otherwise the next step raises the reason."""
        return True

    def end_by(self, deadline: float) -> None:  # noqa: B027 - most have nothing to do
        """Set the deadline (monotonic seconds) for all waits for the worker, which counts as dead
        afterwards. Does nothing for an executor without a worker process."""

    def enter_thread(self) -> None:  # noqa: B027 - most have nothing to do
        """Make the calling thread the engine's step thread."""

    @abstractmethod
    def dispatch(self, step: SchedulerOutput) -> StepHandle:
        """Start a step: its copies, its changes of the batch and its forward pass."""

    @abstractmethod
    def sample(self, handle: StepHandle, mask: TokenMask | None = None) -> None:
        """Sample the tokens of a dispatched step; `mask` bans tokens that grammars forbid."""

    @abstractmethod
    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        """Wait for the result of the oldest step. Raises the step's error, or ExecutorDied if the
        worker has ended."""

    @abstractmethod
    def call_worker(
        self, name: str, *, meta: ConnectorMetadata | None = None, seconds: float | None = None
    ) -> ConnectorWorkerOutput | None:
        """Call the worker between steps and wait for its answer. `name` is `start_copies` (with
        `meta`), `poll_copies`, or `shutdown` (within `seconds`). Raises ValueError for another
        name, and any exception of the worker."""

    @abstractmethod
    def read_adapter(self, path: Path) -> ReadAdapter:
        """Read an adapter from its folder. Any thread may call this. Raises ConfigError if it is
        no adapter of the model."""

    @abstractmethod
    def add_adapter(self, adapter: ReadAdapter) -> None:
        """Add an adapter that `read_adapter` returned, once, to the worker, for the steps
        dispatched after this call."""

    @abstractmethod
    def drop_adapter(self, fingerprint: bytes) -> None:
        """Drop an adapter, which no request may have, from the worker."""

    @abstractmethod
    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> ConnectorWorkerOutput | None:
        """Wait up to `timeout_seconds` for copies to end, then release everything. Return the
        transfers that the connector's worker side had not reported yet. Idempotent."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        handle = self.dispatch(step)
        self.sample(handle)
        return self.result(handle)

    def start_copies(self, meta: ConnectorMetadata) -> None:
        self.call_worker("start_copies", meta=meta)

    def poll_copies(self) -> ConnectorWorkerOutput | None:
        """Return the transfers that the connector's worker side has finished; None without a
        connector."""
        return self.call_worker("poll_copies")


def load_runner(
    config: EngineConfig,
    num_blocks: int | None,
    max_model_len: int,
    *,
    spec: ModelSpec,
    dtype: torch.dtype,
    placement: Placement,
    connector: KVConnectorWorker | None,
    progress: Callable[[str], None],
    draft: ModelSource | None = None,
) -> ModelRunner:
    """Load the model runner for an engine's settings; `ModelRunner` documents the arguments. Raises
    ConfigError for a logits processor that cannot be loaded."""
    processors = load_processors(config.logits_processors)
    return ModelRunner(
        spec,
        config.model.path,
        dtype=dtype_name(dtype),
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=max_model_len,
        num_groups=config.cache.num_groups,
        kernel_block_size=config.cache.kernel_block_size,
        most_step_tokens=config.scheduler.most_step_tokens,
        is_length_asked=config.model.max_model_len is not None,
        connector=connector,
        placement=placement,
        processors=processors,
        proposer=make_proposer(config.speculative),
        draft=draft,
        most_drafts=config.speculative.most_drafts(has_states=spec.state is not None),
        tells_experts=config.model.enable_return_routed_experts,
        num_adapter_slots=config.lora.num_slots,
        max_lora_rank=config.lora.max_rank,
        progress=progress,
    )


def call_runner(
    runner: ModelRunner, name: str, meta: ConnectorMetadata | None, seconds: float | None
) -> ConnectorWorkerOutput | None:
    """Execute `Executor.call_worker` in the process of the model runner."""
    if name == "start_copies" and meta is not None:
        runner.start_copies(meta)
        return None
    if name == "shutdown" and seconds is not None:
        runner.shutdown(seconds)
    elif name != "poll_copies":
        raise ValueError(f"a worker does not answer {name!r} with these arguments")
    return runner.poll_copies()


@dataclass(slots=True)
class _LocalHandle(StepHandle):
    begun: BegunStep | None = None
    is_sampled: bool = False
    error: Exception | None = None


class InProcessExecutor(Executor):
    """An executor that runs the model runner on the calling thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @property
    def num_blocks(self) -> int:
        return self.runner.pool.num_blocks

    @property
    def max_model_len(self) -> int:
        return self.runner.max_model_len

    def enter_thread(self) -> None:
        self.runner.enter_thread()

    def dispatch(self, step: SchedulerOutput) -> StepHandle:
        handle = _LocalHandle(step)
        try:
            handle.begun = self.runner.launch_step(step)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            handle.error = error
        return handle

    def sample(self, handle: StepHandle, mask: TokenMask | None = None) -> None:
        assert isinstance(handle, _LocalHandle)
        handle.is_sampled = True
        if handle.begun is None:
            return
        try:
            self.runner.sample(handle.begun, mask)
        except Exception as error:  # noqa: BLE001 - `result` raises it
            handle.error, handle.begun = error, None

    def result(self, handle: StepHandle) -> ModelRunnerOutput:
        assert isinstance(handle, _LocalHandle)
        if not handle.is_sampled or (handle.begun is None and handle.error is None):
            raise RuntimeError(f"step {handle.step.step_id} was not sampled, or is over")
        begun, error = handle.begun, handle.error
        handle.begun = handle.error = None
        if begun is None:
            assert error is not None
            raise error
        return self.runner.collect_output(begun)

    def call_worker(
        self, name: str, *, meta: ConnectorMetadata | None = None, seconds: float | None = None
    ) -> ConnectorWorkerOutput | None:
        return call_runner(self.runner, name, meta, seconds)

    def read_adapter(self, path: Path) -> ReadAdapter:
        return self.runner.adapters.read_adapter(path)

    def add_adapter(self, adapter: ReadAdapter) -> None:
        self.runner.adapters.add_adapter(adapter)

    def drop_adapter(self, fingerprint: bytes) -> None:
        self.runner.drop_adapter(fingerprint)

    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> ConnectorWorkerOutput | None:
        return self.call_worker("shutdown", seconds=timeout_seconds)
