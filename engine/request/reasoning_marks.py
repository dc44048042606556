# SPDX-License-Identifier: Apache-2.0
"""Tracks thoughts (a model's reasoning text) in a token sequence.

A thought is the text between a start mark and an end mark, such as `<think>` and `</think>`. Each
mark is one token or several. Marks are matched by token ids; `text/reasoning.py` has their texts.

    prompt            output
    … <think> a b c   d e </think> f g <think> h …
              └ a thought of 5 ┘       └ another one"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy.typing as npt

    TokenArray = npt.NDArray[Any]


class Mark:
    """The token ids of a mark, with a search for the mark that takes one token at a time."""

    __slots__ = ("_fallback", "token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        """`token_ids` must not be empty."""
        self.token_ids = tuple(token_ids)
        # The failure function of Knuth, Morris and Pratt: for each number of matched tokens, the
        # length of the longest shorter prefix of the mark that they end with.
        self._fallback = [0] * len(self.token_ids)
        matched = 0
        for index in range(1, len(self.token_ids)):
            matched = self.matched_after(matched, self.token_ids[index])
            self._fallback[index] = matched

    def __len__(self) -> int:
        return len(self.token_ids)

    def matched_after(self, matched: int, token_id: int) -> int:
        """Return the length of the longest prefix of the mark that ends the sequence after
        `token_id`. `matched` is this length before `token_id`, and must be less than the mark's
        length."""
        ids = self.token_ids
        while matched and ids[matched] != token_id:
            matched = self._fallback[matched - 1]
        return matched + (ids[matched] == token_id)

    def ends_in(self, token_ids: TokenArray) -> list[int]:
        """Return the position after each occurrence of the mark in `token_ids`, ascending."""
        size = len(self.token_ids)
        if len(token_ids) < size:
            return []
        ends = (token_ids[size - 1 :] == self.token_ids[-1]).nonzero()[0] + size
        for offset, token_id in enumerate(self.token_ids[:-1]):
            ends = ends[token_ids[ends - size + offset] == token_id]
        found: list[int] = ends.tolist()
        return found


class ThoughtTracker:
    """Whether a sequence is inside a thought, and the thought's length, updated token by token.
    Neither mark may contain the other."""

    __slots__ = ("_end", "_start", "_start_matched", "end_matched", "is_inside", "length")

    def __init__(self, start: Mark, end: Mark, *, is_inside: bool = False) -> None:
        """`is_inside` is True for a sequence that begins after a start mark."""
        self._start, self._end = start, end
        self._start_matched = 0
        self.is_inside = is_inside
        # The number of tokens of the thought so far, 0 outside a thought, and how many first tokens
        # of the end mark end the sequence. Tokens of an incomplete end mark count as thought.
        self.length = 0
        self.end_matched = 0

    @classmethod
    def behind(cls, prompt: TokenArray, start: Mark, end: Mark) -> ThoughtTracker:
        """Return a tracker for a sequence that begins with `prompt`.

        Array operations find the marks, so Python code runs only once for each mark and for the
        last tokens. In a prompt, the last start mark begins the thought, because earlier messages
        may have start marks too. In an output, the first start mark begins it, so a second start
        mark does not restart the budget."""
        tracker = cls(start, end)
        marks = [(place, True) for place in start.ends_in(prompt)]
        marks += [(place, False) for place in end.ends_in(prompt)]
        last = 0  # the position after the last mark that counted
        for place, is_start in sorted(marks):
            size = len(start) if is_start else len(end)
            if place - size >= last and (is_start or tracker.is_inside):
                tracker.is_inside, last = is_start, place
        # A mark may have begun in the last tokens; only the count of earlier tokens matters.
        longest = max(len(start), len(end)) - 1
        tail = max(last, len(prompt) - longest)
        tracker.length = tail - last if tracker.is_inside else 0
        tracker.extend(prompt[tail:].tolist())
        return tracker

    def track_token(self, token_id: int) -> None:
        if not self.is_inside:
            self._start_matched = self._start.matched_after(self._start_matched, token_id)
            self.is_inside = self._start_matched == len(self._start)
            return
        self.length += 1
        self.end_matched = self._end.matched_after(self.end_matched, token_id)
        if self.end_matched == len(self._end):
            self.is_inside = False
            self._start_matched = self.end_matched = self.length = 0

    def extend(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.track_token(token_id)

    def after(self, token_ids: Iterable[int]) -> ThoughtTracker:
        """Return a new tracker for this sequence followed by `token_ids`."""
        other = ThoughtTracker(self._start, self._end, is_inside=self.is_inside)
        other._start_matched = self._start_matched
        other.length, other.end_matched = self.length, self.end_matched
        other.extend(token_ids)
        return other


class ThoughtCounter:
    """Counts the tokens of an output that belong to thoughts. Tokens of marks do not count."""

    __slots__ = ("_ended", "_tracker", "count")

    def __init__(self, start: Mark, end: Mark, *, is_inside: bool) -> None:
        self._tracker = ThoughtTracker(start, end, is_inside=is_inside)
        self._ended = 0  # tokens of thoughts that have ended
        self.count = 0

    def count_thoughts(self, token_ids: Iterable[int], *, is_last: bool = False) -> int:
        """Count the thought tokens among the output's next tokens, and return the increase, never
        less than 0. Tokens that may begin an end mark count once no end mark follows, or with
        `is_last`."""
        before, tracker = self.count, self._tracker
        for token_id in token_ids:
            was_inside, own = tracker.is_inside, tracker.length - tracker.end_matched
            tracker.track_token(token_id)
            if was_inside and not tracker.is_inside:
                self._ended += own
        self.count = self._ended + tracker.length - (0 if is_last else tracker.end_matched)
        return self.count - before


def is_part(short: Sequence[int], long: Sequence[int]) -> bool:
    """Whether `short` is a contiguous part of `long`."""
    wanted, size = tuple(short), len(short)
    return any(tuple(long[at : at + size]) == wanted for at in range(len(long) - size + 1))
