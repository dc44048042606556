# SPDX-License-Identifier: Apache-2.0
"""`TemplateProbe`: renders test conversations to find the form of tool calls that a chat template
shows, and the messages that the template leaves out.

A template silently drops input that it does not support: a role, a call beside a text, a second
system message. A template's source does not show the dropped input reliably, so the probe renders
examples. Results are kept for each template, so most conversations are rendered only once."""

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

Seen = dict[str, Any]  # a message in the form for the template
Render = Callable[[Sequence[Seen]], Awaitable[str]]  # returns a prompt, or raises TemplateRefused

# Stands for a picture in the text of a message. No valid text has these noncharacters. A client's
# text with the mark is an error, because the prompt has more marks than the request has pictures.
PICTURE_MARK = "\ufdd0picture\ufdd1"
# A content of at least this many characters does not appear in a prompt by chance.
_TELLING_CHARACTERS = 12
_LOOKED_FOR_CHARACTERS = 64
_MAX_KNOWN_SHAPES = 1024
# Limit of failed searches in a prompt: a template that changes this many texts changes all texts.
_MAX_SEARCHES = 8
# Limit of characters to compare in the search for texts that are part of another message.
_MAX_CHARACTERS_COUNTED = 20_000_000

_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe_value"
_TEXT, _RESULT = "probe text", "probe result"
_ID = "probe000"  # with one more digit, an id that the strictest templates accept
_TOOL = {"type": "function", "function": {"name": "probe_tool", "parameters": {"type": "object"}}}

ABSENT, NULL, EMPTY = "absent", "null", "empty"
# The forms of a missing content, in the order in which they are tried; transformers uses ABSENT.
_CONTENTS: Mapping[str, Seen] = {ABSENT: {}, NULL: {"content": None}, EMPTY: {"content": ""}}

