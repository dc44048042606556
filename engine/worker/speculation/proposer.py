# SPDX-License-Identifier: Apache-2.0
"""The promise of a proposer: guesses of the tokens that come next, which the model checks.

    tokens of a step are known ──► propose ──► drafts, checked by the next step of their request

What is proposed changes no token of an answer, only how many steps it takes. So a proposer may
guess whatever it likes, of what it is given: nothing of another tenant's texts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ...batch.batch_update import IntArray
from ...request.request import TokenArray


class DraftQuery(NamedTuple):
    """A request whose next tokens are to be guessed."""

    request_id: str
    token_ids: TokenArray  # int32 [num_tokens]: prompt and output, a view valid for the call
    output_token_ids: Sequence[int]  # its own list, which grows
    cache_salt: bytes  # equal for requests that may be given what the others have said
    most: int  # drafts, 1 at least
    row: int  # of the batch


class ComputedStep(NamedTuple):
    """The rows of a step that the model computes, in its order."""

    rows: IntArray  # [requests] of the batch
    computed: IntArray  # [requests] tokens before those of the step
    counts: IntArray  # [requests] tokens of the step
    num_drafts: IntArray  # [requests] of these, drafts that it checks
    # Tokens that the step before chooses, on the device; None where they are known.
    chosen: Tensor | None
    hidden: Tensor | None  # [tokens, hidden] of the step, for a proposer that reads them


class Proposer(ABC):
    """A worker has one, and its thread calls it. An exception fails the step."""

    reads_hidden = False  # whether `follow_step` is given hidden states of all tokens

    def follow_step(self, step: ComputedStep) -> None:  # noqa: B027 - most read tokens alone
        """The model computes a step, whose forward pass has been launched."""

    @abstractmethod
    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """A query gets up to `most` draft tokens, in order; none where there is nothing to guess
        by. A request that was sent back may be asked for again with fewer tokens."""

    def remove_request(self, request_id: str) -> None:  # noqa: B027 - most keep nothing
        """A request has ended; one that was never asked for is ignored."""
