# SPDX-License-Identifier: Apache-2.0
"""A limit of reasoning tokens. At the limit, the end mark of reasoning is forced, token by token.

A request sets the budget with `thinking_token_budget`. The budget has no effect unless the token
ids of both reasoning marks are given. The forced token of a row depends only on the tokens before
the row, draft tokens included:

    outside reasoning                           none
    fewer tokens of reasoning than the budget   none
    otherwise                                   the next token of the end mark

So a rejected draft or forced token leaves no state to undo. Each reasoning section has its own
budget, and at most as many tokens as the budget and the end mark together."""

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

# Finite, since no token can be drawn from logits with an infinity. Even after division by the
# highest temperature, the probability of every logit of at most 0 rounds to 0, in float64 too.
FORCED_LOGIT = 1e9


class Thinking:
    """The reasoning in the prompt and the output of one request."""

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
        """Return the token that must follow the output and these draft tokens; None if any token
        may."""
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
    """A row of logits with a forced token."""

    row: int  # index of the row in the logits
    token_id: int


class ThinkingBudget(StatefulProcessor[Thinking]):
    """Forces end marks. No processor between ThinkingBudget and the choice can change a forced
    token. A banned token stays banned; no token is then forced in the row."""

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
    """Force, in place, the token of each entry in `forced` unless it is banned. The other tokens of
    the row get a finite logit of at most 0. The rows are changed one by one, because copies of many
    rows would take far longer than the greedy choice."""
    rows, token_ids = to_device(np.array(forced, np.int64).T.copy(), logits.device)
    is_banned = logits[rows, token_ids] == -torch.inf
    highest = torch.where(is_banned, torch.inf, 0.0).to(logits.dtype)
    for index, (row, _) in enumerate(forced):
        logits[row].clamp_(max=highest[index])
    values = torch.where(is_banned, -torch.inf, FORCED_LOGIT).to(logits.dtype)
    return logits.index_put_((rows, token_ids), values)
