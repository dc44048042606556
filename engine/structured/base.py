# SPDX-License-Identifier: Apache-2.0
"""The contract of a grammar backend.

    Backend.compile(spec) ──► Grammar, shared by all requests with the same spec
    Grammar.matcher()     ──► Matcher, of one answer: accept, fill, rollback

A client's grammar is compiled in a process that can be killed. The engine takes it over:

    there: Backend.try_out(spec) ──► Form ──► here: Backend.build(spec, form) ──► Grammar

A matcher allows a token only if its bytes continue towards a text that the grammar accepts, an end
token only where the text may end, and a special token never. Only one thread at a time calls a
matcher; several threads may call `compile` at once.

An implementation must release the interpreter's lock during its work and while it frees a large
grammar. It raises GrammarError for a grammar or a token that it cannot handle; that error affects
this grammar only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..request.structured_params import GrammarSpec

BITS = 32
LARGE_BYTES = 1024**2  # a grammar of this size takes long to free: 10 ms for 25 MB
Words = npt.NDArray[np.int32]  # [words]: bit t % 32 of word t // 32 is for token t

_MOST_FORCED = 64


class GrammarError(ValueError):
    """A grammar cannot be followed. The text gives the reason, and the position if known."""


class NotNow(GrammarError):
    """The grammar was not compiled this time. The cause may lie outside the grammar: ask again."""


class Rows:
    """The masks of several positions. `words` (int32 `[rows, words]`), `unsigned` (uint32 `[rows,
    words]`) and the bytes `data` are the same memory. `exchanged` is the object through which a
    backend writes, made once for all rows."""

    __slots__ = ("data", "exchanged", "unsigned", "words")

    def __init__(self, num_rows: int, num_words: int) -> None:
        self.words = np.zeros((num_rows, num_words), np.int32)
        self.unsigned = self.words.view(np.uint32)
        self.data = self.words.reshape(-1).view(np.uint8).data
        self.exchanged: Any = None

    def is_empty(self, index: int) -> bool:
        """Whether a row allows no token; quicker for one row than numpy's `any`."""
        size = self.words.shape[1] * (BITS // 8)
        return not self.data[index * size : (index + 1) * size].tobytes().strip(b"\0")


class Matcher(ABC):
    """The position of one answer in its grammar."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the grammar accepts the text so far as a whole text."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Go on by a token. Return False, and change nothing, for a token that the grammar does not
        allow here and for the model's end tokens: no token follows these."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` accepted tokens, at most all of them."""

    @abstractmethod
    def fill(self, words: Words) -> None:
        """Write the mask of the tokens that may follow; the model's end tokens may follow if the
        text may end."""

    def fill_row(self, rows: Rows, index: int) -> None:
        """Write the mask of `fill` to row `index`; an override may use `rows.exchanged`."""
        self.fill(rows.words[index])


class Grammar(ABC):
    """A compiled grammar. `num_bytes` is about the memory that it takes. `is_bounded`: every call
    of its matchers ends, because the backend counts its work and gives up, or is always quick with
    such grammars. `is_apart`: its matchers work in a process of their own; calls wait for the
    process, within limits. `is_gone`: that process has ended, so the grammar must be compiled anew.
    `hangs`: a call of a matcher did not return, so no matcher is called any more."""

    num_bytes: int
    is_bounded: bool = False
    is_apart: bool = False
    is_gone: bool = False
    hangs: bool = False

    @abstractmethod
    def matcher(self) -> Matcher:
        """A new matcher, at the beginning of an answer."""


class Form(msgspec.Struct, frozen=True):
    """The result of compiling a grammar in another process."""

    backend: str  # the name of the backend that compiled it
    text: str = ""  # the serialized compiled grammar, or the grammar in that backend's language
    is_bounded: bool = False  # see `Grammar.is_bounded`
    num_bytes: int = 0  # memory that compiling took in that process; 0: unknown
    seconds: float = 0.0  # processor time of the work that `build` repeats


class Backend(ABC):
    """A compiler of grammars for one vocabulary."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile on the caller's thread. Raises GrammarError."""

    def load_requirements(self, spec: GrammarSpec) -> None:
        """Import and open everything that `build` will need for this grammar. The thread that
        builds calls this while another process tries the grammar out. Raises GrammarError."""
        return

    def try_out(self, spec: GrammarSpec, *, is_second: bool = False) -> tuple[Form, Grammar]:
        """Compile a grammar without a limit on the time. Return it, and the form from which `build`
        makes it elsewhere. `is_second`: the backend of first choice took too long. Raises
        GrammarError."""
        raise GrammarError(f"{type(self).__name__} tries nothing out")

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        """Compile from the `form` that `try_out` returned. This takes time in proportion to the
        form's text, or as long as `try_out` took. Raises GrammarError."""
        raise GrammarError(f"{type(self).__name__} builds nothing from a form")


def follow_forced(grammar: Grammar, num_words: int) -> None:
    """Follow the first tokens of every answer: as long as a row `[num_words]` allows a single
    token, up to 64 tokens. Raises GrammarError if the grammar cannot be followed that far."""
    matcher, row = grammar.matcher(), np.zeros(num_words, np.int32)
    for _ in range(_MOST_FORCED):
        matcher.fill(row)
        [words] = np.nonzero(row)
        if len(words) != 1:
            return
        word = int(row[words[0]]) & (1 << BITS) - 1
        if word & word - 1 or not matcher.accept(int(words[0]) * BITS + word.bit_length() - 1):
            return  # several tokens are allowed, or an end token


def fill_drafts(matcher: Matcher, drafts: Sequence[int], rows: npt.NDArray[np.int32]) -> list[bool]:
    """Fill `rows` `[1 + len(drafts), words]`: a row for the position after the output, and one
    after each draft token. The matcher then returns to its position. Rows behind a refused draft
    token are not filled. Return for each filled row whether the text may end there."""
    num_accepted, may_end = 0, [matcher.may_end]
    matcher.fill(rows[0])
    try:
        for draft in drafts:
            allowed = rows[num_accepted, draft // BITS] >> (draft % BITS) & 1
            if not allowed or not matcher.accept(draft):
                break
            num_accepted += 1
            may_end.append(matcher.may_end)
            matcher.fill(rows[num_accepted])
    finally:
        if num_accepted:
            matcher.rollback(num_accepted)
    return may_end
