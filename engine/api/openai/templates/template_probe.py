# SPDX-License-Identifier: Apache-2.0
"""A template's ways, found out by rendering small conversations: in which form it shows calls of
tools, and which messages it leaves out.

Templates drop what they do not know without a word: a role, a call beside a text, a second system
message. What they show is not to be read from their source, so it is tried. What has been found out
is kept for each template, so that a conversation is seldom rendered more than once.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .sandbox import TemplateRefused

Seen = dict[str, Any]  # a message as the template sees it
Render = Callable[[Sequence[Seen]], Awaitable[str]]  # raises TemplateRefused

# A content of so many characters, found in the prompt where it has to be, is no accident.
_TELLING_CHARACTERS = 12
_LOOKED_FOR_CHARACTERS = 64
_MAX_KNOWN_SHAPES = 1024
# Each takes a search through the whole prompt; a template that changes so many changes them all.
_MAX_SEARCHES = 8
# Of all texts together, in looking for one that stands in another.
_MAX_CHARACTERS_COUNTED = 20_000_000

_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe_value"
_TEXT, _RESULT = "probe text", "probe result"
_ID = "probe000"  # and a digit: in the form that the strictest templates take
_TOOL = {"type": "function", "function": {"name": "probe_tool", "parameters": {"type": "object"}}}

ABSENT, NULL, EMPTY = "absent", "null", "empty"
# As transformers gives a content that is null, and in the order in which the others are tried.
_CONTENTS: Mapping[str, Seen] = {ABSENT: {}, NULL: {"content": None}, EMPTY: {"content": ""}}

# Digits alone come through filters, and through JSON.
_STEM = str(10**7 + secrets.randbelow(9 * 10**7))
_MARK = re.compile(rf"{_STEM}\d{{14}}")


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template is to be given calls, and what tools answer."""

    is_shown: bool = True  # False: calls go as text
    content: str = ABSENT  # of a message that has calls alone: ABSENT, NULL or EMPTY
    as_text: bool = False  # arguments are a JSON text, not an object
    takes_text: bool = True  # arguments that are no object may be a text
    beside_text: bool = True  # calls show in a message that has a text too
    several: bool = True  # a message may have more than one
    shows_results: bool = True  # False: what tools answer goes as a user's message


class TemplateProbe:
    """What is known of one template. Its renderings are given by the caller, with the limits that
    hold for all others."""

    def __init__(self, source: str) -> None:
        self.names_developer = "developer" in source
        self._takes_parts: bool | None = None
        self._takes_both: dict[tuple[str, str], bool] = {}
        self._forms: dict[bool, CallForm] = {}
        self._left_out: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    async def takes_parts(self, render: Render) -> bool:
        """Whether contents have to be lists of parts: a text alone would show nothing, as in
        templates that know pictures."""
        if self._takes_parts is None:
            user = {"role": "user", "content": _TEXT}
            self._takes_parts = False
            if not await _shows(render, user):
                self._takes_parts = await _shows(render, in_parts(user))
        return self._takes_parts

    async def takes_both(self, render: Render, one: str, other: str) -> bool:
        """Whether a message of the role `other` is shown that follows one of the role `one` at the
        start."""
        if (one, other) not in self._takes_both:
            both = [{"role": one, "content": _NAME}, {"role": other, "content": _KEY}]
            try:
                shown = await render([*both, {"role": "user", "content": _TEXT}])
            except TemplateRefused:
                shown = ""
            self._takes_both[one, other] = _NAME in shown and _KEY in shown
        return self._takes_both[one, other]

    async def call_form(
        self, render: Callable[[Sequence[Seen], Sequence[Any] | None], Awaitable[str]], tools: bool
    ) -> CallForm:
        """How calls are shown in a conversation with or without `tools`. `render` takes messages
        and tools."""
        if tools not in self._forms:
            self._forms[tools] = await _find_call_form(render, [_TOOL] if tools else None)
        return self._forms[tools]

    async def left_out(
        self, text: str, seen: Sequence[Seen], shape: object, render: Render
    ) -> list[int]:
        """The places of messages with something in them that left no trace in the prompt `text`.
        `shape` is what else decided it."""
        missing, unsure = _look_for(text, seen)
        if unsure:
            missing |= unsure & await self._left_out_by_shape(seen, shape, render)
        if not missing:
            return []
        # What the template does may depend on the texts, so it is asked about these before anything
        # is refused. Where it takes no other text at all, nothing can be said against it.
        return await _left_out(_marked(seen, missing), sorted(missing), render) or []

    async def _left_out_by_shape(
        self, seen: Sequence[Seen], shape: object, render: Render
    ) -> frozenset[int]:
        """Those of a small conversation with the same roles."""
        key = hashlib.sha256(repr((shape, *map(_shape, seen))).encode()).digest()
        known = self._left_out.get(key)
        if known is None:
            found = await _left_out(_small(seen), range(len(seen)), render)
            known = frozenset(range(len(seen)) if found is None else found)
            self._left_out[key] = known
            if len(self._left_out) > _MAX_KNOWN_SHAPES:
                self._left_out.popitem(last=False)
        else:
            self._left_out.move_to_end(key)
        return known


