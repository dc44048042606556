# SPDX-License-Identifier: Apache-2.0
"""The interface of proposers, which guess a request's next tokens (drafts) for the model to check.

    tokens of a step are known ──► propose ──► drafts, checked in the request's next step

Drafts change the number of steps that an answer takes, but not its tokens. So a proposer may guess
in any way, but must not use texts of other tenants."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...batch.batch_update import IntArray
from ...request.request import TokenArray


class DraftQuery(NamedTuple):
    """A request for which drafts are wanted."""

    request_id: str
    token_ids: TokenArray  # int32 [num_tokens]: prompt and output; a view, valid for this call
    output_token_ids: Sequence[int]  # the request's own list, which grows
    cache_salt: bytes  # requests with the same salt may use each other's texts
    most: int  # the most drafts, at least 1
    row: int  # of the batch


class ComputedStep(NamedTuple):
    """The rows of a step that the model computes, in the order of the step."""

    rows: IntArray  # [requests] of the batch
    computed: IntArray  # [requests] number of earlier tokens
    counts: IntArray  # [requests] tokens of the step
    num_drafts: IntArray  # [requests] drafts among these tokens
    # The tokens sampled by the previous step, on the device; None: the host has the tokens.
    chosen: Tensor | None
    hidden: Tensor | None  # [tokens, hidden] of the step, if the proposer `reads_hidden`


class Proposer(ABC):
    """A source of draft tokens. The worker's thread calls its methods. An exception fails the
    step."""

    reads_hidden = False  # whether `follow_step` gets the hidden states of all tokens

    def follow_step(self, step: ComputedStep) -> None:  # noqa: B027 - most need tokens alone
        """Process a step of the model. The caller has already launched the step's forward pass."""

    @abstractmethod
    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Return up to `most` draft tokens for each query, in the order of the queries. A list is
        empty if the proposer finds no guess. After a preemption a request may have fewer tokens."""

    def remove_request(self, request_id: str) -> None:  # noqa: B027 - most proposers keep no data
        """Drop the data of an ended request. An unknown id is ignored."""
