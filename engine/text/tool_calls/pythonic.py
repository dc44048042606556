# SPDX-License-Identifier: Apache-2.0
"""The parser of calls written as a Python list: `[f(city="Bonn", days=3), g()]`.

Llama 3.2, Llama 4 and ToolACE use this form. Values are parsed as literals and never executed. A
value that is not a literal becomes a string. Arguments are output one after another, as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection
from typing import Any, ClassVar

from .base import WHITESPACE, Found, Output, ToolCallParser, num_begun

_NAME = re.compile(r"[A-Za-z0-9_.-]")
_KEYWORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# JSON's words, which models write among Python's literals.
_WORDS = {"true": True, "false": False, "null": None}
_START, _END = "<|python_start|>", "<|python_end|>"


class PythonicParser(ToolCallParser):
    """The parser of lists of calls, at the start of an answer or after a mark. The list is content
    unless its first call names one of the request's tools."""

    MARKS: ClassVar[tuple[str, ...]] = (_START, _END)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._output = Output()
        self._held = ""  # text that may be a mark, or a list's text after the last certain call
        self._word = ""  # an unfinished name, keyword or value
        self._word_ended = False
        self._keyword = ""
        self._value = _ValueScan()
        self._name = ""
        self._begun = False
        self._num_arguments = self._num_calls = 0
        self._state: Callable[[str], bool] = self._before_list

    def push(self, text: str) -> Found:
        while text:
            text = self._consume_text(text)
        return self._output.pop_found()

    def finish(self) -> Found:
        if self._state == self._in_text or not self._num_calls:
            self._output.add_content(self._held)
        return self._output.pop_found(is_last=True)

    def _consume_text(self, text: str) -> str:
        """Process some of the text, and return the rest."""
        if self._state == self._in_text:
            return self._take_text(text)
        for at, char in enumerate(text):
            self._held += char
            if not self._state(char):  # not a call
                again, self._held = self._held, ""
                self._state = self._in_text
                return again + text[at + 1 :]
            if self._state == self._in_text:  # the list has ended
                self._held = ""
                return text[at + 1 :]
        return ""

    def _in_text(self, char: str) -> bool:
        return True

    def _take_text(self, text: str) -> str:
        rest, self._held = self._held + text, ""
        found = [(at, mark) for mark in self.MARKS if (at := rest.find(mark)) >= 0]
        if not found:
            keep = max(num_begun(rest, mark) for mark in self.MARKS)
            self._output.add_content(rest[: len(rest) - keep])
            self._held = rest[len(rest) - keep :]
            return ""
        at, mark = min(found)
        self._output.add_content(rest[:at])
        if mark == _START:
            self._state = self._before_list
        return rest[at + len(mark) :]

    # The states within a list: each method returns whether the character is allowed.

    def _before_list(self, char: str) -> bool:
        if char == "[":
            self._num_calls = 0
            self._expect(self._in_name)
        return char == "[" or char in WHITESPACE

    def _in_name(self, char: str) -> bool:
        if char == "(":
            if self._word not in self.names:
                return False
            self._name, self._num_arguments, self._begun = self._word, 0, False
            self._expect(self._in_keyword)
            return True
        return self._in_word(char, _NAME)

    def _in_keyword(self, char: str) -> bool:
        if char == ")" and not self._word:
            self._end_call()
            return True
        if char == "=" and _KEYWORD.fullmatch(self._word):
            self._keyword = self._word
            self._value = _ValueScan()
            self._expect(self._in_value)
            self._begin_call()
            return True
        return self._in_word(char, _NAME)

    def _in_value(self, char: str) -> bool:
        if not self._value.ends_with(char):
            self._word += char
            return True
        before = ", " if self._num_arguments else "{"
        keyword = json.dumps(self._keyword, ensure_ascii=False)
        self._output.add_arguments(f"{before}{keyword}: {_as_json(self._word)}")
        self._num_arguments += 1
        self._held = ""
        if char == ",":
            self._expect(self._in_keyword)
        else:
            self._end_call()
        return True

    def _after_call(self, char: str) -> bool:
        if char == ",":
            self._expect(self._in_name)
        elif char == "]":
            self._state = self._in_text
        else:
            return char in WHITESPACE
        return True

    def _in_word(self, char: str, allowed: re.Pattern[str]) -> bool:
        """Add a character of a name, which may have white space around it, if it is allowed."""
        if char in WHITESPACE:
            self._word_ended = bool(self._word)
            return True
        self._word += char
        return not self._word_ended and allowed.match(char) is not None

    def _expect(self, state: Callable[[str], bool]) -> None:
        self._word, self._word_ended = "", False
        self._state = state

    def _begin_call(self) -> None:
        """Add the call, which is certain now, to the output."""
        if not self._begun:
            self._begun = True
            self._num_calls += 1
            self._output.begin_call(self._name)
        self._held = ""

    def _end_call(self) -> None:
        self._begin_call()
        self._output.add_arguments("}" if self._num_arguments else "{}")
        self._expect(self._after_call)


class _ValueScan:
    """A search for the end of a Python literal among the arguments of a call."""

    __slots__ = ("_depth", "_escaped", "_quote")

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def ends_with(self, char: str) -> bool:
        """Add a character, and return whether the value ends before it."""
        if self._quote:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == self._quote:
                self._quote = ""
        elif char in "'\"":
            self._quote = char
        elif char in "[{(":
            self._depth += 1
        elif self._depth == 0 and char in ",)":
            return True
        elif char in "]})":
            self._depth -= 1
        return False


def _as_json(written: str) -> str:
    """Return a literal as JSON; return any other text as a JSON string."""
    written = written.strip()
    # Models write line breaks inside quotes, where a Python literal needs `\n`.
    for source in (written, written.replace("\n", "\\n")):
        try:
            value = _plain(ast.parse(source, mode="eval").body)
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return json.dumps(written, ensure_ascii=False)


def _plain(node: ast.expr) -> Any:
    """Return the value of a literal. Raises ValueError for any other expression."""
    if isinstance(node, ast.Constant) and not isinstance(node.value, bytes | complex):
        if node.value is not Ellipsis:
            return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_plain(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_plain(key) if key is not None else None for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(_plain, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _plain(node.operand)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    raise ValueError("no literal")