def in_parts(message: Seen) -> Seen:
    """The same message, its content as a list of parts."""
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


async def _shows(render: Render, message: Seen) -> bool:
    try:
        return _TEXT in await render([message])
    except TemplateRefused:
        return False


def _look_for(text: str, seen: Sequence[Seen]) -> tuple[set[int], set[int]]:
    """The places of messages whose contents do not stand in a prompt one behind the other, and of
    those that are so short that this may be an accident."""
    missing: set[int] = set()
    unsure: set[int] = set()
    start = 0
    for place, message in enumerate(seen):
        content = (message.get("content") or "").strip()
        parts = [call["function"]["name"] for call in message.get("tool_calls") or ()]
        if len(missing) >= _MAX_SEARCHES:
            if content or parts:
                missing.add(place)
            continue
        if content and not parts:
            if len(content) < _TELLING_CHARACTERS:
                unsure.add(place)
            parts = [content]
        for part in parts:
            part = part[-_LOOKED_FOR_CHARACTERS:]
            found = text.find(part, start)
            if found < 0:  # as templates write texts in JSON
                found = text.find(json.dumps(part, ensure_ascii=False)[1:-1], start)
            if found >= 0:
                start = found + len(part)
            else:
                missing.add(place)
                break
    return missing, unsure | (_in_others(seen) - missing)


def _in_others(seen: Sequence[Seen]) -> set[int]:
    """The places of messages that share a part with another message, which may be what was found.
    A long conversation is not compared to its end; the rest of its places count as such."""
    if len(seen) < 2:
        return set()
    wholes = [_whole(message) for message in seen]
    together = "\n".join(wholes)
    most = _MAX_CHARACTERS_COUNTED // (len(together) or 1)
    found, start = set(), 0
    for place, (message, whole) in enumerate(zip(seen, wholes, strict=True)):
        end = start + len(whole)
        for part in _looked_for(message):
            for form in {part, json.dumps(part, ensure_ascii=False)[1:-1]}:
                most -= 1
                if most < 0 or 0 <= together.find(form) < start or together.find(form, end) >= 0:
                    found.add(place)
        start = end + 1
    return found


def _whole(message: Seen) -> str:
    """All texts of a message that a template may show."""
    calls = message.get("tool_calls") or ()
    texts = [message.get("content") or "", message.get("reasoning_content") or ""]
    texts += [f"{call['function']['name']} {call['function']['arguments']}" for call in calls]
    return "\n".join(texts)


def _looked_for(message: Seen) -> list[str]:
    """The parts of a message that a prompt is searched for: the end of its text, or the names that
    it calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls") or ()]
    content = (message.get("content") or "").strip()
    parts = names or ([content] if content else [])
    return [part[-_LOOKED_FOR_CHARACTERS:] for part in parts]


def _shape(message: Seen) -> tuple[object, ...]:
    content, calls = message.get("content"), message.get("tool_calls") or ()
    kind = content if content is None else bool(content.strip())
    arguments = [type(call["function"]["arguments"]).__name__ for call in calls]
    return (message["role"], "content" in message, kind, arguments, *(sorted(message)))


def _mark(place: int, call: int = 0) -> str:
    """Of a message's text, or of one of its calls, which are counted from 1."""
    return f"{_STEM}{place:07d}{call:07d}"


def _small(seen: Sequence[Seen]) -> list[Seen]:
    """The same conversation with a mark in place of each text."""
    small = []
    for place, message in enumerate(seen):
        other = dict(message)
        if (message.get("content") or "").strip():
            other["content"] = _mark(place)
        if message.get("reasoning_content"):
            other["reasoning_content"] = other["thinking"] = "thought"
        if message.get("tool_calls"):
            other["tool_calls"] = _small_calls(message, place)
        small.append(other)
    return small


