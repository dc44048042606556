# SPDX-License-Identifier: Apache-2.0
"""Values from outside as messages show them: in one line and never long, whatever came.

Knows nothing of what is said about them.
"""

from __future__ import annotations

import re

MAX_VALUE_CHARACTERS = 80
MAX_SENTENCE_CHARACTERS = 2000

# They would begin another line, or have a terminal do something.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def shown(value: object) -> str:
    """The value as Python writes it, cut where that is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no whole number of more than some thousand digits
        return f"a {type(value).__name__} too long to show"
    return _cut(text, MAX_VALUE_CHARACTERS, "...")


def sentence(text: str) -> str:
    """A message as one line. What is cut is the middle: the cure is said last."""
    escaped = _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)
    half = MAX_SENTENCE_CHARACTERS // 2
    return _cut(escaped, MAX_SENTENCE_CHARACTERS, f" ... {escaped[-half:]}")


def _cut(text: str, length: int, end: str) -> str:
    return text if len(text) <= length else text[: length - len(end)] + end
