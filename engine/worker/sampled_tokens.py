# SPDX-License-Identifier: Apache-2.0
"""SampledTokens: writes a step's sampled tokens to the batch and to the step's result.

A request gets no token if its logits are not finite, if one of its logits processors failed, or if
all its tokens are banned. The result names such requests with the reason."""

from __future__ import annotations

from ..batch.batch_update import IntArray
from ..sampling.sampler import Sampled
from ..scheduler.output import ModelRunnerOutput
from .begun_step import SampledStep
from .input_batch import InputBatch
from .speculation.drafted_rows import DraftedRows
from .speculation.step_drafts import StepDrafts


class SampledTokens:
    """The writer of one model runner."""

    def __init__(self, batch: InputBatch, drafts: StepDrafts) -> None:
        self._batch, self._drafts = batch, drafts

    def write_step(self, step: SampledStep, result: ModelRunnerOutput) -> None:
        """Wait for the tokens of a sampled step, and write them."""
        if step.drafted is not None:
            self._write_checked(step, step.drafted, result)
            return
        sampled = step.choice.wait()
        requests, lost = step.expected.requests, []
        if sampled.failures or not (all(sampled.is_finite) and all(sampled.has_choice)):
            for index, request in enumerate(requests):
                if _note_lost(request.request_id, index, sampled, result):
                    lost.append(index)
        self._batch.take_tokens(step.expected, sampled.token_ids, lost)
        ids = [request.request_id for request in requests]
        result.sampled_token_ids.update(
            zip(ids, [[token_id] for token_id in sampled.token_ids], strict=True)
        )
        if sampled.logprobs is not None:
            entries = zip(ids, sampled.logprobs, strict=True)
            result.logprobs = {i: [entry] for i, entry in entries if entry is not None}
        for index in lost:
            result.sampled_token_ids[ids[index]] = []
            result.logprobs.pop(ids[index], None)

    def _write_checked(
        self, step: SampledStep, drafted: DraftedRows, result: ModelRunnerOutput
    ) -> None:
        """Write the accepted tokens of a step with drafts."""
        sampled = step.choice.wait()
        for request, place in self._drafts.take_checked(step.expected, drafted, sampled, result):
            _note_lost(request.request_id, place, sampled, result)

    def write_failures(
        self, failures: dict[int, str], rows: IntArray, result: ModelRunnerOutput
    ) -> None:
        """Write the failed logits processors, index in `rows` -> error, to the result."""
        for index, error in failures.items():
            request = self._batch.requests[rows[index]]
            if request is not None:
                result.processor_errors[request.request_id] = error


def _note_lost(request_id: str, place: int, sampled: Sampled, result: ModelRunnerOutput) -> bool:
    """Write to the result the reason why a request gets no token from row `place` of the logits.
    Return False if the request gets a token."""
    if not sampled.is_finite[place]:
        result.nan_request_ids.add(request_id)
    elif place in sampled.failures:
        result.processor_errors[request_id] = sampled.failures[place]
    elif not sampled.has_choice[place]:
        result.banned_request_ids.add(request_id)
    else:
        return False
    return True