# Marks are digits, because filters of a template and JSON leave digits unchanged.
_STEM = str(10**7 + secrets.randbelow(9 * 10**7))
_MARK = re.compile(rf"{_STEM}\d{{14}}")


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a template accepts tool calls and tool results."""

    is_shown: bool = True  # False: calls become text in the message's content
    content: str = ABSENT  # the content of a message that has only calls: ABSENT, NULL or EMPTY
    as_text: bool = False  # the template gets arguments as a JSON text, not as an object
    takes_text: bool = True  # the template accepts arguments that are a text
    beside_text: bool = True  # calls are shown in a message that also has a text
    several: bool = True  # a message may have more than one call
    shows_results: bool = True  # False: results of tools become a user's message


class TemplateProbe:
    """Tests one chat template, and keeps the results. The methods' parameter `render` is a function
    that renders a conversation within the server's limits."""

    def __init__(self, source: str) -> None:
        self.names_developer = "developer" in source
        self._takes_parts: bool | None = None
        self._takes_both: dict[tuple[str, str], bool] = {}
        self._forms: dict[bool, CallForm] = {}
        self._left_out: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    async def takes_parts(self, render: Render) -> bool:
        """Return whether contents must be lists of parts: some templates ignore plain texts."""
        if self._takes_parts is None:
            user = {"role": "user", "content": _TEXT}
            self._takes_parts = False
            if not await _shows(render, user):
                self._takes_parts = await _shows(render, in_parts(user))
        return self._takes_parts

    async def takes_both(self, render: Render, one: str, other: str) -> bool:
        """Return whether the template shows a message of role `other` after one of role `one`."""
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
        """Return the form of calls in prompts with or without `tools`. `render` makes a prompt."""
        if tools not in self._forms:
            self._forms[tools] = await _find_call_form(render, [_TOOL] if tools else None)
        return self._forms[tools]

    async def left_out(
        self, text: str, seen: Sequence[Seen], shape: object, render: Render
    ) -> list[int]:
        """Return the indices of non-empty messages that are not in the prompt `text`. `shape` has
        the inputs of the template other than messages."""
        missing, unsure = _look_for(text, seen)
        if unsure:
            missing |= unsure & await self._left_out_by_shape(seen, shape, render)
        if not missing:
            return []
        # The template may depend on the texts, so the real texts with marks are rendered before a
        # message is reported as left out. If the template refuses marks, no message is reported.
        return await _left_out(_marked(seen, missing), sorted(missing), render) or []

    async def _left_out_by_shape(
        self, seen: Sequence[Seen], shape: object, render: Render
    ) -> frozenset[int]:
        """Return the indices that the template drops if all texts in the messages are marks."""
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
    content = message.get("content")
    if not isinstance(content, str):
        return message
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(PICTURE_MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text or content == text else []
    return {**message, "content": parts}


async def _shows(render: Render, message: Seen) -> bool:
    try:
        return _TEXT in await render([message])
    except TemplateRefused:
        return False


def _look_for(text: str, seen: Sequence[Seen]) -> tuple[set[int], set[int]]:
    """Return two sets of indices: messages whose contents do not follow in order in the prompt; and
    messages whose match may be chance, because a content is short or part of another message."""
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
            if found < 0:  # the template may have written the text as a JSON string
                found = text.find(json.dumps(part, ensure_ascii=False)[1:-1], start)
            if found >= 0:
                start = found + len(part)
            else:
                missing.add(place)
                break
    return missing, unsure | (_in_others(seen) - missing)


def _in_others(seen: Sequence[Seen]) -> set[int]:
    """Return the indices of messages with a part that is also in another message: a search in the
    prompt may find the other message. Beyond _MAX_CHARACTERS_COUNTED, return all later indices."""
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
    """Return all texts of a message that a template may show."""
    calls = message.get("tool_calls") or ()
    texts = [message.get("content") or "", message.get("reasoning_content") or ""]
    texts += [f"{call['function']['name']} {call['function']['arguments']}" for call in calls]
    return "\n".join(texts)


def _looked_for(message: Seen) -> list[str]:
    """Return a message's texts to search in the prompt: names of called functions, or its end."""
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
    """Return the mark for the text of message `place`, or for its call number `call`, from 1."""
    return f"{_STEM}{place:07d}{call:07d}"


def _small(seen: Sequence[Seen]) -> list[Seen]:
    """Return the conversation with a mark in place of each text."""
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
    """Return a message's calls with marks in place of names and arguments."""
    calls = []
    for number, call in enumerate(message["tool_calls"], 1):
        mark = _mark(place, number)
        arguments: object = {f"a{mark}": mark}
        if isinstance(call["function"]["arguments"], str):
            arguments = json.dumps(arguments)
        calls.append({**call, "function": {"name": f"f{mark}", "arguments": arguments}})
    return calls


def _marked(seen: Sequence[Seen], places: Iterable[int]) -> list[Seen]:
    """Return the conversation with marks in the texts and calls of the messages at `places`."""
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
    """Return the `places` whose marks the prompt lacks; None if the template refuses `marked`."""
    try:
        text = await render(marked)
    except TemplateRefused:
        return None
    found = set(_MARK.findall(text))
    return [place for place in places if not found.issuperset(_marks(marked[place], place))]


def _marks(message: Seen, place: int) -> Iterable[str]:
    """Return a message's marks that must be in the prompt. The text of a message with calls may be
    left out, because some models were not trained with a text beside calls."""
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
        """Return the prompt with `number` calls; "" if the template refuses or drops a call."""
        calls, results = [], []
        for each in range(number):
            arguments = _arguments(each)
            of_call = {"name": f"{_NAME}{each}", "arguments": arguments}
            if as_text:
                of_call["arguments"] = json.dumps(arguments)
            calls.append({"id": f"{_ID}{each}", "type": "function", "function": of_call})
            results.append({"role": "tool", "tool_call_id": f"{_ID}{each}", "content": _RESULT})
        turns = [question, {"role": "assistant", **content, "tool_calls": calls}]
        # Some templates refuse tool results, so the second try has no tool results.
        text = await prompt([*turns, *results]) or await prompt(turns)
        is_whole = all(f"{_NAME}{i}" in text or f"{_KEY}{i}" in text for i in range(number))
        return text if is_whole else ""

    found: list[tuple[int, CallForm]] = []
    for name, content in _CONTENTS.items():
        by_object, by_text = await prompt_with(content), await prompt_with(content, as_text=True)
        # A template that adds arguments to a text, or writes objects as Python's repr, needs texts.
        is_odd = _KEY not in by_object or repr(_arguments(0)) in by_object
        as_text = _KEY in by_text and is_odd
        text = by_text if as_text else by_object
        if text:
            # A template that writes a missing content as "None" counts as a worse match.
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
