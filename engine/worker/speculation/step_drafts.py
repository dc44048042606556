# SPDX-License-Identifier: Apache-2.0
"""StepDrafts: the draft tokens of the worker's steps, from the proposer to the check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ...batch.batch_update import IntArray
from ...sampling.sampler import Sampled, Sampler
from ...scheduler.output import ModelRunnerOutput, SchedulerOutput
from ..input_batch import ExpectedTokens, InputBatch, WorkerRequest
from .drafted_rows import DraftedRows
from .proposer import ComputedStep, DraftQuery, Proposer


class StepDrafts:
    """Writes the draft tokens of a step to the batch, takes the accepted tokens, and requests new
    drafts from the proposer. All calls come from the worker's thread. Without a `proposer` there
    are no new drafts, but drafts in the scheduler's steps are still checked."""

    def __init__(self, batch: InputBatch, sampler: Sampler, proposer: Proposer | None) -> None:
        self._batch, self._sampler, self._proposer = batch, sampler, proposer

    @property
    def reads_hidden(self) -> bool:
        """Whether `follow_step` needs the hidden states of all tokens of a step."""
        return self._proposer is not None and self._proposer.reads_hidden

    def remove_request(self, request_id: str) -> None:
        """Drop the proposer's data of an ended request. An unknown id is ignored."""
        if self._proposer is not None:
            self._proposer.remove_request(request_id)

    def put_drafts(self, drafts: Mapping[str, Sequence[int]], rows: IntArray) -> IntArray:
        """Write the draft tokens of a step to the batch, after the tokens of their rows. Return the
        number of drafts of each row, `[rows]`."""
        num_drafts = np.zeros(len(rows), np.int64)
        if drafts:
            index_of = {row: index for index, row in enumerate(rows.tolist())}
            for request_id, token_ids in drafts.items():
                row = self._batch.row_of[request_id]
                self._batch.put_drafts(row, token_ids)
                num_drafts[index_of[row]] = len(token_ids)
        return num_drafts

    def take_checked(
        self,
        expected: ExpectedTokens,
        drafted: DraftedRows,
        sampled: Sampled,
        result: ModelRunnerOutput,
    ) -> list[tuple[WorkerRequest, int]]:
        """Write the accepted tokens of a step to the batch and to the step's result. Return the
        requests without drafts that got no token, each with its row of logits. Requests that had
        drafts and got no token are left out: a draft may be the cause, so the token is computed
        again without drafts."""
        accepted, firsts = drafted.accept(sampled), drafted.firsts.tolist()
        checked = list(zip(expected.requests, accepted, firsts, strict=True))
        for request, tokens, place in checked:
            result.sampled_token_ids[request.request_id] = tokens
            if sampled.logprobs is not None:
                entries = sampled.logprobs[place : place + len(tokens)]
                if told := [entry for entry in entries if entry is not None]:
                    result.logprobs[request.request_id] = told
        lost = [index for index, tokens in enumerate(accepted) if not tokens]
        self._batch.take_tokens(expected, [tokens[0] if tokens else 0 for tokens in accepted], lost)
        counts = drafted.counts.tolist()
        for (request, tokens, _), count in zip(checked, counts, strict=True):
            if count > 1:
                self._batch.take_accepted(request, tokens[1:], count - len(tokens))
        return [(checked[index][0], firsts[index]) for index in lost if counts[index] == 1]

    def follow_step(self, step: ComputedStep) -> None:
        """Pass a step whose forward pass has been launched to the proposer."""
        if self._proposer is not None:
            self._proposer.follow_step(step)

    def propose(
        self,
        output: SchedulerOutput,
        requests: Sequence[WorkerRequest],
        result: ModelRunnerOutput,
    ) -> None:
        """Add new drafts to the result, for requests that got tokens in this step. A request that
        has left the batch gets no drafts, even if a new request has its id. Blocks after a
        request's last token, which old drafts used, are removed from the request's row."""
        if self._proposer is not None and output.wanted_drafts:
            self._propose(self._proposer, output.wanted_drafts, requests, result)
        given = output.wanted_drafts.keys() | output.draft_token_ids.keys()
        for request in requests if given else ():
            if request.request_id in given:
                row = self._batch.row_of_request(request)
                if row is not None:
                    self._batch.trim_row(row)

    def _propose(
        self,
        proposer: Proposer,
        wanted: Mapping[str, int],
        requests: Sequence[WorkerRequest],
        result: ModelRunnerOutput,
    ) -> None:
        batch = self._batch
        asked = [
            (request, row)
            for request in requests
            if request.request_id in wanted
            and result.sampled_token_ids.get(request.request_id)
            and (row := batch.row_of_request(request)) is not None
        ]
        may = self._sampler.take_drafts(np.array([row for _, row in asked], np.int64))
        queries = [
            DraftQuery(
                request.request_id,
                batch.token_ids[row, : batch.num_tokens[row]],
                request.output_token_ids,
                request.cache_salt,
                wanted[request.request_id],
                row,
            )
            for (request, row), follows in zip(asked, may.tolist(), strict=True)
            if follows
        ]
        if queries:
            proposed = zip(queries, proposer.propose(queries), strict=True)
            result.draft_token_ids = {
                query.request_id: drafts for query, drafts in proposed if drafts
            }
