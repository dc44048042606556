# SPDX-License-Identifier: Apache-2.0
"""The promise of a grammar backend.

    Backend.compile(spec) ──► Grammar, shared by all who ask for the same
    Grammar.matcher()     ──► Matcher, of one answer: accept, fill, rollback

What a client has sent is compiled in a process that can be killed, and taken over from there:

    there: Backend.try_out(spec) ──► Form ──► here: Backend.build(spec, form) ──► Grammar

A caller may rely on: a matcher allows a token only where its bytes go on towards a text that the
grammar accepts; end tokens only where the text may end; special tokens never. It calls each matcher
from one thread at a time, and `compile` from several at once.

An implementation must let go of the interpreter's lock while it works, and while it frees a large
grammar, and raise GrammarError for what it cannot do, now or at this token; nothing else than the
one grammar is affected by that.
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
LARGE_BYTES = 1024**2  # of a grammar: to free one takes long, 10 ms for 25 MB
Words = npt.NDArray[np.int32]  # [words]: bit t % 32 of word t // 32 is token t's

_MOST_FORCED = 64


class GrammarError(ValueError):
    """This grammar cannot be followed, and why, with the position where that is known."""


class NotNow(GrammarError):
    """It was not compiled this time, for a reason that may lie outside the grammar: ask again."""


class Rows:
    """Masks of several places: the same memory as `words` and `unsigned`, both `[rows, words]`, and
    as bytes. `exchanged` is for a backend that writes through an object of its own, which is made
    once for all of them."""

    __slots__ = ("data", "exchanged", "unsigned", "words")

    def __init__(self, num_rows: int, num_words: int) -> None:
        self.words = np.zeros((num_rows, num_words), np.int32)
        self.unsigned = self.words.view(np.uint32)
        self.data = self.words.reshape(-1).view(np.uint8).data
        self.exchanged: Any = None

    def is_empty(self, index: int) -> bool:
        """Whether a row allows nothing: the quickest way to ask that of one."""
        size = self.words.shape[1] * (BITS // 8)
        return not self.data[index * size : (index + 1) * size].tobytes().strip(b"\0")


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

    def fill_row(self, rows: Rows, index: int) -> None:
        """As `fill`, into one of several."""
        self.fill(rows.words[index])


class Grammar(ABC):
    """A compiled grammar. `num_bytes` is about the memory that it takes. `is_bounded`: no call of
    its matchers can take for ever, since the backend counts its work and gives up, or since the
    grammar is of a kind that it is always done with quickly. `is_apart`: they work in a process of
    its own, and its methods wait for that, within limits. `is_gone`: it is followed no more, and
    has to be compiled anew. `hangs`: one of its matchers did not come back, so none is asked."""

    num_bytes: int
    is_bounded: bool = False
    is_apart: bool = False
    is_gone: bool = False
    hangs: bool = False

    @abstractmethod
    def matcher(self) -> Matcher:
        """One for an answer that begins."""


class Form(msgspec.Struct, frozen=True):
    """What another process found out about a grammar that it has compiled."""

    backend: str  # the name of the one that compiles it
    text: str = ""  # compiled, where that can be written down, or in that backend's own language
    is_bounded: bool = False  # as `Grammar.is_bounded`
    num_bytes: int = 0  # that compiling it took there, where that is known
    seconds: float = 0.0  # of the processor, that what `build` does again took there


class Backend(ABC):
    """Compiles for one vocabulary."""

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises GrammarError."""

    def load_requirements(self, spec: GrammarSpec) -> None:
        """Import and open what this grammar will need, if it compiles: on the thread that builds,
        while another process tries it out. Raises GrammarError."""
        return

    def try_out(self, spec: GrammarSpec, *, is_second: bool = False) -> tuple[Form, Grammar]:
        """Compile it, whatever that takes, and say how it can be built elsewhere. `is_second`: what
        would come first has taken too long. Raises GrammarError."""
        raise GrammarError(f"{type(self).__name__} tries nothing out")

    def build(self, spec: GrammarSpec, form: Form) -> Grammar:
        """As `compile`, where `try_out` has come to this form: what is left of the work takes time
        in proportion to the form's text, or as much as there. Raises GrammarError."""
        raise GrammarError(f"{type(self).__name__} builds nothing from a form")


def follow_forced(grammar: Grammar, num_words: int) -> None:
    """Go on by the tokens that every answer begins with, as long as a row `[num_words]` allows a
    single one. Raises GrammarError where no answer can be followed that far."""
    matcher, row = grammar.matcher(), np.zeros(num_words, np.int32)
    for _ in range(_MOST_FORCED):
        matcher.fill(row)
        [words] = np.nonzero(row)
        if len(words) != 1:
            return
        word = int(row[words[0]]) & (1 << BITS) - 1
        if word & word - 1 or not matcher.accept(int(words[0]) * BITS + word.bit_length() - 1):
            return  # several, or it is one that ends the answer


def fill_drafts(matcher: Matcher, drafts: Sequence[int], rows: npt.NDArray[np.int32]) -> list[bool]:
    """Fill a row `[words]` of `rows` `[1 + len(drafts), words]` for the place after the output and
    after each draft token, and be where it was before. Of each row that was filled, whether the
    text may end there: those behind a draft token that the grammar refuses are not filled."""
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
