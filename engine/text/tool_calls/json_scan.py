# SPDX-License-Identifier: Apache-2.0
"""Reads one call that is a JSON object, `{"name": "f", "arguments": {…}}`, piece by piece.

    {"name": "f", "arguments": {"a": 1}}
                               ^ the call begins: name and arguments are certain
                               ^^^^^^^^ is returned piece by piece, unchanged

The JSON is checked only as far as needed to find the end of each part."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection

from .base import WHITESPACE, Output

# The keys of a call's arguments: Llama's form has `parameters`, all other forms `arguments`.
_ARGUMENTS = ("arguments", "parameters")
_KNOWN_KEYS = ("name", "type", "id", *_ARGUMENTS)


class ValueEnd:
    """A search for the end of a JSON value, which begins with the first scanned character."""

    __slots__ = ("_depth", "_escaped", "_in_string", "is_done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False
        self.is_done = False

    def scan_value(self, text: str, start: int) -> int:
        """Return the end of the value in `text`, which continues at `start`. Return the length of
        `text` if the value does not end in it."""
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
                self.is_done = True  # a number or word ends before `char`
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


# The next state, by state and character.
_STEPS = {
    (_Next.OBJECT, "{"): _Next.FIRST_KEY,
    (_Next.COLON, ":"): _Next.VALUE,
    (_Next.COMMA, ","): _Next.KEY,
}


class CallObject:
    """A JSON object that may be a call. When name and arguments are certain, the call and its
    arguments are added to `output`.

    With `only_known`, as in text without a mark, an object is a call only if it has a name in
    `names`, arguments, and no other keys than a call's. Without `only_known` a name is enough, and
    missing arguments are `{}`."""

    def __init__(self, output: Output, names: Collection[str], *, only_known: bool = False) -> None:
        self._output = output
        self._names, self._only_known = names, only_known
        self._next = _Next.OBJECT
        self._part: ValueEnd | None = None  # an unfinished key or value
        self._written = ""  # the text of `_part`
        self._key = ""
        self._name = ""
        self._arguments: str | None = None  # complete arguments, if they are not streamed
        self._streams = False
        self.has_begun = False
        self.is_over = False  # the object has ended, or is no call
        self.text = ""  # the object's text, until the call has begun

    def scan_text(self, text: str) -> int:
        """Add text up to the end of the object, and return the number of characters used."""
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
        """End the text within the object. Arguments that were held back are output unchanged."""
        if self._part is not None and self._key in _ARGUMENTS and not self._streams:
            self._arguments = self._written
        if not self.has_begun and self._name and self._arguments:
            self._emit_call_start()
        self.is_over = True

    def _scan_char(self, char: str) -> int:
        """Process a character between keys and values. Return 1 if the character is used, or 0 if
        it begins a key or value or ends the object."""
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
        """Process the key or value in `_written`, which has ended."""
        if self._next is not _Next.VALUE:
            self._key = _text_of(self._written) or ""
            self._next = _Next.COLON
            if self._only_known and self._key not in _KNOWN_KEYS:
                self.is_over = True  # no later, since the object may be a long answer
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
    """Return the text of a JSON string; None for another JSON value."""
    try:
        value = json.loads(written)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None


def _as_arguments(written: str) -> str:
    """Return complete arguments as JSON. Some models write the arguments inside a string, or write
    null for no arguments."""
    text = _text_of(written)
    if text is not None:
        return text
    return "{}" if written == "null" else written
