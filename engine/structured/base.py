# SPDX-License-Identifier: Apache-2.0
"""The promise of a grammar backend.

    Backend.compile(spec) ──► Grammar, shared by all who ask for the same
    Grammar.matcher()     ──► Matcher, of one answer: accept, fill, rollback

A caller may rely on: a matcher allows a token only where its bytes go on towards a text that the
grammar accepts; end tokens only where the text may end; special tokens never. It calls each matcher
from one thread at a time, and `compile` from several at once.

An implementation must let go of the interpreter's lock while it works, and raise GrammarError for
what it cannot do, now or at this token; nothing else than the one grammar is affected by that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..structured_params import GrammarSpec

BITS = 32
Words = npt.NDArray[np.int32]  # [words]: bit t % 32 of word t // 32 is token t's


class GrammarError(ValueError):
    """This grammar cannot be followed, and why, with the position where that is known."""


class Matcher(ABC):
    """Where one answer is in its grammar."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the text so far is one that the grammar accepts."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing has changed, for one that the grammar does not allow
        here, and for the model's end tokens, after which there is nothing to allow."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the tokens accepted last; as many as were accepted at most."""

    @abstractmethod
    def fill(self, words: Words) -> None:
        """Write which tokens may follow, the model's end tokens among them where it may end."""


class Grammar(ABC):
    """A compiled grammar. `num_bytes` is about the memory that it takes."""

    num_bytes: int

    @abstractmethod
    def matcher(self) -> Matcher:
        """One for an answer that begins."""


class Backend(ABC):
    """Compiles for one vocabulary."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises GrammarError."""


def fill_drafts(matcher: Matcher, drafts: Sequence[int], rows: npt.NDArray[np.int32]) -> int:
    """Fill a row `[words]` of `rows` `[1 + len(drafts), words]` for the place after the output and
    after each draft token, and be where it was before. How many rows were filled: those behind a
    draft token that the grammar refuses are not."""
    num_accepted = 0
    matcher.fill(rows[0])
    try:
        for draft in drafts:
            allowed = rows[num_accepted, draft // BITS] >> (draft % BITS) & 1
            if not allowed or not matcher.accept(draft):
                break
            num_accepted += 1
            matcher.fill(rows[num_accepted])
    finally:
        if num_accepted:
            matcher.rollback(num_accepted)
    return num_accepted + 1
