# SPDX-License-Identifier: Apache-2.0
"""The interface of proposers, which guess the next tokens for the model to check.

    tokens of a step are known ──► propose ──► drafts, checked in the request's next step

Drafts change the number of steps of an answer, never its tokens. So a proposer may make any guesses
from its data, but it must not use texts of other tenants.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...batch.batch_update import IntArray
from ...request.request import TokenArray


class DraftQuery(NamedTuple):
    """A request that needs drafts."""

    request_id: str
    token_ids: TokenArray  # int32 [num_tokens]: prompt and output; a view, valid for this call
    output_token_ids: Sequence[int]  # its own list, which grows
    cache_salt: bytes  # requests with the same salt may use each other's texts
    most: int  # drafts, 1 at least
    row: int  # of the batch


class ComputedStep(NamedTuple):
    """The rows of a step that the model computes, in its order."""

    rows: IntArray  # [requests] of the batch
    computed: IntArray  # [requests] number of earlier tokens
    counts: IntArray  # [requests] tokens of the step
    num_drafts: IntArray  # [requests] drafts among these tokens
    # On the device: the tokens that the previous step chooses; None: the host knows them.
    chosen: Tensor | None
    hidden: Tensor | None  # [tokens, hidden] of the step, if the proposer `reads_hidden`


class Proposer(ABC):
    """A source of drafts. The worker's thread calls it. An exception fails the step."""

    reads_hidden = False  # whether `follow_step` gets the hidden states of all tokens

    def follow_step(self, step: ComputedStep) -> None:  # noqa: B027 - most read tokens alone
        """Note a step of the model; called after the launch of its forward pass."""

    @abstractmethod
    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Return up to `most` draft tokens for each query, in order; none without a basis for a
        guess. A preempted request may come again with fewer tokens."""

    def remove_request(self, request_id: str) -> None:  # noqa: B027 - most keep nothing
        """Forget an ended request; an unknown id is ignored."""
