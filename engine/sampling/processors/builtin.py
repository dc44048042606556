# SPDX-License-Identifier: Apache-2.0
"""The built-in logits processors: minimum length, bad words, biases, penalties, min-p.

The repetition penalty affects tokens of the prompt and the output: it divides a positive logit and
multiplies any other. The frequency penalty (once for each occurrence) and the presence penalty
(once) are then subtracted from the logits of tokens of the output. The cost of a step grows with
the number of new tokens and of distinct tokens, not with the length of the text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...batch.batch_update import AddedRow, BatchUpdate, IntArray
from ..copies import to_device
from ..row_states import RowValues
from .base import (
    Drafts,
    LogitsProcessor,
    ProcessorContext,
    StatefulProcessor,
    ban,
    drafted,
    entries_of,
    known_ids,
)


class Minimum(NamedTuple):
    """The state of `min_tokens`: the end tokens of the request are banned until the output has
    `length` tokens."""

    length: int
    banned: IntArray
    output_token_ids: list[int]


class MinTokens(StatefulProcessor[Minimum]):
    """Bans the request's stop token ids, and the model's end tokens unless the request ignores
    them."""

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        parts = []
        for index, minimum in self._states.of(rows):
            length = len(minimum.output_token_ids)
            if length >= minimum.length:
                self._states.discard(int(rows[index]))
            elif offsets is None or length + offsets[index] < minimum.length:
                parts.append((index, minimum.banned))
        return ban(logits, parts)

    def _state_of(self, added: AddedRow) -> Minimum | None:
        params, output = added.params, added.output_token_ids
        if len(output) >= params.min_tokens:
            return None
        eos = () if params.ignore_eos else self.context.eos_token_ids
        banned = known_ids((*params.stop_token_ids, *eos), self.context.vocab_size)
        return Minimum(params.min_tokens, banned, output) if len(banned) else None


class MinP(LogitsProcessor):
    """Bans tokens whose probability, after the temperature, is below `min_p` times the probability
    of the most likely token.

    The ratio `min_p` is a difference of `-log(min_p)` between logits, so no softmax is needed."""

    def __init__(self, context: ProcessorContext) -> None:
        super().__init__(context)
        self._log_shares = RowValues(context.max_rows, np.float64(-np.inf), _log_share)

    @property
    def is_argmax_invariant(self) -> bool:
        return True

    @property
    def is_active(self) -> bool:
        return bool((self._log_shares.values > -np.inf).any())

    def update_state(self, update: BatchUpdate) -> None:
        self._log_shares.update(update)

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        log_shares = self._log_shares.values[rows]
        asked = np.flatnonzero(log_shares > -np.inf)
        if len(asked) == 0:
            return logits
        shares = to_device(log_shares[asked][:, None], logits.device).to(logits.dtype)
        if len(asked) == len(rows):
            return _keep_likely(logits, shares)
        index = to_device(asked, logits.device)
        logits[index] = _keep_likely(logits[index], shares)
        return logits


def _keep_likely(logits: Tensor, log_shares: Tensor) -> Tensor:
    floor = logits.amax(dim=-1, keepdim=True) + log_shares
    return logits.masked_fill_(logits < floor, -torch.inf)


def _log_share(added: AddedRow) -> float:
    share = added.params.min_p
    return math.log(share) if share > 0.0 else -math.inf


class Biases(NamedTuple):
    """A request's biases: token ids, and the values to add to their logits."""

    token_ids: IntArray
    values: npt.NDArray[np.float64]


class LogitBias(StatefulProcessor[Biases]):
    """Adds biases to logits. A token listed twice gets the sum of both values."""

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        asked = self._states.of(rows)
        if asked:
            parts = [(index, biases.token_ids) for index, biases in asked]
            entries = entries_of(parts, logits.device)
            added = np.concatenate([biases.values for _, biases in asked])
            values = to_device(added, logits.device)
            logits.index_put_(tuple(entries), values.to(logits.dtype), accumulate=True)
        return logits

    def _state_of(self, added: AddedRow) -> Biases | None:
        totals: dict[int, float] = {}
        for token, value in added.params.logit_bias:
            if 0 <= token < self.context.vocab_size:
                totals[token] = totals.get(token, 0.0) + value
        if not totals:
            return None
        return Biases(np.array(list(totals), np.int64), np.array(list(totals.values()), np.float64))


class BadSequences:
    """Bad words: token sequences that one request's output must not complete.

    The last token of a sequence is banned when the sequence's other tokens are the newest tokens of
    prompt and output. A sequence of one token is always banned."""

    def __init__(self, sequences: list[tuple[int, ...]], added: AddedRow) -> None:
        by_prefix: dict[tuple[int, ...], set[int]] = {}
        for *prefix, last in sequences:
            by_prefix.setdefault(tuple(prefix), set()).add(last)
        self._banned_after = {p: np.array(sorted(ids), np.int64) for p, ids in by_prefix.items()}
        # One look-up for each length of a prefix replaces a comparison for each sequence.
        self._lengths = sorted({len(prefix) for prefix in by_prefix})
        start = max(0, len(added.prompt_token_ids) - self._lengths[-1])
        self._prompt_end: list[int] = added.prompt_token_ids[start:].tolist()
        self._output_token_ids = added.output_token_ids

    def banned_after(self, drafts: Sequence[int] = ()) -> list[IntArray]:
        """Return the token ids, in arrays, that would complete a sequence after the output and
        `drafts`. An id may be in several arrays."""
        longest = self._lengths[-1]
        newest = self._output_token_ids[-longest:] if longest else []
        if longest and drafts:
            newest = [*newest, *drafts][-longest:]
        if len(newest) < longest:
            newest = self._prompt_end + newest
        size = len(newest)
        found = (
            self._banned_after.get(tuple(newest[size - length :]))
            for length in self._lengths
            if length <= size
        )
        return [ids for ids in found if ids is not None]


