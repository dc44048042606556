# SPDX-License-Identifier: Apache-2.0
"""Compiles an adapter's regular expressions for module names; refuses very slow expressions.

Python's `re` may try every way in which a text can match a pattern, one after another. The number
of ways has an upper bound, which is computed from the parsed pattern before any match: one
character repeated has one way for each length, and a repeated group has the product of the ways of
its repeats. `(a+)+` has too many ways; `layers\\.\\d+\\.(q|k)_proj` has few."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

# The parser of `re`, which returns the parsed pattern as a tree.
_parser: Any = importlib.import_module("re._parser")

T = TypeVar("T")

MOST_CHARACTERS = 512  # the longest pattern
MOST_WAYS = 50_000  # the most ways to match, over all patterns of a field
MOST_TRIES = 10_000_000  # the most ways times modules; they take a few seconds
_NAME_CHARACTERS = 128  # about the length of the longest module names

_ONE_CHARACTER = {"LITERAL", "NOT_LITERAL", "ANY", "IN"}
_NO_CHOICE = {*_ONE_CHARACTER, "AT"}
_REPEATS = {"MAX_REPEAT", "MIN_REPEAT"}
_PLAIN = re.compile(r"[\w.-]+")


class PatternValues(Generic[T]):
    """Values by patterns of module names, as in PEFT; the first pattern that matches counts.

    Plain names are looked up and not matched, because an adapter may name each of its modules. The
    table has them by length and by the places of their dots, which stand for any character."""

    __slots__ = ("_expressions", "_plain", "_values", "num_ways")

    def __init__(self) -> None:
        self._values: list[T] = []
        self._plain: dict[int, dict[tuple[int, ...], dict[str, int]]] = {}
        self._expressions: list[tuple[int, re.Pattern[str]]] = []
        self.num_ways = 0  # the most comparisons of a module, a layout of dots included

    def add(self, key: str, value: T) -> None:
        """Add a pattern after the others. Raises ValueError as `compile_pattern` does."""
        if _PLAIN.fullmatch(key) and len(key) <= MOST_CHARACTERS:
            layouts = self._plain.setdefault(len(key), {})
            dots = tuple(place for place, each in enumerate(key) if each == ".")
            self.num_ways += dots not in layouts
            layouts.setdefault(dots, {})[key] = len(self._values)
        else:
            pattern, num_ways = compile_pattern(key)
            self._expressions.append((len(self._values), pattern))
            self.num_ways += num_ways
        self._values.append(value)

    def value_of(self, module: str, default: T) -> T:
        """Return the value of the first pattern that matches the module's name, or its end after a
        dot."""
        plain = min(self._plain_matches(module), default=len(self._values))
        first = next(
            (number for number, each in self._expressions if number < plain and each.match(module)),
            plain,
        )
        return self._values[first] if first < len(self._values) else default

    def _plain_matches(self, module: str) -> Iterator[int]:
        for end in ends_of(module):
            for dots, names in self._plain.get(len(end), {}).items():
                letters = list(end)
                for place in dots:
                    letters[place] = "."
                found = names.get("".join(letters))
                if found is not None:
                    yield found


def ends_of(module: str) -> Iterator[str]:
    """Yield a module's name, and its ends after each dot."""
    yield module
    for place, each in enumerate(module, 1):
        if each == ".":
            yield module[place:]


def compile_pattern(
    key: str, before: str = r"(.*\.)?(", after: str = ")$"
) -> tuple[re.Pattern[str], int]:
    """Compile a pattern between `before` and `after`; without these it matches the whole module
    name or its end after a dot, as in PEFT. Also return an upper bound of the ways in which the
    pattern can match. Raises ValueError with the reason if the pattern is too long, is no regular
    expression, or may take for ever."""
    if len(key) > MOST_CHARACTERS:
        raise ValueError(f"longer than {MOST_CHARACTERS} characters")
    try:
        num_ways = _count_ways(_parser.parse(key))
        return re.compile(f"{before}{key}{after}"), num_ways
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
