# SPDX-License-Identifier: Apache-2.0
"""Compiles an adapter's regular expressions for module names; refuses very slow expressions.

Python's `re` may try every way in which a text can match a pattern, one after another. The number
of ways has an upper bound, which is computed from the parsed pattern before any match: one
character repeated has one way for each length, and a repeated group has the product of the ways of
its repeats. `(a+)+` has too many ways; `layers\\.\\d+\\.(q|k)_proj` has few."""

from __future__ import annotations

import importlib
import re
from typing import Any

# The parser of `re`, which returns the parsed pattern as a tree.
_parser: Any = importlib.import_module("re._parser")

MOST_CHARACTERS = 512  # the longest pattern
MOST_WAYS = 50_000  # the most ways to match, over all patterns of an adapter
_NAME_CHARACTERS = 128  # about the length of the longest module names

_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_NO_CHOICE = {*_ONE_CHARACTER, "AT"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}


def compile_pattern(key: str) -> tuple[re.Pattern[str], int]:
    """Compile a pattern as in PEFT, where it must match the whole module name or its end after a
    dot. Also return an upper bound of the ways in which the pattern can match. Raises ValueError
    with the reason if the pattern is too long, is no regular expression, or may take for ever."""
    if len(key) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    try:
        num_ways = _count_ways(_parser.parse(key))
        return re.compile(rf"(.*\.)?({key})$"), num_ways
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression ({error})") from error


def _count_ways(tree: Any) -> int:
    """Return an upper bound, at most MOST_WAYS, of the ways in which a part of a pattern can match.
    Raises ValueError for more ways, and for parts that cannot be counted, such as look-aheads."""
    num_ways = 1
    for code, argument in tree:
        num_ways = _limited(num_ways * _ways_of(str(code), argument))
    return num_ways


def _ways_of(code: str, argument: Any) -> int:
    if code in _NO_CHOICE:
        return 1
    if code == "SUBPATTERN":
        return _count_ways(argument[-1])
    if code == "BRANCH":
        return _limited(sum(_count_ways(each) for each in argument[1]))
    if code in _REPEATS:
        return _ways_of_repeat(*argument)
    raise ValueError(f"one with {code.lower()}, which is not matched here")


def _ways_of_repeat(fewest: int, most: int, tree: Any) -> int:
    num_turns = min(int(most), _NAME_CHARACTERS)
    if num_turns > 1 and tree.getwidth()[0] == 0:
        raise ValueError("one that repeats what may be empty, which may take for ever to match")
    of_one, ways, total = _count_ways(tree), 1, 0
    for turn in range(num_turns + 1):
        if turn >= fewest:
            total = _limited(total + ways)
        if turn < num_turns:
            ways = _limited(ways * of_one)
    return max(total, 1)


def _limited(num_ways: int) -> int:
    if num_ways > MOST_WAYS:
        raise ValueError(f"one with more than {MOST_WAYS} ways to match, which may take for ever")
    return num_ways
