# SPDX-License-Identifier: Apache-2.0
"""Parsers of formats in which a call is a JSON object, with or without marks around it.

    Hermes, Qwen   <tool_call>{"name": "f", "arguments": {…}}</tool_call>
    Llama 3, 4     <|python_tag|>{"name": "f", "parameters": {…}}; {…}     or without the mark
    Mistral        [TOOL_CALLS][{"name": "f", "arguments": {…}}, {…}]      or [TOOL_CALLS]f{…}

Text between marks that is not a call becomes content; the marks are dropped."""

from __future__ import annotations

import re
import secrets
import string
from abc import abstractmethod
from collections.abc import Callable, Collection
from typing import ClassVar

from .base import WHITESPACE, Found, Output, ToolCallParser, num_begun
from .json_scan import CallObject, ValueEnd

_ID_CHARACTERS = string.ascii_letters + string.digits
# A call's head, between mark and arguments: a name and, in some versions, an id and another mark.
_MISTRAL_HEAD = re.compile(
    r"\s*([A-Za-z0-9_.-]{1,64})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]*\s*)?(?:\[ARGS\]\s*)?\{"
)
_MOST_HEAD_CHARACTERS = 256  # limit of a head, or of white space before a call


class _StepParser(ToolCallParser):
    """A parser that is a state machine. A state is a method that processes text from `_rest`, and
    returns whether the next state can continue at once."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._output = Output()
        self._rest = ""
        self._has_ended = False
        self._object = CallObject(self._output, self.names)
        self._state: Callable[[], bool] = self._in_text
        self._after_object: Callable[[], bool] = self._in_text

    def push(self, text: str) -> Found:
        self._rest += text
        while self._state():
            pass
        return self._output.pop_found()

    def finish(self) -> Found:
        self._has_ended = True
        while self._state():
            pass
        return self._output.pop_found(is_last=True)

    @abstractmethod
    def _handle_mark(self, mark: str) -> None:
        """Set the state that processes the text after a mark."""

    def _in_text(self) -> bool:
        found = [(at, mark) for mark in self.MARKS if (at := self._rest.find(mark)) >= 0]
        if found:
            at, mark = min(found)
            self._output.add_content(self._rest[:at])
            self._rest = self._rest[at + len(mark) :]
            self._handle_mark(mark)
            return True
        num_held = max((num_begun(self._rest, mark) for mark in self.MARKS), default=0)
        keep = 0 if self._has_ended else num_held
        certain = len(self._rest) - keep
        self._output.add_content(self._rest[:certain])
        self._rest = self._rest[certain:]
        return False

    def _expect_object(self, then: Callable[[], bool], *, only_known: bool = False) -> None:
        self._object = CallObject(self._output, self.names, only_known=only_known)
        self._state, self._after_object = self._in_object, then

    def _in_object(self) -> bool:
        used = self._object.scan_text(self._rest)
        self._rest = self._rest[used:]
        if self._has_ended:
            self._object.close_truncated()
        if not self._object.is_over:
            return False
        if self._object.has_begun:
            self._state = self._after_object
        else:  # the object was no call
            self._rest = self._object.text + self._rest
            self._state = self._in_text
        return True

    def _between(self, separators: str, then: Callable[[], bool]) -> bool:
        """Process the text after an object. After a separator or before `{`, expect another object;
        otherwise treat the text as content."""
        rest = self._rest.lstrip(WHITESPACE)
        has_separator = rest[:1] in tuple(separators)
        bare = rest[1:].lstrip(WHITESPACE) if has_separator else rest
        # One character of the white space before the separator is kept.
        before = self._rest[: len(self._rest) > len(rest)] + rest[:has_separator]
        if not bare and not self._has_ended:
            self._rest = before
            return False
        if bare.startswith("{"):
            self._rest = bare
            self._expect_object(then)
        else:
            self._rest = before + bare if bare else ""
            self._state = self._in_text
        return True


class HermesParser(_StepParser):
    """The parser for Hermes 2 and 3, and for Qwen 2.5 and 3."""

    MARKS: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")

    def _handle_mark(self, mark: str) -> None:
        if mark == self.MARKS[0]:
            self._expect_object(self._closing)

    def _closing(self) -> bool:
        """Skip to the end mark; some models write an extra brace before it."""
        end, rest = self.MARKS[1], self._rest.lstrip(WHITESPACE + "}]")
        is_begun = rest != end and end.startswith(rest)
        if is_begun and not self._has_ended:
            self._rest = rest
            return False
        self._rest = "" if is_begun else rest.removeprefix(end)
        self._state = self._in_text
        return True


class Llama3Parser(_StepParser):
    """The parser for Llama 3.1 to 4. Without a mark, an answer is a call if it begins with a JSON
    object that has parameters and the name of one of the request's tools."""

    MARKS: ClassVar[tuple[str, ...]] = ("<|python_tag|>", "<|python_start|>", "<|python_end|>")

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = self._parse_start

    def _handle_mark(self, mark: str) -> None:
        if mark != "<|python_end|>":
            self._expect_object(self._next_object)

    def _parse_start(self) -> bool:
        bare = self._rest.lstrip(WHITESPACE)
        is_far = len(self._rest) - len(bare) > _MOST_HEAD_CHARACTERS
        if not bare and not is_far and not self._has_ended:
            return False
        if bare.startswith("{") and not is_far:
            self._expect_object(self._next_object, only_known=True)
        else:
            self._state = self._in_text
        return True

    def _next_object(self) -> bool:
        return self._between(";,", self._next_object)


