# SPDX-License-Identifier: Apache-2.0
"""Penalties for tokens that are there already: repetition, frequency and presence.

Repetition counts the prompt and the output: a positive logit is divided by it, any other is
multiplied. Frequency (each time) and presence (once) count the output alone and are subtracted
afterwards. What a step costs grows with the new tokens and the distinct ones, not with the length
of the text. Knows nothing of how tokens are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...batch.batch_update import AddedRow
from ...worker.block_table import IntArray
from ..copies import to_device
from .entries import entries_of
from .stateful import StatefulProcessor


class Strengths(NamedTuple):
    """What one request asks for."""

    repetition: float
    frequency: float
    presence: float


class SeenTokens:
    """Distinct tokens of one request and how often its output has each; grows with the output."""

    def __init__(
        self,
        strengths: Strengths,
        prompt_token_ids: IntArray,
        output_token_ids: list[int],
        vocab_size: int,
    ) -> None:
        """`prompt_token_ids` has each id once."""
        self.strengths = strengths
        self._vocab_size = vocab_size
        self._output_token_ids = output_token_ids
        self._num_counted = 0
        self._size = len(prompt_token_ids)
        self._place_of = {token: place for place, token in enumerate(prompt_token_ids.tolist())}
        self._token_ids = prompt_token_ids
        self._counts: IntArray = np.zeros(self._size, np.int64)

    @property
    def token_ids(self) -> IntArray:
        return self._token_ids[: self._size]

    @property
    def counts(self) -> IntArray:
        """In the output; 0 for tokens of the prompt only."""
        return self._counts[: self._size]

    def count_new(self) -> None:
        """Take in what the output has gained since the last call."""
        output = self._output_token_ids
        for token in output[self._num_counted :]:
            if 0 <= token < self._vocab_size:
                counted = self._place(token)  # first: it may move the counts to a larger array
                self._counts[counted] += 1
        self._num_counted = len(output)

    def _place(self, token: int) -> int:
        place = self._place_of.get(token)
        if place is None:
            place = self._place_of[token] = self._size
            if place == len(self._token_ids):
                room = np.zeros(place + 64, np.int64)  # so that it doubles
                self._token_ids = np.concatenate([self._token_ids, room])
                self._counts = np.concatenate([self._counts, room])
            self._token_ids[place] = token
            self._size += 1
        return place


class Penalties(StatefulProcessor[SeenTokens]):
    """All three, of all rows at once."""

    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        asked = self._states.of(rows)
        if not asked:
            return logits
        seen = [tokens for _, tokens in asked]
        for tokens in seen:
            tokens.count_new()
        device = logits.device
        entries = entries_of([(index, tokens.token_ids) for index, tokens in asked], device)
        values = logits[tuple(entries)]
        repetition, subtracted = _by_entry(seen)
        divisor = to_device(repetition, device).to(values.dtype)
        values = torch.where(values > 0, values / divisor, values * divisor)
        values -= to_device(subtracted, device).to(values.dtype)
        # A tiny divisor overflows (0 is never divided, so there is no 0 / 0), and an infinite logit
        # would leave no distribution to draw from.
        values.clamp_(max=torch.finfo(values.dtype).max)
        return logits.index_put_(tuple(entries), values)

    def _state_of(self, added: AddedRow) -> SeenTokens | None:
        params, vocab_size = added.params, self.context.vocab_size
        strengths = Strengths(
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty
        )
        if strengths == (1.0, 0.0, 0.0):
            return None
        prompt: IntArray = np.empty(0, np.int64)
        if strengths.repetition != 1.0:  # the only one that asks for the prompt
            distinct = np.unique(added.prompt_token_ids).astype(np.int64)
            prompt = distinct[(distinct >= 0) & (distinct < vocab_size)]
        return SeenTokens(strengths, prompt, added.output_token_ids, vocab_size)


def _by_entry(
    seen: Sequence[SeenTokens],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """For each token of each row: the repetition penalty, and what the other two subtract."""
    sizes = [len(tokens.token_ids) for tokens in seen]
    strengths = np.array([tokens.strengths for tokens in seen], np.float64)
    repetition, frequency, presence = np.repeat(strengths, sizes, axis=0).T
    counts = np.concatenate([tokens.counts for tokens in seen])
    return np.ascontiguousarray(repetition), counts * frequency + (counts > 0) * presence
