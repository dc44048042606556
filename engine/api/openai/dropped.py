# SPDX-License-Identifier: Apache-2.0
"""`DroppedFields`: counts and logs the unread fields inside messages, tools and `stream_options`.

Clients send fields that only other servers accept, and fields that other servers put into answers.
Unread fields change no answer of this server, so a request with an unread field is not refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .request.protocol import (
    CalledFunction,
    ChatMessage,
    ContentPart,
    FunctionDefinition,
    MadeCall,
    StreamOptions,
    ToolDefinition,
)

logger = logging.getLogger(__name__)

# Limit of logged names of fields; clients choose the names and could fill memory and log.
MAX_NAMES = 64
_MAX_NAME_CHARACTERS = 64

_Raw = dict[str, msgspec.Raw]


class _Nested(msgspec.Struct):
    """The fields of a request that may contain unread fields, decoded one level deep."""

    messages: list[_Raw] | None = None
    tools: list[_Raw] | None = None
    stream_options: _Raw | None = None


def _names(kind: Any) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


_OF_MESSAGES, _OF_PARTS, _OF_CALLS, _OF_CALLED, _OF_TOOLS, _OF_FUNCTIONS, _OF_OPTIONS = map(
    _names,
    (
        ChatMessage, ContentPart, MadeCall, CalledFunction, ToolDefinition, FunctionDefinition,
        StreamOptions,
    ),
)  # fmt: skip
_nested = msgspec.json.Decoder(_Nested)
_several = msgspec.json.Decoder(list[_Raw] | None)
_one = msgspec.json.Decoder(_Raw)


class DroppedFields:
    """Counts and logs unread fields of requests, for one server."""

    def __init__(self, count: Callable[[int], None]) -> None:
        self._count = count
        self._told: set[str] = set()

    def report_unknown(self, body: bytes) -> None:
        """Count and log the unread fields of a request that was decoded without an error."""
        number = 0
        for name in unknown_fields(body):
            number += 1
            if name not in self._told and len(self._told) < MAX_NAMES:
                self._told.add(name)
                logger.info(
                    "a request has `%s`, which nothing here reads; it is left aside, and not told "
                    "again",
                    name,
                )
        if number:
            self._count(number)


def unknown_fields(body: bytes) -> Iterator[str]:
    """Yield the path of each unread field, without list indices, such as
    `messages.content.cache_control`."""
    nested = _nested.decode(body)
    yield from _others("stream_options", nested.stream_options or {}, _OF_OPTIONS)
    for message in nested.messages or ():
        yield from _others("messages", message, _OF_MESSAGES)
        yield from _in_list("messages.content", message.get("content"), _OF_PARTS)
        for call in _list_in(message.get("tool_calls")):
            yield from _others("messages.tool_calls", call, _OF_CALLS)
            yield from _in_function("messages.tool_calls", call, _OF_CALLED)
    for tool in nested.tools or ():
        yield from _others("tools", tool, _OF_TOOLS)
        yield from _in_function("tools", tool, _OF_FUNCTIONS)


def _others(place: str, given: Mapping[str, object], known: frozenset[str]) -> Iterator[str]:
    if not known.issuperset(given):
        for name in sorted(given.keys() - known):
            yield f"{place}.{name[:_MAX_NAME_CHARACTERS]}"


def _in_list(place: str, raw: msgspec.Raw | None, known: frozenset[str]) -> Iterator[str]:
    for each in _list_in(raw):
        yield from _others(place, each, known)


def _in_function(place: str, given: _Raw, known: frozenset[str]) -> Iterator[str]:
    yield from _others(f"{place}.function", _one.decode(given["function"]), known)


def _list_in(raw: msgspec.Raw | None) -> Sequence[_Raw]:
    """Return the objects in a JSON list; empty if `raw` is not a list."""
    if raw is None or bytes(memoryview(raw)[:1]) != b"[":
        return ()
    return _several.decode(raw) or ()
