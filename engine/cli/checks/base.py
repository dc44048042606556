# SPDX-License-Identifier: Apache-2.0
"""`Finding`: the result of a check of `stratakv doctor`, one line of output with a level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, TypeVar

from ....tiers.settings.format import one_line


class Level(StrEnum):
    """The severity of a finding."""

    OK = "ok"
    WARNING = "warning"  # the engine works, but in an unexpected way
    PROBLEM = "problem"  # the engine or the server will not work


class Finding(NamedTuple):
    """The result of a check: the subject `what`, the subject's state `fact`, a remedy `cure`."""

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
# A check is a function that reads the state of the machine and changes nothing.
Check = Callable[[Case], Iterable[Finding]]


def run_checks(checks: Sequence[Check[Case]], case: Case) -> list[Finding]:
    """Return the findings of all checks in order. A check that raises OSError becomes a warning."""
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
