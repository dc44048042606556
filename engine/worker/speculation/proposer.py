# SPDX-License-Identifier: Apache-2.0
"""The contract of a proposer, which guesses the next tokens for the model to check.

    tokens of a step are known ──► propose ──► drafts, checked by the next step of their request

Drafts change no token of an answer, only the number of its steps. So a proposer may make any
guesses from the data that it gets, but must use no text of another tenant.
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
    token_ids: TokenArray  # int32 [num_tokens]: prompt and output, a view valid for the call
    output_token_ids: Sequence[int]  # its own list, which grows
    cache_salt: bytes  # equal for requests that may use each other's texts
    most: int  # drafts, 1 at least
    row: int  # of the batch


class ComputedStep(NamedTuple):
    """The rows of a step that the model computes, in its order."""

    rows: IntArray  # [requests] of the batch
    computed: IntArray  # [requests] tokens before those of the step
    counts: IntArray  # [requests] tokens of the step
    num_drafts: IntArray  # [requests] drafts among these tokens
    # Tokens that the step before chooses, on the device; None: the host knows them.
    chosen: Tensor | None
    hidden: Tensor | None  # [tokens, hidden] of the step, for a proposer that reads them


class Proposer(ABC):
    """A source of drafts. The worker's thread calls it, and an exception fails the step."""

    reads_hidden = False  # whether `follow_step` is given hidden states of all tokens

    def follow_step(self, step: ComputedStep) -> None:  # noqa: B027 - most read tokens alone
        """Follow a step of the model, after the launch of its forward pass."""

    @abstractmethod
    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Return up to `most` draft tokens for each query, in order; none without a basis for a
        guess. A request that was sent back may come again with fewer tokens."""

    def remove_request(self, request_id: str) -> None:  # noqa: B027 - most keep nothing
        """Forget a request that has ended; an unknown one is ignored."""
