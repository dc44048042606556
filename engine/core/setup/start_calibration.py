# SPDX-License-Identifier: Apache-2.0
"""The calibration at start: measures seconds of prefill and of loads before the first request.

    one prompt, doubled in length until the time limit                cost of a token
    as many tokens after a context that was never computed            cost of context
    a few loads that the connector plans                              cost of loading

The worker executes the calibration like ordinary steps. The calibration writes only to uncached
blocks. The results are first estimates, which later measurements correct."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ....connector.base import KVConnectorScheduler, TierEstimates
from ....connector.messages import ConnectorMetadata, ConnectorWorkerOutput
from ...request.sampling_params import SamplingParams
from ...scheduler.output import (
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from ..prefill_savings import MIN_PROMPT_TOKENS, PrefillSavings, PromptCost

logger = logging.getLogger(__name__)

# Time limits in seconds, after a first prefill of MIN_PROMPT_TOKENS; one run may exceed a limit.
GROWING_SECONDS = 0.12  # for the choice of the prompt length
PREFILL_SECONDS = 0.3  # for all prefills
READ_SECONDS = 0.1
# Copies take milliseconds; a longer copy means that the device is stuck. Requests must not start
# while such a copy could write to their blocks.
STUCK_SECONDS = 30.0
_MOST_TOKENS = 2048
_POLL_SECONDS = 1e-4
_PARAMS = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


class Worker(Protocol):
    """The part of an executor that the calibration uses."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput: ...
    def start_copies(self, meta: ConnectorMetadata) -> None: ...
    def poll_copies(self) -> ConnectorWorkerOutput | None: ...


@dataclass(frozen=True, slots=True)
class CalibrationBudget:
    """The sizes that limit the calibration's requests and steps."""

    block_size: int
    num_blocks: int  # blocks of the pool, including the null block
    max_model_len: int
    max_num_batched_tokens: int
    num_groups: int = 1

    @property
    def most_tokens(self) -> int:
        """The most tokens of one request that keeps all its blocks in every group."""
        return (self.num_blocks - 1) // self.num_groups * self.block_size


class Calibration:
    """The calibration of one engine, before its first request."""

    def __init__(
        self, worker: Worker, budget: CalibrationBudget, note: Callable[[PromptCost], None]
    ) -> None:
        """`note` is called with the cost of each measured prompt."""
        self._worker = worker
        self._budget = budget
        self._note = note
        self._num_steps = 0
        self._spent = 0.0

    def prefill(self) -> None:
        """Measure prompts. Does nothing if a step has no room for MIN_PROMPT_TOKENS of a prompt."""
        budget = self._budget
        # The sampled token needs a slot too.
        longest = min(budget.max_model_len - 1, budget.most_tokens)
        most = min(_MOST_TOKENS, budget.max_num_batched_tokens, longest)
        if most < MIN_PROMPT_TOKENS:
            return
        count = MIN_PROMPT_TOKENS
        try:
            self._run(count)  # a first run includes one-time work, perhaps most of its time
            self._spent = 0.0
            seconds = self._run(count)
            while 2 * count <= most and self._spent + 2.5 * seconds < GROWING_SECONDS:
                count *= 2
                seconds = self._run(count)
            self._measure(count, 0, seconds)
            far = min(4 * count, longest - count) // budget.block_size
            # Computing after a context may take several times as long.
            if far * budget.block_size >= count and self._spent + 8 * seconds < PREFILL_SECONDS:
                start = far * budget.block_size
                self._measure(count, start, self._run(count, start))
        finally:
            self._execute_step([], {})

    def _measure(self, count: int, start: int, seconds: float) -> None:
        """Run a second time and report the faster of both runs. The first run took `seconds`, which
        may include one-time work. At the time limit, report the first run alone."""
        if self._spent + seconds < PREFILL_SECONDS:
            seconds = min(seconds, self._run(count, start))
        self._note(PromptCost(count, count * start + count * (count - 1) // 2, seconds))

    def _run(self, count: int, start: int = 0) -> float:
        """Compute `count` prompt tokens after `start` other tokens in one step. Return the
        seconds."""
        name = f"calibration-{self._num_steps + 1}"
        num_blocks = -(-(start + count) // self._budget.block_size)
        prompt = np.zeros(start + count, np.int32)
        # Block 0 is the null block, so ids begin at 1.
        starts = range(1, 1 + self._budget.num_groups * num_blocks, num_blocks)
        blocks = tuple([list(range(first, first + num_blocks)) for first in starts])
        began = time.monotonic()
        self._execute_step([NewRequestData(name, prompt, _PARAMS, blocks, start)], {name: count})
        seconds = time.monotonic() - began
        self._spent += seconds
        return seconds

    def _execute_step(self, new: list[NewRequestData], counts: dict[str, int]) -> None:
        """Run a step, which also ends the request of the step before."""
        ended = {f"calibration-{self._num_steps}"} if self._num_steps else set()
        self._num_steps += 1
        total = sum(counts.values())
        self._worker.execute(SchedulerOutput(new, CachedRequestData(), counts, total, ended, set()))


def try_loads(
    connector: KVConnectorScheduler,
    estimates: TierEstimates,
    worker: Worker,
    block_ids: Sequence[int],
) -> None:
    """Make the connector's calibration loads, into blocks that no request holds. All loads have
    ended when the function returns. Raise RuntimeError if one takes over STUCK_SECONDS."""
    deadline = time.monotonic() + STUCK_SECONDS
    while meta := estimates.build_calibration_meta(block_ids, READ_SECONDS):
        worker.start_copies(meta)
        while not (output := worker.poll_copies()):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"a copy from the cpu tier to the KV pool did not end within {STUCK_SECONDS:g} "
                    "s; the device is stuck, or the machine far too busy to serve"
                )
            time.sleep(_POLL_SECONDS)
        connector.update_from_worker(output)


def calibrate(
    worker: Worker,
    budget: CalibrationBudget,
    connector: KVConnectorScheduler,
    estimates: TierEstimates,
    savings: PrefillSavings,
) -> str:
    """Measure the first estimates, and return them as text. If prompts cannot be measured, the
    engine measures its first requests instead. Raises RuntimeError like `try_loads`."""

    began = time.monotonic()
    try:
        Calibration(worker, budget, savings.record_cost).prefill()
    except Exception:
        logger.exception("no prompt could be measured; the first requests will teach instead")
    try_loads(connector, estimates, worker, range(1, budget.num_blocks))
    return f"offload: {estimates.describe()}; tried in {time.monotonic() - began:.2f} s"
