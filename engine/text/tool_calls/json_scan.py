# SPDX-License-Identifier: Apache-2.0
"""Reads one call written as a JSON object, `{"name": "f", "arguments": {…}}`, while it grows.

    {"name": "f", "arguments": {"a": 1}}
                               ^ the call is begun: name and arguments are certain
                               ^^^^^^^^ given out as it comes, unchanged

Only as much of JSON is checked as is needed to find where parts end.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from .base import WHITESPACE, Output

# Llama's form says `parameters` where the others say `arguments`.
_ARGUMENTS = ("arguments", "parameters")
_KNOWN_KEYS = ("name", "type", "id", *_ARGUMENTS)


class ValueEnd:
    """Finds where a JSON value ends that begins with the first character pushed."""

    __slots__ = ("_depth", "_escaped", "_in_string", "is_done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_done = False

    def scan_value(self, text: str, start: int) -> int:
        """Where the part of `text` from `start` ends that belongs to the value."""
        for at in range(start, len(text)):
            char = text[at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    self.is_done = self._depth == 0
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif self._depth == 0 and (char in ",:}]" or char in WHITESPACE):
                self.is_done = True  # of a number or a word, which ends before this
                return at
            elif char in "}]":
                self._depth -= 1
                self.is_done = self._depth == 0
            if self.is_done:
                return at + 1
        return len(text)


class _Next(enum.Enum):
    OBJECT = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


# Which character leads from where to what.
_STEPS = {
    (_Next.OBJECT, "{"): _Next.FIRST_KEY,
    (_Next.COLON, ":"): _Next.VALUE,
    (_Next.COMMA, ","): _Next.KEY,
}


class CallObject:
    """Begins a call at `output` once its name and arguments are there, and adds these.

    With `only_known` nothing around the object says that it is a call, so it is none with a name
    that is none of `names`, with other keys than a call's, and without arguments. Else a name is
    enough, and the arguments are then `{}`.
    """

    def __init__(self, output: Output, names: Collection[str], *, only_known: bool = False) -> None:
        self._output = output
        self._names, self._only_known = names, only_known
        self._next = _Next.OBJECT
        self._part: ValueEnd | None = None  # a key or value that has not ended
        self._written = ""  # the text of that part
        self._key = ""
        self._name = ""
        self._arguments: str | None = None  # that came before the name
        self._streams = False
        self.has_begun = False
        self.is_over = False  # it ended, or it cannot go on
        self.text = ""  # all of it, until the call has begun

    def scan_text(self, text: str) -> int:
        """Take text until the object is over; how many characters that were."""
        at = 0
        while at < len(text) and not self.is_over:
            before = at
            if self._part is not None:
                at = self._go_on(self._part, text, at)
            elif text[at] in WHITESPACE:
                at += 1
            else:
                at += self._scan_char(text[at])
            if not self.has_begun:
                self.text += text[before:at]
        return at

    def close_truncated(self) -> None:
        """The text ends within the object: arguments that were held back are given as they are."""
        if self._part is not None and self._key in _ARGUMENTS and not self._streams:
            self._arguments = self._written
        if not self.has_begun and self._name and self._arguments:
            self._emit_call_start()
        self.is_over = True

    def _scan_char(self, char: str) -> int:
        """Go on by a character between the parts; 0 where it begins one."""
        step = _STEPS.get((self._next, char))
        if step is not None:
            self._next = step
            return 1
        if self._next in (_Next.FIRST_KEY, _Next.KEY) and char == '"':
            self._part, self._written = ValueEnd(), ""
            return 0
        if self._next is _Next.VALUE and char not in ",:}]":
            self._part, self._written = ValueEnd(), ""
            if self._key in _ARGUMENTS and char == "{" and self._name and not self.has_begun:
                self._streams = True
                self._emit_call_start()
            return 0
        if self._next in (_Next.FIRST_KEY, _Next.COMMA) and char == "}":
            self._finish_object()
            return 1
        self.is_over = True
        return 0

    def _go_on(self, part: ValueEnd, text: str, at: int) -> int:
        end = part.scan_value(text, at)
        if self._streams:
            self._output.add_arguments(text[at:end])
        else:
            self._written += text[at:end]
        if part.is_done:
            self._part = None
            self._take_part()
        return end

    def _take_part(self) -> None:
        """A key or a value has ended."""
        if self._next is not _Next.VALUE:
            self._key = _text_of(self._written) or ""
            self._next = _Next.COLON
            if self._only_known and self._key not in _KNOWN_KEYS:
                self.is_over = True  # at once: it may be a long answer
            return
        self._next = _Next.COMMA
        if self._streams:
            self._streams = False
        elif self._key == "name" and not self.has_begun:
            self._name = _text_of(self._written) or ""
            if not self._name or (self._only_known and self._name not in self._names):
                self.is_over = True
        elif self._key in _ARGUMENTS and not self.has_begun:
            self._arguments = _as_arguments(self._written)
        if self._name and self._arguments is not None and not self.has_begun and not self.is_over:
            self._emit_call_start()

    def _finish_object(self) -> None:
        if not self.has_begun and self._name and not self._only_known:
            self._arguments = "{}"
            self._emit_call_start()
        self.is_over = True

    def _emit_call_start(self) -> None:
        self.has_begun, self.text = True, ""
        self._output.begin_call(self._name)
        self._output.add_arguments(self._arguments or "")


def _text_of(written: str) -> str | None:
    """A JSON string's text; None for another value."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _as_arguments(written: str) -> str:
    """Arguments that are no object: those of some models are one in a string, or null for none."""
    text = _text_of(written)
    if text is not None:
        return text
    return "{}" if written == "null" else written
