# SPDX-License-Identifier: Apache-2.0
"""Compiles the patterns of an adapter that name modules, and refuses those that may take for ever.

Python's matcher tries the ways through a pattern one after another. Their number is bounded by the
product of the choices, which the tree of the pattern tells before anything is matched: a repeat of
one character has a way for each length, and a repeat of a group the product of the ways of its
turns. `(a+)+` has more ways than can be tried; `layers\\.\\d+\\.(q|k)_proj` has few.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

# The trees that `re` itself compiles.
_parser: Any = importlib.import_module("re._parser")

MOST_CHARACTERS = 512  # of a pattern
MOST_WAYS = 50_000  # through all patterns of an adapter
_NAME_CHARACTERS = 128  # the longest names of modules have about as many

_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_NO_CHOICE = {*_ONE_CHARACTER, "AT"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}


def compile_pattern(key: str) -> tuple[re.Pattern[str], int]:
    """Compile a pattern as PEFT matches it: against the end of a module's name, from a dot on. Also
    return the number of ways through it. Raises ValueError with the reason if it is too long, is no
    regular expression, or may take for ever."""
    if len(key) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    try:
        num_ways = _count_ways(_parser.parse(key))
        return re.compile(rf"(.*\.)?({key})$"), num_ways
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"no regular expression ({error})") from error


def _count_ways(tree: Any) -> int:
    """Return an upper bound of the ways through a part of a pattern, at most MOST_WAYS. Raises
    ValueError for more, and for parts whose ways are not counted here."""
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
