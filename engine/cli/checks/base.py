# SPDX-License-Identifier: Apache-2.0
"""What a check says: a finding is one line, and a problem is what will not work."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from ....tiers.settings.format import one_line


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"  # works, and not as one would think
    PROBLEM = "problem"  # will not work


class Finding(NamedTuple):
    """`what` was looked at, what is the case, and what to do about it; nothing where it is well."""

    level: Level
    what: str
    fact: str
    cure: str = ""

    def line(self) -> str:
        text = f"{self.what}: {self.fact}" + (f"; {self.cure}" if self.cure else "")
        return f"{self.level:<8} {one_line(text)}"


def ok(what: str, fact: str) -> Finding:
    return Finding(Level.OK, what, fact)


def warning(what: str, fact: str, cure: str) -> Finding:
    return Finding(Level.WARNING, what, fact, cure)


def problem(what: str, fact: str, cure: str) -> Finding:
    return Finding(Level.PROBLEM, what, fact, cure)


Case = TypeVar("Case")
# Looks at what is there and changes nothing.
Check = Callable[[Case], Iterable[Finding]]


def run_checks(checks: Sequence[Check[Case]], case: Case) -> list[Finding]:
    """What all of them find, in their order. What the system does not let one look at is a
    warning."""
    found: list[Finding] = []
    for check in checks:
        try:
            found += check(case)
        except OSError as error:
            name = check.__name__.removeprefix("check_").replace("_", " ")
            found.append(
                warning(name, f"could not be looked at ({error})", "look at it by other means")
            )
    return found