class MistralParser(_StepParser):
    """The parser for Mistral's older and newer models."""

    MARKS: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
    _value: ValueEnd

    @staticmethod
    def new_id() -> str:
        """Return nine letters and digits, the only form that Mistral's chat templates accept."""
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))

    def _handle_mark(self, mark: str) -> None:
        if mark == self.MARKS[0]:
            self._state = self._head

    def _head(self) -> bool:
        """Process the text after `[TOOL_CALLS]`: a list, an object, or a name with arguments."""
        rest = self._rest.lstrip(WHITESPACE)
        if rest.startswith("["):
            self._rest = rest[1:]
            self._expect_object(self._next_object)
            return True
        if rest.startswith("{"):  # a single object without the brackets of a list
            self._expect_object(self._next_object)
            return True
        at = self._rest.find("{", 0, _MOST_HEAD_CHARACTERS)
        if at < 0 and len(self._rest) < _MOST_HEAD_CHARACTERS and not self._has_ended:
            return False
        head = _MISTRAL_HEAD.fullmatch(self._rest[: at + 1])
        if head is None:
            self._state = self._in_text
            return True
        self._output.begin_call(head[1])
        self._rest, self._value = self._rest[at:], ValueEnd()
        self._state = self._in_arguments
        return True

    def _in_arguments(self) -> bool:
        used = self._value.scan_value(self._rest, 0)
        self._output.add_arguments(self._rest[:used])
        self._rest = self._rest[used:]
        if self._value.is_done:
            self._state = self._in_text
        return self._value.is_done

    def _next_object(self) -> bool:
        rest = self._rest.lstrip(WHITESPACE)
        if rest.startswith("]"):
            self._rest, self._state = rest[1:], self._in_text
            return True
        return self._between(",", self._next_object)


class ListParser(MistralParser):
    """The parser of an answer that is a JSON list of calls, as the grammar of required tool calls
    makes it. A call that is cut off before its arguments is left out."""

    MARKS: ClassVar[tuple[str, ...]] = ()

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._state = self._head

    def push(self, text: str) -> Found:
        return super().push(text)._replace(content="")

    def finish(self) -> Found:
        return super().finish()._replace(content="")


class ArgumentsParser(ToolCallParser):
    """The parser of an answer that consists of the arguments of the only allowed tool."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        [self._name] = names
        self._output = Output()
        self._has_begun = False

    def push(self, text: str) -> Found:
        if text and not self._has_begun:
            self._has_begun = True
            self._output.begin_call(self._name)
        if text:
            self._output.add_arguments(text)
        return self._output.pop_found()

    def finish(self) -> Found:
        return self._output.pop_found(is_last=True)
