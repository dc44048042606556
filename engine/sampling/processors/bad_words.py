# SPDX-License-Identifier: Apache-2.0
"""Bad words: token sequences that an output must not complete.

The last token of a sequence is banned wherever the tokens before it are the newest ones of the
prompt and the output. A sequence of one token is always banned. Knows nothing of text: the
sequences are spelled by whoever has the tokenizer.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from ...batch.batch_update import AddedRow
from ...worker.block_table import IntArray
from .entries import ban
from .stateful import StatefulProcessor


class BadSequences:
    """The sequences of one request, by what comes before their last tokens."""

    def __init__(self, sequences: list[tuple[int, ...]], added: AddedRow) -> None:
        by_prefix: dict[tuple[int, ...], set[int]] = {}
        for *prefix, last in sequences:
            by_prefix.setdefault(tuple(prefix), set()).add(last)
        self._banned_after = {p: np.array(sorted(ids), np.int64) for p, ids in by_prefix.items()}
        # One look-up for each length, instead of a comparison for each sequence.
        self._lengths = sorted({len(prefix) for prefix in by_prefix})
        start = max(0, len(added.prompt_token_ids) - self._lengths[-1])
        self._prompt_end: list[int] = added.prompt_token_ids[start:].tolist()
        self._output_token_ids = added.output_token_ids

    def banned_now(self) -> list[IntArray]:
        """The ids that would complete a sequence; one of them may be named twice."""
        longest = self._lengths[-1]
        newest = self._output_token_ids[-longest:] if longest else []
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
    """Bans what would complete a bad sequence."""

    def apply(self, logits: Tensor, rows: IntArray) -> Tensor:
        asked = self._states.of(rows)
        parts = [(index, ids) for index, bad in asked for ids in bad.banned_now()]
        return ban(logits, parts)

    def _state_of(self, added: AddedRow) -> BadSequences | None:
        vocab_size = self.context.vocab_size
        # One with an unknown id can never come up.
        known = [
            ids
            for ids in added.params.bad_words_token_ids
            if all(0 <= token < vocab_size for token in ids)
        ]
        return BadSequences(known, added) if known else None
