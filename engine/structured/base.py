# SPDX-License-Identifier: Apache-2.0
"""The interface of a grammar backend.

    Backend.compile(spec) ──► Grammar, shared by all requests with the same spec
    Grammar.matcher()     ──► Matcher, of one answer: accept, fill, rollback

A client's grammar is compiled in a process that can be killed. The engine process then builds the
grammar from the resulting `Form`:

    process: Backend.try_out(spec) ──► Form ──► engine: Backend.build(spec, form) ──► Grammar

A matcher allows a token only if its bytes can lead to a text that the grammar accepts. A matcher
allows an end token only if the text may end, and never a special token. One thread at a time calls
a matcher; several threads may call `compile` at once.

An implementation must release the interpreter's lock while it works and while it frees a large
grammar. An implementation raises GrammarError for a grammar or a token that it cannot handle; only
requests with this grammar then fail."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..request.structured_params import GrammarSpec

BITS = 32
LARGE_BYTES = 1024**2  # grammars of this size take long to free: 10 ms for 25 MB
Words = npt.NDArray[np.int32]  # [words]: bit t % 32 of word t // 32 is for token t

_MOST_FORCED = 64


class GrammarError(ValueError):
    """A grammar cannot be compiled or followed. The text gives the reason, and, if known, the
    position in the grammar."""


class NotNow(GrammarError):
    """A compilation failed for a cause that may lie outside the grammar, so a later request may
    compile the grammar again."""


class Rows:
    """The masks of several positions. `words` (int32 `[rows, words]`), `unsigned` (uint32 `[rows,
    words]`) and the bytes `data` share the same memory. `exchanged` may hold a backend's own view
    of all rows."""

    __slots__ = ("data", "exchanged", "unsigned", "words")

    def __init__(self, num_rows: int, num_words: int) -> None:
        self.words = np.zeros((num_rows, num_words), np.int32)
        self.unsigned = self.words.view(np.uint32)
        self.data = self.words.reshape(-1).view(np.uint8).data
        self.exchanged: Any = None

    def is_empty(self, index: int) -> bool:
        """Whether a row allows no token. For one row this is faster than numpy's `any`."""
        size = self.words.shape[1] * (BITS // 8)
        return not self.data[index * size : (index + 1) * size].tobytes().strip(b"\0")


class Matcher(ABC):
    """The position of one answer in its grammar."""

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """Whether the grammar accepts the text so far as a complete text."""

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token. Return False, and change nothing, for a token that the grammar does
        not allow at this position, and for the model's end tokens."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens, at most all of them."""

    @abstractmethod
    def fill(self, words: Words) -> None:
        """Write the mask of the tokens that may follow, including the model's end tokens if the
        text may end."""

    def fill_row(self, rows: Rows, index: int) -> None:
        """Write the mask of `fill` to row `index`. An override may use `rows.exchanged`."""
        self.fill(rows.words[index])


class Grammar(ABC):
    """A compiled grammar. `num_bytes` is its approximate memory. `is_bounded`: every call of the
    grammar's matchers ends, because the backend limits its own work or is always fast with the
    grammar. `is_apart`: the matchers run in a separate process; calls wait for the process, within
    time limits. `is_gone`: the separate process has ended, so the grammar must be compiled again.
    `hangs`: a call of a matcher did not return, so no matcher of the grammar is called any more."""

    num_bytes: int
    is_bounded: bool = False
    is_apart: bool = False
    is_gone: bool = False
    hangs: bool = False

    @abstractmethod
    def matcher(self) -> Matcher:
        """Return a new matcher, at the beginning of an answer."""


class Form(msgspec.Struct, frozen=True):
    """The result of compiling a grammar in another process."""

    backend: str  # the name of the backend that compiled the grammar
    text: str = ""  # the serialized compiled grammar, or the grammar in that backend's language
    is_bounded: bool = False  # see `Grammar.is_bounded`
    num_bytes: int = 0  # memory that the compiling process took; 0: unknown
    seconds: float = 0.0  # processor time of the part that `build` repeats


class Backend(ABC):
    """A compiler of grammars for one vocabulary."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Compile on the calling thread. Raises GrammarError."""

    def load_requirements(self, spec: GrammarSpec) -> None:
        """Import and open everything that `build` will need for this grammar. The building thread
        calls this method while another process compiles the grammar. Raises GrammarError."""
        return

    def try_out(self, spec: GrammarSpec, *, is_second: bool = False) -> tuple[Form, Grammar]:
        """Compile a grammar without a time limit. Return the grammar, and the `Form` from which
        `build` makes the grammar in another process. `is_second`: the preferred backend took too
        long. Raises GrammarError."""
        raise GrammarError(f"{type(self).__name__} tries nothing out")

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        """Build a grammar from the `form` that `try_out` returned. `build` takes time in proportion
        to the form's text, or as long as `try_out` took. Raises GrammarError."""
        raise GrammarError(f"{type(self).__name__} builds nothing from a form")


def follow_forced(grammar: Grammar, num_words: int) -> None:
    """Accept the first tokens of every answer while a row `[num_words]` allows only a single token,
    up to 64 tokens. Raises GrammarError if the matcher fails."""
    matcher, row = grammar.matcher(), np.zeros(num_words, np.int32)
    for _ in range(_MOST_FORCED):
        matcher.fill(row)
        [words] = np.nonzero(row)
        if len(words) != 1:
            return
        word = int(row[words[0]]) & (1 << BITS) - 1
        if word & word - 1 or not matcher.accept(int(words[0]) * BITS + word.bit_length() - 1):
            return  # several tokens are allowed, or an end token is


def fill_drafts(matcher: Matcher, drafts: Sequence[int], rows: npt.NDArray[np.int32]) -> list[bool]:
    """Fill `rows` `[1 + len(drafts), words]`: a row for the position after the output, and one
    after each draft token. The matcher then returns to its position. Rows after a refused draft
    token are not filled. Return, for each filled row, whether the text may end there."""
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
