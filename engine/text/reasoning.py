# SPDX-License-Identifier: Apache-2.0
"""The marks around a model's reasoning, and the splitting of answers at these marks.

The marks are given as options, or are well-known marks that are single tokens of the tokenizer.
Answers are split by text, so a mark is found whatever tokens it consists of. Budgets and counts use
the token ids of the marks (`engine/request/reasoning_marks.py`)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from ...tiers.settings.format import format_value
from ...tiers.settings.values import ConfigError
from ..request.reasoning_marks import Mark, ThoughtCounter, is_part
from ..request.sampling_params import MAX_REASONING_MARK_TOKENS, SamplingParams
from .detokenizer import Decoder, HidingDecoder
from .tokenizer import Tokenizer

NONE = "none"  # the value of a mark with which answers are not split
# Well-known pairs of a start and an end mark, in the order of the search.
WELL_KNOWN_MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("◁think▷", "◁/think▷"),
)
# The text before a mark when its tokens are found, since some tokenizers mark a text's start.
_ANCHOR = "\n"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The reasoning marks of one model. Neither mark's text contains the other's."""

    start: str
    end: str
    start_token_ids: tuple[int, ...]
    end_token_ids: tuple[int, ...]
    # Special tokens to omit from a text that must show the marks; None: every text shows the marks.
    hidden_token_ids: frozenset[int] | None = None

    def is_open(self, prompt: str, *, goes_on: bool = False) -> bool:
        """Whether the answer to a prompt begins within reasoning. With `goes_on` the answer
        continues an assistant message. Without `goes_on`, only a start mark at the very end of the
        prompt counts, because the chat template writes it there; marks in messages do not count."""
        if goes_on:
            return prompt.rfind(self.start) > prompt.rfind(self.end)
        return prompt.rstrip().endswith(self.start.rstrip())


def find_marks(tokenizer: Tokenizer | None, start: str, end: str) -> ReasoningMarks | None:
    """Return the marks `start` and `end`. If `start` and `end` are empty, return well-known marks
    that are tokens of the vocabulary. Return None if no marks are found, or if `start` or `end` is
    `none`. Raises ConfigError for a mark that the tokenizer cannot represent."""
    if NONE in (start, end):
        return None
    if start or end:
        if tokenizer is None:
            raise ConfigError(
                "--reasoning-start and --reasoning-end are texts, and the model has no "
                "tokenizer.json; copy it into the model's directory or drop them"
            )
        return _marks_of(
            tokenizer,
            (start, _spelt("--reasoning-start", tokenizer, start)),
            (end, _spelt("--reasoning-end", tokenizer, end)),
        )
    if tokenizer is None:
        return None
    for first, last in WELL_KNOWN_MARKS:
        first_id, last_id = tokenizer.token_id(first), tokenizer.token_id(last)
        if first_id is not None and last_id is not None:
            return _marks_of(tokenizer, (first, (first_id,)), (last, (last_id,)))
    return None


def with_reasoning_marks(
    params: SamplingParams, marks: ReasoningMarks | None, *, are_split: bool = False
) -> SamplingParams:
    """Return the parameters with the token ids of the marks, if the parameters need marks and have
    none. A reasoning budget needs marks. A grammar needs marks if reasoning is split off
    (`are_split`), because the grammar then begins after the reasoning. Raises ValueError for a
    budget without known marks, and for bad words that ban the end mark."""
    if params.thinking_token_budget is None and (
        not are_split or params.structured_outputs is None or marks is None
    ):
        return params
    if not params.reasoning_end_token_ids:
        if marks is None:
            raise ValueError(
                "thinking_token_budget needs the marks around a thought, and the model's tokenizer "
                "has none that are well known; start with --reasoning-start and --reasoning-end, "
                "or leave it out"
            )
        params = msgspec.structs.replace(
            params,
            reasoning_start_token_ids=marks.start_token_ids,
            reasoning_end_token_ids=marks.end_token_ids,
        )
    if any(is_part(ids, params.reasoning_end_token_ids) for ids in params.bad_words_token_ids):
        raise ValueError(
            "bad_words must not ban the end mark of a thought, which thinking_token_budget forces, "
            f"got {format_value(params.bad_words)}; leave out one of them"
        )
    return params


def _marks_of(
    tokenizer: Tokenizer, start: tuple[str, tuple[int, ...]], end: tuple[str, tuple[int, ...]]
) -> ReasoningMarks:
    shown = {*start[1], *end[1]}
    special = tokenizer.special_token_ids
    hidden = special - shown if shown & special else None
    return ReasoningMarks(start[0], end[0], start[1], end[1], hidden)


