# SPDX-License-Identifier: Apache-2.0
"""The promise of a parser of tool calls: a model's text in, content and calls out.

    parser = Parser(names)        names: those of the tools that the request offers
    parser.push(text) ──► Found   what of the text so far is certain, any number of times
    parser.finish()   ──► Found   the rest, once

A caller may rely on: joined, the results are the same however the text is cut. Calls are numbered
from 0 and come one after the other; the first piece of each has its name, and no later one has.
Marks are neither content nor arguments.

An implementation must take any text without raising: what is no call is content, and arguments are
given as the model wrote them, be they JSON or not. It is used by one thread.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import ClassVar, NamedTuple

WHITESPACE = " \t\r\n"


class CallPiece(NamedTuple):
    """What is added to a call."""

    number: int  # of the call, from 0
    name: str = ""  # with the first piece
    arguments: str = ""


class Found(NamedTuple):
    """What a piece of text adds: at most one piece for each call."""

    content: str
    calls: list[CallPiece]


class ToolCallParser(ABC):
    """Parses one answer. `MARKS` are texts of the form that a tokenizer may have as special tokens,
    which are left out of other answers."""

    MARKS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)

    @abstractmethod
    def push(self, text: str) -> Found:
        """Take text; what is certain now."""

    @abstractmethod
    def finish(self) -> Found:
        """The text has ended; what was held back."""

    @staticmethod
    def new_id() -> str:
        """A call's id, in the form that the model's chat template takes back."""
        return f"call_{secrets.token_hex(12)}"


class Output:
    """The findings of a parser since the last `pop_found`. White space beside a call is no content,
    but between two words."""

    __slots__ = ("_calls", "_content", "_count", "_follows_call", "_has_content", "_space")

    def __init__(self) -> None:
        self._content: list[str] = []
        self._calls: dict[int, CallPiece] = {}
        self._count = 0
        self._space = ""  # held back: a call may follow
        self._follows_call = self._has_content = False

    def add_content(self, text: str) -> None:
        """Text that is no part of a call."""
        kept = text.rstrip(WHITESPACE)
        if not kept:  # a model may write nothing else for ever
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
        """More of the arguments of the call that was begun last."""
        number = self._count - 1
        piece = self._calls.get(number, CallPiece(number))
        if text:
            self._calls[number] = piece._replace(arguments=piece.arguments + text)

    def pop_found(self, *, is_last: bool = False) -> Found:
        """All of it, held white space too where it `is_last`."""
        if is_last:
            self._content.append("" if self._follows_call else self._space)
            self._space = ""
        found = Found("".join(self._content), list(self._calls.values()))
        self._content, self._calls = [], {}
        return found


def merged(pieces: Iterable[CallPiece]) -> list[CallPiece]:
    """One piece for each call, of all of its pieces."""
    whole: dict[int, CallPiece] = {}
    for number, name, arguments in pieces:
        known = whole.get(number, CallPiece(number))
        whole[number] = CallPiece(number, known.name or name, known.arguments + arguments)
    return list(whole.values())


def num_begun(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
