# SPDX-License-Identifier: Apache-2.0
"""DraftedRows: the rows of logits of a step that checks draft tokens, and what they confirm.

    output so far    a b c
    draft tokens           x y z
    rows of logits        0 1 2 3       chosen there: x y v _

Each row gets the token that its request would get there without drafts. As long as that is the
draft, the next row is what comes behind it; the first other token takes the place of the draft, and
what is behind it counts for nothing. So the tokens are those that come without drafts: the same
ones where nothing is left to chance, or where a seed decides, and else with the same probabilities.
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
    """Request by request: one row after its newest token, one after each draft."""

    rows: IntArray  # [rows of logits] of the batch
    offsets: IntArray  # [rows of logits] drafts before each
    draft_token_ids: Sequence[Sequence[int]]  # of the request of each row of logits
    firsts: IntArray  # [requests] the first of their rows of logits
    counts: IntArray  # [requests] how many they have

    @classmethod
    def of(
        cls, batch: InputBatch, rows: IntArray, drafts: Mapping[str, Sequence[int]]
    ) -> DraftedRows:
        """The requests in these rows of the batch choose tokens in this order."""
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
        """The places of the rows of logits among the tokens of a step, of which `last` are the last
        ones of each request."""
        return np.repeat(last - self.counts + 1, self.counts) + self.offsets

    def known_index(self) -> IntArray:
        """`[requests]` which of the tokens chosen is the request's own; -1 where that depends on
        its drafts."""
        return np.where(self.counts == 1, self.firsts, _UNKNOWN)

    def accept(self, sampled: Sampled) -> list[list[int]]:
        """A request gets the drafts that were confirmed, and the token behind them. It gets none
        where its first row has no token, and those before where a later one has none."""
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
