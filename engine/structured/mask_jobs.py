# SPDX-License-Identifier: Apache-2.0
"""MaskJob: the mask rows of an answer in a step. Follower: the answer's position in its grammar."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .base import Grammar, GrammarError, Matcher, Rows, Words, fill_drafts

# Mask rows that take longer are made between steps; their requests are left out of a step.
SLOW_SECONDS = 0.001
CLOSE_SECONDS = 5.0
HANGS = "the grammar of this request takes too long to follow; make it simpler"
OnHang = Callable[[Grammar], None]


class Follower:
    """The position of one answer in its grammar. `first_words` is the mask row at the answer's
    beginning, or None if it is not made yet; `first_seconds` is the CPU time of `first_words`."""

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
        self.is_bounded = grammar.is_bounded  # the matcher cannot hang
        self.first_words = first_words
        self.num_taken = 0  # output tokens accepted by the matcher or before the grammar
        self.first_seconds = first_seconds
        # Seconds of the last row, or half of those noted before if that is more; infinite: unknown.
        self.row_seconds = math.inf
        self.ahead: AheadRow | None = None  # the next row, while a thread makes it
        self.failed = ""  # the error in making `ahead`
        self.num_white = 0  # white tokens at the answer's end, with no others allowed

    @property
    def matcher(self) -> Matcher:
        if self._matcher is None:
            self._matcher = self.grammar.matcher()
        return self._matcher

    def note_seconds(self, seconds: float) -> None:
        """Record how long a row took. The effect of a single slow row, perhaps an interrupted one,
        fades over the next rows. Rows from separate processes are not recorded, since such rows are
        always made between steps."""
        if self.grammar.is_apart:
            return
        before = self.row_seconds
        self.row_seconds = seconds if before == math.inf else max(seconds, before / 2)


@dataclass(slots=True)
class MaskJob:
    """The mask rows of one answer: for the position after its output, and after each draft token.
    Rows after a refused draft token allow every token, because no answer uses them."""

    follower: Follower
    new_tokens: Sequence[int]  # the output tokens since the last mask
    drafts: Sequence[int] = ()
    error: str = ""
    ends: Sequence[bool] = ()  # with drafts: for each filled row, whether the text may end

    @property
    def num_rows(self) -> int:
        return 1 + len(self.drafts)

    @property
    def is_made(self) -> bool:
        """Whether the job's row exists already and only needs to be copied."""
        return self.follower.first_words is not None and not (self.new_tokens or self.drafts)

    def may_end(self, row: int = 0) -> bool:
        """Whether the grammar may end at this row. The job must be done, without an error."""
        if not self.drafts:
            return self.follower.matcher.may_end
        return row < len(self.ends) and self.ends[row]

    def run(self, rows: Rows, first: int) -> None:
        """Fill `num_rows` rows of `rows`, from index `first` on. Raises GrammarError."""
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
    """A row that a thread makes between steps. The step's thread reads the row when `is_done` is
    True."""

    job: MaskJob
    row: Rows  # one row
    is_later: bool  # the row is slow; rows of unknown time are made first
    error: str = ""
    is_done: bool = False

    @property
    def lane(self) -> Grammar | None:
        """The grammar whose process makes the row; None if the engine process makes it."""
        grammar = self.job.follower.grammar
        return grammar if grammar.is_apart else None


def note_hang(grammar: Grammar) -> None:
    grammar.hangs = True