class BadWords(StatefulProcessor[BadSequences]):
    """Bans the tokens that would complete a bad sequence."""

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        asked = self._states.of(rows)
        if offsets is None:
            parts = [(index, ids) for index, bad in asked for ids in bad.banned_after()]
            return ban(logits, parts)
        parts = [
            (index, ids)
            for index, bad in asked
            for ids in bad.banned_after(drafted(index, offsets, drafts))
        ]
        return ban(logits, parts)

    def _state_of(self, added: AddedRow) -> BadSequences | None:
        vocab_size = self.context.vocab_size
        # A sequence with an unknown id can never occur.
        known = [
            ids
            for ids in added.params.bad_words_token_ids
            if all(0 <= token < vocab_size for token in ids)
        ]
        return BadSequences(known, added) if known else None


class Strengths(NamedTuple):
    """The penalties of one request."""

    repetition: float
    frequency: float
    presence: float


class SeenTokens:
    """The distinct tokens of one request, and the number of their occurrences in its output."""

    def __init__(
        self,
        strengths: Strengths,
        prompt_token_ids: IntArray,
        output_token_ids: list[int],
        vocab_size: int,
    ) -> None:
        """`prompt_token_ids` must have no duplicates."""
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
        """The occurrences of each token in the output; 0 for tokens of the prompt only."""
        return self._counts[: self._size]

    def count_new(self) -> None:
        """Count the output tokens that are new since the last call."""
        output = self._output_token_ids
        for token in output[self._num_counted :]:
            if 0 <= token < self._vocab_size:
                counted = self._find_or_add_token(
                    token
                )  # before the next line, which may replace the array of counts
                self._counts[counted] += 1
        self._num_counted = len(output)

    def after(self, drafts: Sequence[int]) -> tuple[IntArray, IntArray]:
        """Return ids and counts as if `drafts` followed the output; nothing is stored."""
        if not drafts:
            return self.token_ids, self.counts
        counts = self.counts.copy()
        new: dict[int, int] = {}
        for token in drafts:
            place = self._place_of.get(token)
            if place is not None:
                counts[place] += 1
            elif 0 <= token < self._vocab_size:
                new[token] = new.get(token, 0) + 1
        ids = np.concatenate([self.token_ids, np.array(list(new), np.int64)])
        return ids, np.concatenate([counts, np.array(list(new.values()), np.int64)])

    def _find_or_add_token(self, token: int) -> int:
        place = self._place_of.get(token)
        if place is None:
            place = self._place_of[token] = self._size
            if place == len(self._token_ids):
                room = np.zeros(place + 64, np.int64)  # doubles the array
                self._token_ids = np.concatenate([self._token_ids, room])
                self._counts = np.concatenate([self._counts, room])
            self._token_ids[place] = token
            self._size += 1
        return place


class Penalties(StatefulProcessor[SeenTokens]):
    """Applies repetition, frequency and presence penalty to all rows at once."""

    def apply(
        self,
        logits: Tensor,
        rows: IntArray,
        offsets: IntArray | None = None,
        drafts: Drafts | None = None,
    ) -> Tensor:
        asked = self._states.of(rows)
        if not asked:
            return logits
        parts: list[tuple[int, IntArray]] = []
        counts: list[IntArray] = []
        for index, tokens in asked:
            tokens.count_new()
            ids, there = tokens.token_ids, tokens.counts
            if offsets is not None:
                ids, there = tokens.after(drafted(index, offsets, drafts))
            parts.append((index, ids))
            counts.append(there)
        device = logits.device
        entries = entries_of(parts, device)
        values = logits[tuple(entries)]
        repetition, subtracted = _by_entry([tokens.strengths for _, tokens in asked], counts)
        divisor = to_device(repetition, device).to(values.dtype)
        values = torch.where(values > 0, values / divisor, values * divisor)
        values -= to_device(subtracted, device).to(values.dtype)
        # Division by a tiny penalty overflows (0 is never divided, so there is no 0 / 0). An
        # infinite logit would leave no distribution to draw from.
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
        if strengths.repetition != 1.0:  # only this penalty needs the prompt
            distinct = np.unique(added.prompt_token_ids).astype(np.int64)
            prompt = distinct[(distinct >= 0) & (distinct < vocab_size)]
        return SeenTokens(strengths, prompt, added.output_token_ids, vocab_size)


def _by_entry(
    strengths: Sequence[Strengths], counts_by_row: Sequence[IntArray]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return, for each token of each row, the repetition penalty, and the amount that frequency and
    presence penalty subtract."""
    sizes = [len(counts) for counts in counts_by_row]
    repetition, frequency, presence = np.repeat(np.array(strengths, np.float64), sizes, axis=0).T
    counts = np.concatenate(counts_by_row)
    return np.ascontiguousarray(repetition), counts * frequency + (counts > 0) * presence
