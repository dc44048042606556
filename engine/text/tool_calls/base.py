# SPDX-License-Identifier: Apache-2.0
"""The contract of a parser of tool calls: a model's text in, content and calls out.

    parser = Parser(names)        names: those of the tools that the request offers
    parser.push(text) ──► Found   the certain part of the text so far, any number of times
    parser.finish()   ──► Found   the rest, once

The joined results are the same for any division of the text into pieces. Calls are numbered from 0
and come one after the other. Only the first piece of a call has the call's name. Marks are neither
content nor arguments.

An implementation must accept any text without raising. Text that is not a call is content, and
arguments come out as the model wrote them, JSON or not. One thread uses a parser.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import ClassVar, NamedTuple

WHITESPACE = " \t\r\n"


class CallPiece(NamedTuple):
    """An addition to a call."""

    number: int  # number of the call, from 0
    name: str = ""  # set in the first piece
    arguments: str = ""


class Found(NamedTuple):
    """The findings in a piece of text: content, and at most one piece for each call."""

    content: str
    calls: list[CallPiece]


class ToolCallParser(ABC):
    """A parser of one answer. `MARKS` are the texts of its form that may be special tokens of a
    tokenizer. Answers without a parser leave special tokens out."""

    MARKS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    @abstractmethod
    def push(self, text: str) -> Found:
        """Add text, and return the findings that are certain now."""

    @abstractmethod
    def finish(self) -> Found:
        """End the text, and return the findings that were held back."""

    @staticmethod
    def new_id() -> str:
        """Return a new id for a call, in a form that the model's chat template accepts."""
        return f"call_{secrets.token_hex(12)}"


class Output:
    """The findings of a parser since the last `pop_found`. White space counts as content only
    between two words, not beside a call."""

    __slots__ = ("_calls", "_content", "_count", "_follows_call", "_has_content", "_space")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, CallPiece] = {}
        self._count = 0
        self._space = ""  # white space, held back: a call may follow
        self._follows_call = self._has_content = False

    def add_content(self, text: str) -> None:
        """Add text that is no part of a call."""
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
        """Take out all findings. With `is_last` held white space is included."""
        if is_last:
            self._content.append("" if self._follows_call else self._space)
            self._space = ""
        found = Found("".join(self._content), list(self._calls.values()))
        self._content, self._calls = [], {}
        return found

    take = pop_found  # its older name, which parsers of other packages call


def merged(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """Join all pieces of each call into a single piece."""
    whole: dict[int, CallPiece] = {}
    for number, name, arguments in pieces:
        known = whole.get(number, CallPiece(number))
        whole[number] = CallPiece(number, known.name or name, known.arguments + arguments)
    return list(whole.values())


def num_begun(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
