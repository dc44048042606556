# SPDX-License-Identifier: Apache-2.0
"""SampledTokens: samples the tokens of a step, and writes them to the batch and to the step's
result.

A request gets no token if its logits are not finite, if one of its logits processors failed, or if
all its tokens are banned. The result names such requests with the reason."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..batch.batch_update import IntArray
from ..models.decoder import Decoder
from ..sampling.sampler import Sampled, Sampler
from ..sampling.token_mask import TokenMask
from ..scheduler.output import ModelRunnerOutput
from .begun_step import BegunStep, SampledStep
from .input_batch import InputBatch
from .speculation.drafted_rows import DraftedRows
from .speculation.step_drafts import StepDrafts


class SampledTokens:
    """The sampled tokens of one model runner."""

    def __init__(
        self, model: Decoder, sampler: Sampler, batch: InputBatch, drafts: StepDrafts
    ) -> None:
        self._model, self._sampler = model, sampler
        self._batch, self._drafts = batch, drafts

    def begin_sampling(
        self, step: BegunStep, hidden: Tensor, mask: TokenMask | None
    ) -> SampledStep:
        """Start to sample a step from `hidden` `[rows, hidden]`. `mask` has the allowed tokens of
        some requests, and every request in it must get a token."""
        drafted, rows, index = step.drafted, step.rows, None
        if drafted is not None:
            rows, index = drafted.rows, drafted.known_index()
        masked: Sequence[int] = ()
        wanted = None  # tokens whose logits are needed; None: all
        if mask is not None:
            masked = mask.places_among(rows, self._batch.row_of)
            if self._model.can_leave_logits_out and len(set(masked)) == len(rows):
                if not self._sampler.tells_logprobs(rows):
                    of_any = mask.of_any
                    # An empty set would not show whether logits are finite.
                    wanted = of_any if of_any.any() else None
        logits = self._model.logits(hidden, wanted)
        if drafted is None:
            choice = self._sampler.sample_async(logits, rows, mask, masked)
        else:
            choice = self._sampler.sample_async(
                logits,
                rows,
                mask,
                masked,
                offsets=drafted.offsets,
                drafts=drafted.draft_token_ids,
            )
        return SampledStep(choice, self._batch.expect_tokens(step.rows, index), drafted)

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