def _small_calls(message: Seen, place: int) -> list[Seen]:
    """The same calls with marks in place of what they say."""
    calls = []
    for number, call in enumerate(message["tool_calls"], 1):
        mark = _mark(place, number)
        arguments: object = {f"a{mark}": mark}
        if isinstance(call["function"]["arguments"], str):
            arguments = json.dumps(arguments)
        calls.append({**call, "function": {"name": f"f{mark}", "arguments": arguments}})
    return calls


def _marked(seen: Sequence[Seen], places: Iterable[int]) -> list[Seen]:
    """The same conversation with a mark behind what those messages say."""
    marked = [dict(message) for message in seen]
    for place in places:
        message = marked[place]
        if (message.get("content") or "").strip():
            message["content"] = f"{message['content'].rstrip()} {_mark(place)}"
        if message.get("tool_calls"):
            message["tool_calls"] = _small_calls(message, place)
    return marked


async def _left_out(
    marked: Sequence[Seen], places: Iterable[int], render: Render
) -> list[int] | None:
    """Which of the marks are not in the prompt; None where the template refuses these messages."""
    try:
        text = await render(marked)
    except TemplateRefused:
        return None
    found = set(_MARK.findall(text))
    return [place for place in places if not found.issuperset(_marks(marked[place], place))]


def _marks(message: Seen, place: int) -> Iterable[str]:
    """Those that are to be in the prompt. Models have been trained on calls without the text that
    was beside them, so that may be left out."""
    calls = message.get("tool_calls") or ()
    if calls:
        return [_mark(place, number) for number in range(1, len(calls) + 1)]
    return [_mark(place)] if (message.get("content") or "").strip() else []


async def _find_call_form(
    render: Callable[[Sequence[Seen], Sequence[Any] | None], Awaitable[str]],
    tools: Sequence[Any] | None,
) -> CallForm:
    async def prompt(turns: Sequence[Seen]) -> str:
        try:
            return await render(turns, tools)
        except TemplateRefused:
            return ""

    question: Seen = {"role": "user", "content": "question"}

    async def prompt_with(content: Seen, number: int = 1, *, as_text: bool = False) -> str:
        """The prompt with so many calls; empty where the template refuses one or leaves it out."""
        calls, results = [], []
        for each in range(number):
            arguments = _arguments(each)
            of_call = {"name": f"{_NAME}{each}", "arguments": arguments}
            if as_text:
                of_call["arguments"] = json.dumps(arguments)
            calls.append({"id": f"{_ID}{each}", "type": "function", "function": of_call})
            results.append({"role": "tool", "tool_call_id": f"{_ID}{each}", "content": _RESULT})
        turns = [question, {"role": "assistant", **content, "tool_calls": calls}]
        # The result of a tool is a message of its own, which templates know or not.
        text = await prompt([*turns, *results]) or await prompt(turns)
        is_whole = all(f"{_NAME}{i}" in text or f"{_KEY}{i}" in text for i in range(number))
        return text if is_whole else ""

    found: list[tuple[int, CallForm]] = []
    for name, content in _CONTENTS.items():
        by_object, by_text = await prompt_with(content), await prompt_with(content, as_text=True)
        # Some join arguments to a text, some write an object as Python has it.
        is_odd = _KEY not in by_object or repr(_arguments(0)) in by_object
        as_text = _KEY in by_text and is_odd
        text = by_text if as_text else by_object
        if text:
            # Some write a content that is not there as Python has that.
            form = CallForm(True, name, as_text, bool(by_text), shows_results=_RESULT in text)
            found.append((text.count("None"), form))
    beside = await prompt_with({"content": _TEXT}, as_text=bool(found) and found[0][1].as_text)
    if not found and beside:
        return CallForm(True, EMPTY, shows_results=_RESULT in beside)
    if not found:
        answer = {"role": "assistant", "content": _TEXT}
        result = {"role": "tool", "tool_call_id": f"{_ID}0", "content": _RESULT}
        return CallForm(False, shows_results=_RESULT in await prompt([question, answer, result]))
    _, form = min(found, key=lambda each: each[0])
    several = await prompt_with(_CONTENTS[form.content], 2, as_text=form.as_text)
    return replace(form, beside_text=bool(beside), several=bool(several))


def _arguments(number: int) -> dict[str, str]:
    return {f"{_KEY}{number}": _VALUE}
