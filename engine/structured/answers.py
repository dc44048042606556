# SPDX-License-Identifier: Apache-2.0
"""The parts of an answer that need rules beside the grammar: reasoning before the grammar's text,
and endless white space in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ..request.reasoning_marks import Mark
from ..request.request import Request
from .base import BITS
from .mask_jobs import Follower
from .vocabulary import Vocabulary

MOST_WHITE = 64  # after so many white tokens in a row with no others allowed, an answer ends

# A start mark opens reasoning if at most this many prompt tokens follow it, since templates may
# write a line break after it. A mark further back is part of a message.
_MOST_BEHIND_MARK = 1


class Thought:
    """The reasoning at the beginning of an answer. An answer has reasoning if the prompt ends in a
    start mark, or if the answer's first token is a start mark."""

    __slots__ = ("_end", "_matched", "_num_seen", "_position", "opener")

    def __init__(self, request: Request) -> None:
        params = request.sampling_params
        start = params.reasoning_start_token_ids
        self._end = Mark(params.reasoning_end_token_ids) if start else None
        self._matched = self._num_seen = 0
        self._position: int | None = 0
        # The start mark, as long as the answer's first token may be this mark.
        self.opener: int | None = None
        if start:
            tail = request.prompt_token_ids[-len(start) - _MOST_BEHIND_MARK :].tolist()
            if any(
                tuple(tail[at : at + len(start)]) == start for at in range(1 + _MOST_BEHIND_MARK)
            ):
                self._position = None
            elif len(start) == 1:
                self.opener = start[0]

    def find_end(self, output: Sequence[int]) -> int | None:
        """Return the number of output tokens before the grammar begins; None during the
        reasoning."""
        if output and self.opener is not None:
            if output[0] == self.opener:
                self._position, self._num_seen = None, 1
            self.opener = None
        if self._position is None:
            assert self._end is not None
            for token in output[self._num_seen :]:
                self._num_seen += 1
                self._matched = self._end.matched_after(self._matched, token)
                if self._matched == len(self._end):
                    self._position = self._num_seen
                    break
        return self._position

    def free_rows(self, output: Sequence[int], drafts: Sequence[int]) -> range:
        """Return the range of rows that lie in the reasoning. Row r follows the output and r draft
        tokens. `output` must be the same as in the last call of `find_end`."""
        begin = 0
        if not output and self.opener is not None and drafts[:1] == (self.opener,):
            begin = 1
        elif self._position is not None:
            return range(0)
        assert self._end is not None
        matched = self._matched
        for row, token in enumerate(drafts[begin:], begin + 1):
            matched = self._end.matched_after(matched, token)
            if matched == len(self._end):
                return range(begin, row)
        return range(begin, 1 + len(drafts))


class White:
    """The vocabulary's white-space tokens. A JSON grammar may reach a position after which only
    white space can ever follow, for example at a key for which two rules of the schema conflict."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = frozenset(
            number for number, token in enumerate(vocabulary.tokens) if token and not token.strip()
        )
        self._others = np.full(-(-len(vocabulary.tokens) // BITS), ~np.uint32(0), np.uint32)
        write_bits(self._others, self._ids, allowed=False)

    def why_given_up(
        self, follower: Follower, output: Sequence[int], row: npt.NDArray[np.uint32]
    ) -> str | None:
        """Return the reason to end the answer with an error, or None if the answer continues. `row`
        is the mask after `output`, the answer's tokens, which must not be empty."""
        if output[-1] not in self._ids or (row & self._others).any():
            follower.num_white = 0
            return None
        follower.num_white += 1
        if follower.num_white < MOST_WHITE:
            return None
        return (
            f"nothing but white space could follow for {MOST_WHITE} tokens; look for rules of the "
            "schema that contradict each other"
        )


def any_of(row: npt.NDArray[np.uint32], ids: Iterable[int]) -> bool:
    return any(int(row[token // BITS]) >> token % BITS & 1 for token in ids)


def write_bits(row: npt.NDArray[np.uint32], ids: Iterable[int], *, allowed: bool) -> None:
    for token in ids:
        if token // BITS < len(row):
            bit = np.uint32(1 << token % BITS)
            row[token // BITS] = row[token // BITS] | bit if allowed else row[token // BITS] & ~bit