def _spelt(flag: str, tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Return the tokens of a mark that is at the beginning of a line."""
    token_id = tokenizer.token_id(text)
    if token_id is not None:
        return (token_id,)
    try:
        before = tokenizer.encode(_ANCHOR, add_special_tokens=False)
        ids = tokenizer.encode(_ANCHOR + text, add_special_tokens=False)
        is_apart = ids[: len(before)] == before
        ids = ids[len(before) :] if is_apart else tokenizer.encode(text, add_special_tokens=False)
        is_spelt = text.strip() in tokenizer.decode(ids, skip_special_tokens=False)
    except ValueError:
        is_spelt = False
    if not is_spelt:
        raise ConfigError(
            f"{flag} takes a text that the model's tokens can spell, not {format_value(text)}; "
            "see the tokenizer's vocabulary"
        )
    if len(ids) > MAX_REASONING_MARK_TOKENS:
        raise ConfigError(
            f"{flag} takes a text of up to {MAX_REASONING_MARK_TOKENS} tokens, not of {len(ids)}"
        )
    return tuple(ids)


class SplitText(NamedTuple):
    """The reasoning and the content in a piece of an answer."""

    reasoning: str
    content: str


class ReasoningSplitter:
    """A splitter of text that arrives in pieces. Marks are neither reasoning nor content.

    The splitter holds back only text that may begin a mark. A mark without effect (a start mark
    within reasoning, an end mark outside) is omitted too."""

    __slots__ = ("_held", "_marks", "is_inside")

    def __init__(self, start: str, end: str, *, is_inside: bool = False) -> None:
        self._marks = ((start, True), (end, False))
        self._held = ""
        self.is_inside = is_inside

    def split_text(self, text: str) -> SplitText:
        """Add text, and return the part that is certainly reasoning or certainly content."""
        sides: dict[bool, list[str]] = {True: [], False: []}
        rest = self._held + text
        while found := self._first_mark(rest):
            at, mark, begins = found
            sides[self.is_inside].append(rest[:at])
            rest, self.is_inside = rest[at + len(mark) :], begins
        keep = max(_num_begun(rest, mark) for mark, _ in self._marks)
        self._held = rest[len(rest) - keep :]
        sides[self.is_inside].append(rest[: len(rest) - keep])
        return SplitText("".join(sides[True]), "".join(sides[False]))

    def flush_text(self) -> SplitText:
        """Return the held text, which did not become a mark."""
        held, self._held = self._held, ""
        return SplitText(held, "") if self.is_inside else SplitText("", held)

    def _first_mark(self, text: str) -> tuple[int, str, bool] | None:
        found = [(text.find(mark), mark, begins) for mark, begins in self._marks]
        return min((each for each in found if each[0] >= 0), default=None)


def _num_begun(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


class Thoughts:
    """Splits one answer into reasoning and content, and counts the reasoning tokens."""

    __slots__ = ("_counter", "_included", "_kept", "_marks", "_splitter", "_streamed")

    def __init__(
        self,
        marks: ReasoningMarks,
        *,
        is_inside: bool,
        included: bool = True,
        streamed: bool = True,
    ) -> None:
        """`is_inside`: the prompt ends within reasoning. Without `included` the text of the
        reasoning is dropped. Without `streamed` the whole reasoning is returned when it has
        ended."""
        self._marks, self._included, self._streamed = marks, included, streamed
        self._splitter = ReasoningSplitter(marks.start, marks.end, is_inside=is_inside)
        self._counter = ThoughtCounter(
            Mark(marks.start_token_ids), Mark(marks.end_token_ids), is_inside=is_inside
        )
        self._kept = ""

    def decoder(self, tokenizer: Decoder) -> Decoder:
        """Return a decoder whose texts show the marks, and perhaps other special tokens."""
        hidden = self._marks.hidden_token_ids
        return tokenizer if hidden is None else HidingDecoder(tokenizer, hidden)

    def split(self, text: str, *, is_last: bool) -> SplitText:
        """Split the next piece of text into reasoning and content."""
        reasoning, content = self._splitter.split_text(text)
        if is_last:
            rest = self._splitter.flush_text()
            reasoning, content = reasoning + rest.reasoning, content + rest.content
        if not self._included:
            return SplitText("", content)
        if not self._streamed:
            self._kept += reasoning
            if self._splitter.is_inside and not is_last:
                return SplitText("", content)
            reasoning, self._kept = self._kept, ""
        return SplitText(reasoning, content)

    def count_reasoning_tokens(self, token_ids: Iterable[int], *, is_last: bool) -> int:
        """Return how many more tokens are now known to belong to reasoning."""
        return self._counter.count_thoughts(token_ids, is_last=is_last)
