# SPDX-License-Identifier: Apache-2.0
"""DraftedRows: the rows of logits in a step that checks draft tokens, and the accepted tokens.

    output so far    a b c
    draft tokens           x y z
    rows of logits        0 1 2 3       chosen there: x y v _

At each row the sampler chooses the token that the request would get there without drafts. If the
chosen token equals the draft, the next row is valid too. The first token that differs from its
draft replaces the draft, and the rows after it are dropped. So drafts do not change the answer: the
tokens are the same if sampling is greedy or has a seed; otherwise they have the same probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ...batch.batch_update import IntArray
from ...sampling.sampler import Sampled
from ..input_batch import InputBatch

_UNKNOWN = -1
_NO_DRAFTS: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DraftedRows:
    """The rows of logits, request by request: one after the newest token and one after each
    draft."""

    rows: IntArray  # [rows of logits] rows of the batch
    offsets: IntArray  # [rows of logits] number of drafts before each row
    draft_token_ids: Sequence[Sequence[int]]  # for each row of logits, its request's drafts
    firsts: IntArray  # [requests] index of each request's first row of logits
    counts: IntArray  # [requests] number of each request's rows of logits

    @classmethod
    def of(
        cls, batch: InputBatch, rows: IntArray, drafts: Mapping[str, Sequence[int]]
    ) -> DraftedRows:
        """Make the rows of logits for the requests in `rows` of the batch, in this order."""
        own = []
        for row in rows.tolist():
            request = batch.requests[row]
            own.append(_NO_DRAFTS if request is None else drafts.get(request.request_id, ()))
        counts = np.array([1 + len(each) for each in own], np.int64)
        firsts = np.cumsum(counts) - counts
        offsets = np.arange(int(counts.sum())) - np.repeat(firsts, counts)
        of_rows = [each for each in own for _ in range(1 + len(each))]
        return cls(np.repeat(rows, counts), offsets, of_rows, firsts, counts)

    def places_of(self, last: IntArray) -> IntArray:
        """Return the index of each row of logits among the tokens of the step. `last` has the index
        of each request's last token in the step."""
        return np.repeat(last - self.counts + 1, self.counts) + self.offsets

    def known_index(self) -> IntArray:
        """Return the index of each request's token among the sampled tokens, `[requests]`; -1 if it
        depends on which drafts are accepted."""
        return np.where(self.counts == 1, self.firsts, _UNKNOWN)

    def accept(self, sampled: Sampled) -> list[list[int]]:
        """Return, for each request, its accepted drafts and the token after them. The list ends
        before the first row that has no token, so it may be empty."""
        tokens, is_finite, has_choice = sampled.token_ids, sampled.is_finite, sampled.has_choice
        accepted = []
        for first, count in zip(self.firsts.tolist(), self.counts.tolist(), strict=True):
            drafts, own = self.draft_token_ids[first], []
            for offset in range(count):
                place = first + offset
                if not (is_finite[place] and has_choice[place]) or place in sampled.failures:
                    break
                own.append(tokens[place])
                if offset < count - 1 and tokens[place] != drafts[offset]:
                    break
            accepted.append(own)
        return accepted
