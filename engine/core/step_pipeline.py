# SPDX-License-Identifier: Apache-2.0
"""StepPipeline: schedules steps, sends them to the worker and processes their results, with several
steps in flight.

    schedule ──► dispatch (forward pass begins) ──► sample (grammars' masks) ──► result ──► update

Up to `depth` steps are in flight, and the result of the oldest step comes first. A step is sampled
after the result of the step before it, or earlier, when the next step is about to be dispatched."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from ..request.core_messages import INVALID_GRAMMAR, TokenOutput
from ..request.request import RequestStatus
from ..sampling.token_mask import TokenMask
from ..scheduler.output import SchedulerOutput
from ..scheduler.scheduler import Scheduler
from ..structured.manager import GrammarManager
from ..worker.runtime.device_runtime import is_device_lost
from .continued.continuations import Continuations
from .core_stats import CoreStats
from .executor import Executor, ExecutorDied, StepHandle

logger = logging.getLogger(__name__)

# The most failed steps in a row, after which the worker counts as lost; a single bad request seldom
# fails more than its own step. A lost device counts at once.
MAX_FAILED_STEPS = 5


@dataclass(slots=True)
class DispatchedStep:
    """A dispatched step whose result has not come back."""

    handle: StepHandle
    began: float  # monotonic
    is_sampled: bool = False


@dataclass(slots=True, eq=False)
class StepPipeline:
    """The steps of one engine core, whose thread makes all calls. `in_flight` holds the steps whose
    results have not come back. `num_failed_steps` counts failed steps in a row; steps without
    tokens do not reset it."""

    scheduler: Scheduler
    executor: Executor
    grammars: GrammarManager
    continuations: Continuations
    stats: CoreStats
    depth: int
    num_failed_steps: int = field(init=False, default=0)
    in_flight: deque[DispatchedStep] = field(init=False, default_factory=deque)  # the oldest first
    # The last outputs of requests that ended without a token of a step.
    _ended: list[TokenOutput] = field(init=False, default_factory=list)
    _last_ended: float = field(init=False, default=0.0)  # when the last result came

    def run_step(self) -> list[TokenOutput]:
        """Begin steps until `depth` are in flight. Process the result of the oldest step and return
        its outputs. An error of the worker ends the requests of this step and all later steps in
        flight.

        Raises RuntimeError if the worker cannot recover (after MAX_FAILED_STEPS in a row, or with a
        lost device), and ExecutorDied if it has ended."""
        in_flight = self.in_flight
        while not in_flight or (len(in_flight) < self.depth and self.scheduler.has_runnable_work()):
            try:
                self.begin_step()
            except ExecutorDied:
                if not in_flight:
                    raise
                break  # the results of earlier steps are still to be delivered
        step = in_flight.popleft()
        output = step.handle.step
        try:
            self._sample(step)
            result = self.executor.result(step.handle)
        except Exception as error:  # noqa: BLE001 - logged, and sent with the outputs
            return self._fail_step(output, error)
        if output.num_scheduled_tokens:
            self.num_failed_steps = 0
        now = time.monotonic()
        began, self._last_ended = max(step.began, self._last_ended), now
        self.stats.note_step(output, result, now - began)
        if (speculation := self.scheduler.speculation) is not None:
            speculation.note_step(output, result, now - began)
        outputs = self.continuations.take(self.scheduler.update_from_output(output, result))
        if in_flight:  # sampled before the counts below, so that the worker does not wait
            try:
                self._sample(in_flight[0])
            except ExecutorDied:
                pass  # the next call raises it; the tokens are delivered before
        self.stats.savings.add_counts(self.scheduler.counts)
        return outputs + self._take_ended()

    def begin_step(self) -> None:
        """Schedule a step and begin its forward pass."""
        held = self.grammars.held()
        if self.scheduler.speculation is not None:
            for request_id in self.grammars.without_drafts():
                self.scheduler.drop_drafts(request_id)
        output = self.scheduler.schedule(held)
        if self.in_flight:
            self._sample(self.in_flight[-1])
        elif self.grammars:  # all tokens are known, so masks are made during the forward pass
            self.grammars.begin_masks(self.scheduler.choosing(output), output.draft_token_ids)
        began = time.monotonic()
        self.in_flight.append(DispatchedStep(self.executor.dispatch(output), began))

    def give_up_steps(self) -> list[TokenOutput]:
        """Wait for all steps in flight and drop their tokens, but process their reports of
        copies."""
        outputs: list[TokenOutput] = []
        while self.in_flight:
            step = self.in_flight.popleft()
            output, result = step.handle.step, None
            try:
                self._sample(step)
                result = self.executor.result(step.handle)
            except Exception as error:  # noqa: BLE001 - steps after a failed step should fail
                logger.debug("a step was given up: %s", error)
            outputs += self.continuations.take(self.scheduler.give_up_step(output, result))
        return outputs

    def _sample(self, step: DispatchedStep) -> None:
        if not step.is_sampled:
            step.is_sampled = True
            mask = self._mask_of(step.handle.step) if self.grammars else None
            self.executor.sample(step.handle, mask)

    def _mask_of(self, output: SchedulerOutput) -> TokenMask | None:
        """Return the mask of tokens that grammars allow. End the requests that have reached the end
        of their grammar."""
        choosing = () if self.grammars.has_begun else self.scheduler.choosing(output)
        mask, ended = self.grammars.masks(choosing, output.draft_token_ids)
        for request, error in ended:
            status = RequestStatus.FINISHED_ERROR if error else RequestStatus.FINISHED_STOPPED
            for last in self.scheduler.finish_requests([request.request_id], status, error or None):
                last.error_code = INVALID_GRAMMAR if error else None
                self._ended.append(last)
        return mask

    def _take_ended(self) -> list[TokenOutput]:
        ended, self._ended = self._ended, []
        return ended

    def _fail_step(self, output: SchedulerOutput, error: Exception) -> list[TokenOutput]:
        count = len(output.num_scheduled_tokens)
        logger.error("a step of %d requests failed in the worker", count, exc_info=error)
        outputs = self.continuations.take(self.scheduler.fail_step(output, error))
        outputs += self.give_up_steps()
        outputs += self._take_ended()
        self.num_failed_steps += 1
        if isinstance(error, ExecutorDied):
            raise error
        if is_device_lost(error):
            raise RuntimeError(f"the device is lost: {error}") from error
        if self.num_failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(
                f"the worker has failed {self.num_failed_steps} steps in a row, the last with: "
                f"{error}"
            ) from error
        return outputs
