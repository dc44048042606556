# SPDX-License-Identifier: Apache-2.0
"""Formats untrusted values for messages: in one line and with bounded length."""

from __future__ import annotations

import re

MAX_VALUE_CHARACTERS = 80
MAX_LINE_CHARACTERS = 2000

# Characters that begin another line or control a terminal.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def format_value(value: object) -> str:
    """Return the `repr` of a value, cut to `MAX_VALUE_CHARACTERS`."""
    try:
        text = repr(value)
    except ValueError:  # Python does not format integers of some thousand digits
        return f"a value of type {type(value).__name__} too long to show"
    return _cut(text, MAX_VALUE_CHARACTERS, "...")


def format_name(name: str) -> str:
    """Return a short and plain name unchanged, any other as `format_value` shows it."""
    is_plain = name.isprintable() and name == name.strip() != ""
    return name if is_plain and len(name) <= MAX_VALUE_CHARACTERS else format_value(name)


def one_line(text: str) -> str:
    """Return a message or a path in one line. A long text is cut in the middle."""
    escaped = _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)
    half = MAX_LINE_CHARACTERS // 2
    return _cut(escaped, MAX_LINE_CHARACTERS, f" ... {escaped[-half:]}")


def _cut(text: str, length: int, end: str) -> str:
    return text if len(text) <= length else text[: length - len(end)] + end
