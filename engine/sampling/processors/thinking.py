# SPDX-License-Identifier: Apache-2.0
"""A budget for the tokens of a thought: once it is used up, the end mark is forced, token by token.

A request asks for it with `thinking_token_budget`; without the token ids of both marks nothing
happens. What a row needs follows from the tokens before it alone, the draft tokens included:

    outside a thought                           nothing
    fewer tokens in the thought than the budget nothing
    else                                        the next token of the end mark

so there is nothing to take back where a draft token, or a forced one, is rejected. A thought has at
most as many tokens as the budget and the end mark together, and the next one has a budget of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...batch.batch_update import AddedRow, IntArray
from ...request.reasoning_marks import Mark, ThoughtTracker
from ...request.request import TokenArray
from ..copies import to_device
from .base import Drafts, StatefulProcessor, drafted

# No infinity, which would leave no distribution to draw from. Divided by the highest temperature
# it still leaves every logit of at most 0 a probability that rounds to 0, also in float64.
FORCED_LOGIT = 1e9


class Thinking:
    """The thoughts of one request, as far as its output goes."""

    __slots__ = ("_budget", "_end", "_num_seen", "_output_token_ids", "_tracker")

    def __init__(
        self,
        budget: int,
        start: Mark,
        end: Mark,
        prompt_token_ids: TokenArray,
        output_token_ids: list[int],
    ) -> None:
        """`output_token_ids` is the request's own list, which grows."""
        self._budget, self._end = budget, end
        self._tracker = ThoughtTracker.behind(prompt_token_ids, start, end)
        self._output_token_ids = output_token_ids
        self._num_seen = 0

    def forced_after(self, drafts: Sequence[int]) -> int | None:
        """The only token that may follow the output and these draft tokens, None where any may."""
        output, tracker = self._output_token_ids, self._tracker
        if self._num_seen < len(output):
            tracker.extend(output[self._num_seen :])
            self._num_seen = len(output)
        if drafts:
            tracker = tracker.after(drafts)
        if not tracker.is_inside or tracker.length < self._budget:
            return None
        return self._end.token_ids[tracker.end_matched]


class Forced(NamedTuple):
    """A row of logits that has one token to choose."""

    row: int  # of the logits
    token_id: int


class ThinkingBudget(StatefulProcessor[Thinking]):
    """Forces end marks. It comes last of those before the choice, so that nothing weakens what it
    forces. A token that is banned stays banned: then nothing is forced in its row."""

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        forced = []
        for index, thinking in self._states.of(rows):
            token_id = thinking.forced_after(drafted(index, offsets, drafts))
            if token_id is not None:
                forced.append(Forced(index, token_id))
        return _force(logits, forced) if forced else logits

    def _state_of(self, added: AddedRow) -> Thinking | None:
        params = added.params
        start, end = params.reasoning_start_token_ids, params.reasoning_end_token_ids
        if params.thinking_token_budget is None or not start or not end:
            return None
        if not all(0 <= token_id < self.context.vocab_size for token_id in end):
            return None
        return Thinking(
            params.thinking_token_budget,
            Mark(start),
            Mark(end),
            added.prompt_token_ids,
            added.output_token_ids,
        )


def _force(logits: Tensor, forced: Sequence[Forced]) -> Tensor:
    """Leave each of these rows its token, in place, where that is not banned: the others keep a
    finite logit of at most 0. Row by row, since copies of many rows at once would take far longer
    than the greedy choice."""
    rows, token_ids = to_device(np.array(forced, np.int64).T.copy(), logits.device)
    is_banned = logits[rows, token_ids] == -torch.inf
    highest = torch.where(is_banned, torch.inf, 0.0).to(logits.dtype)
    for index, (row, _) in enumerate(forced):
        logits[row].clamp_(max=highest[index])
    values = torch.where(is_banned, -torch.inf, FORCED_LOGIT).to(logits.dtype)
    return logits.index_put_((rows, token_ids), values)
