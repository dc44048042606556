# SPDX-License-Identifier: Apache-2.0
"""MaskJob: the rows that one answer needs in a step; Follower: its place in its grammar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import Grammar, GrammarError, Matcher, Rows, Words, fill_drafts

# Rows that take longer are made between steps, and their requests sit out a step.
SLOW_SECONDS = 0.001
CLOSE_SECONDS = 5.0
HANGS = "the grammar of this request takes too long to follow; make it simpler"
OnHang = Callable[[Grammar], None]


class Follower:
    """The position of one answer in its grammar. `first_words` is the row at its beginning, if it
    is made already, and `first_seconds` the processor time that it took."""

    def __init__(
        self,
        grammar: Grammar,
        first_words: Words | None = None,
        first_seconds: float = 0.0,
        tenant: str = "",
    ) -> None:
        self.grammar = grammar
        self.tenant = tenant
        self._matcher: Matcher | None = None
        self.is_bounded = grammar.is_bounded  # its matcher cannot hang
        self.first_words = first_words
        self.num_taken = 0  # output tokens that have been accepted, or lie before the grammar
        self.first_seconds = first_seconds
        # Seconds of a row: of the last one, or of a longer one before it; infinite: unknown.
        self.row_seconds = math.inf
        self.ahead: AheadRow | None = None  # its next row, while it is made between steps
        self.failed = ""  # why that row could not be made
        self.num_white = 0  # last tokens of white space, where no other tokens were allowed

    @property
    def matcher(self) -> Matcher:
        if self._matcher is None:
            self._matcher = self.grammar.matcher()
        return self._matcher

    def note_seconds(self, seconds: float) -> None:
        """Record how long a row took. A single slow row, interrupted perhaps, loses its weight
        after a few others. Rows of processes are not recorded: like rows of unknown length they
        are always made between steps."""
        if self.grammar.is_apart:
            return
        before = self.row_seconds
        self.row_seconds = seconds if before == math.inf else max(seconds, before / 2)


@dataclass(slots=True)
class MaskJob:
    """The rows of one answer: one for the place after its output, and one after each draft token.
    Rows behind a draft token that the grammar refuses allow every token; no answer uses them."""

    follower: Follower
    new_tokens: Sequence[int]  # of the output, since the last mask
    drafts: Sequence[int] = ()
    error: str = ""
    ends: Sequence[bool] = ()  # with drafts: whether the text may end, for each filled row

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)

    @property
    def is_made(self) -> bool:
        """Whether its row exists already and only needs to be copied."""
        return self.follower.first_words is not None and not (self.new_tokens or self.drafts)

    def may_end(self, row: int = 0) -> bool:
        """Whether the grammar may end at this row. The job must be done, without an error."""
        if not self.drafts:
            return self.follower.matcher.may_end
        return row < len(self.ends) and self.ends[row]

    def run(self, rows: Rows, first: int) -> None:
        """Fill `num_rows` of the `rows`, from row `first` on. Raises GrammarError."""
        follower = self.follower
        if follower.first_words is not None:
            if not (self.new_tokens or self.drafts):
                rows.words[first] = follower.first_words
                return
            follower.first_words = None
        if follower.failed or follower.grammar.hangs:
            raise GrammarError(follower.failed or HANGS)
        matcher = follower.matcher
        for token in self.new_tokens:
            if not matcher.accept(token):
                raise GrammarError(f"it does not allow token {token} where that was chosen")
        if not self.drafts:
            matcher.fill_row(rows, first)
        else:
            own = rows.words[first : first + self.num_rows]
            self.ends = fill_drafts(matcher, self.drafts, own)
            own[len(self.ends) :] = -1


@dataclass(slots=True)
class AheadRow:
    """A row that a thread makes between steps. The step's thread reads the result once it
    `is_done`."""

    job: MaskJob
    row: Rows  # one
    is_later: bool  # it is known to take long, so rows of unknown length go before it
    error: str = ""
    is_done: bool = False

    @property
    def lane(self) -> Grammar | None:
        """The grammar whose process makes it; None: the engine makes it."""
        grammar = self.job.follower.grammar
        return grammar if grammar.is_apart else None


def note_hang(grammar: Grammar) -> None:
    grammar.hangs = True
