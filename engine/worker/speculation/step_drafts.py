# SPDX-License-Identifier: Apache-2.0
"""StepDrafts: writes, checks and proposes the draft tokens of a worker's steps."""

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
    """The draft tokens of steps. The worker's thread calls it. Without a `proposer` it proposes no
    drafts, but still checks the drafts of the scheduler's steps."""

    def __init__(self, batch: InputBatch, sampler: Sampler, proposer: Proposer | None) -> None:
        self._batch, self._sampler, self._proposer = batch, sampler, proposer

    @property
    def reads_hidden(self) -> bool:
        """Whether `follow_step` needs the hidden states of all tokens of a step."""
        return self._proposer is not None and self._proposer.reads_hidden

    def remove_request(self, request_id: str) -> None:
        """Let the proposer forget an ended request. An unknown id is ignored."""
        if self._proposer is not None:
            self._proposer.remove_request(request_id)

    def put_drafts(self, drafts: Mapping[str, Sequence[int]], rows: IntArray) -> IntArray:
        """Write the draft tokens of a step after the tokens of their rows. Return each row's number
        of drafts, `[rows]`."""
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
        """Write the tokens of a step to the batch and to its result. Return the requests without
        drafts that got no token, with their rows of logits. Requests with drafts and no token are
        left out: a draft may be the cause, so they compute the token again without drafts."""
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
        """Tell the proposer of a step whose forward pass has been launched."""
        if self._proposer is not None:
            self._proposer.follow_step(step)

    def propose(
        self,
        output: SchedulerOutput,
        requests: Sequence[WorkerRequest],
        result: ModelRunnerOutput,
    ) -> None:
        """Propose drafts after the new tokens of a step's requests. A request that has left the
        batch gets none, even if a new request has its id. Blocks after a request's tokens, which
        old drafts used, are dropped."""
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
