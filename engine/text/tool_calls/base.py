# SPDX-License-Identifier: Apache-2.0
"""The interface of a tool-call parser, which splits a model's text into content and calls.

    parser = Parser(names)        names: the names of the request's tools
    parser.push(text) ──► Found   the certain part of the text so far; called for each piece
    parser.finish()   ──► Found   the rest; called once

The joined results are the same for any division of the text into pieces. Calls are numbered from 0,
and a call ends before the next call begins. Only the first piece of a call has the call's name.
Marks such as `<tool_call>` are neither content nor arguments.

An implementation must accept any text without raising. Text that is not a call is content.
Arguments are returned unchanged, JSON or not. A parser is used by one thread only."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import ClassVar, NamedTuple

WHITESPACE = " \t\r\n"


class CallPiece(NamedTuple):
    """An addition to a call: the call's name, or more text of the call's arguments."""

    number: int  # number of the call, from 0
    name: str = ""  # only in the first piece of a call
    arguments: str = ""


class Found(NamedTuple):
    """The results for a piece of text: content, and at most one piece for each call."""

    content: str
    calls: list[CallPiece]


class ToolCallParser(ABC):
    """A parser of one answer. `MARKS` are the marks of the model's format, which a tokenizer may
    treat as special tokens. Without a parser, special tokens are left out of the answer's text."""

    MARKS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    @abstractmethod
    def push(self, text: str) -> Found:
        """Add text, and return the content and call pieces that are certain now."""

    @abstractmethod
    def finish(self) -> Found:
        """End the text, and return the content and call pieces that were held back."""

    @staticmethod
    def new_id() -> str:
        """Return a new id for a call, in the form that the model's chat template accepts."""
        return f"call_{secrets.token_hex(12)}"


class Output:
    """A parser's results since the last `pop_found`. White space is content only between two words
    of content, not next to a call."""

    __slots__ = ("_calls", "_content", "_count", "_follows_call", "_has_content", "_space")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, CallPiece] = {}
        self._count = 0
        self._space = ""  # held white space, since a call may follow
        self._follows_call = self._has_content = False

    def add_content(self, text: str) -> None:
        """Add text that is not part of a call."""
        kept = text.rstrip(WHITESPACE)
        if not kept:  # a model may write white space without end
            self._space += text
            return
        begun = self._space + kept
        if self._follows_call and not self._has_content:
            begun = begun.lstrip(WHITESPACE)
        self._content.append(begun)
        self._space = text[len(kept) :]
        self._follows_call, self._has_content = False, True

    def begin_call(self, name: str) -> None:
        self._space, self._follows_call = "", True
        self._calls[self._count] = CallPiece(self._count, name)
        self._count += 1

    def add_arguments(self, text: str) -> None:
        """Add text to the arguments of the last call."""
        number = self._count - 1
        piece = self._calls.get(number, CallPiece(number))
        if text:
            self._calls[number] = piece._replace(arguments=piece.arguments + text)

    def pop_found(self, *, is_last: bool = False) -> Found:
        """Remove and return all results. With `is_last`, include white space that was held back."""
        if is_last:
            self._content.append("" if self._follows_call else self._space)
            self._space = ""
        found = Found("".join(self._content), list(self._calls.values()))
        self._content, self._calls = [], {}
        return found

    take = pop_found  # the older name, which parsers of other packages use


def merged(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Join all pieces of each call into a single piece."""
    whole: dict[int, CallPiece] = {}
    for number, name, arguments in pieces:
        known = whole.get(number, CallPiece(number))
        whole[number] = CallPiece(number, known.name or name, known.arguments + arguments)
    return list(whole.values())


def num_begun(text: str, mark: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
