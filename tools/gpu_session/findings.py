# SPDX-License-Identifier: Apache-2.0
"""Findings of the step `first`: wrong tokens, bytes or order, with which measurements are useless.

`tools/gpu_tokens.py` marks wrong results in its JSON. A failed comparison of a test, or an access
out of bounds, is wrong too, except for failed comparisons of the tests in `NOT_ABOUT_BYTES`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from .running import FAILED, OK, Outcome
from .steps import KERNELS, ORDER, TOKENS

# Errors that are caused by a wrong address and leave the device unusable.
WRONG_ADDRESS = re.compile(
    r"illegal memory access|misaligned address|device-side assert|illegal instruction", re.I
)
# Each command's file of results.
REPORTS = {TOKENS: "tokens.json", ORDER: "junit.xml", KERNELS: "junit.xml"}
_COMPARISON = re.compile(r"assert\b|AssertionError")
# test → the reason why its failed comparisons mean no wrong byte
NOT_ABOUT_BYTES = {
    "test_the_pool_is_sized_by_what_is_left": "others hold memory meanwhile",
    "test_without_the_events_the_fault_is_seen": "beside others the planted fault may not show",
    "test_without_the_event_the_faults_are_seen": "beside others the planted fault may not show",
}


class Kind(Enum):
    """The meaning of a failure."""

    WRONG = "a wrong token or byte, or an access out of bounds"
    EXCUSED = "one of NOT_ABOUT_BYTES"
    OTHER = "something else went wrong"


class Failure(NamedTuple):
    """A failed test or check: its name and the first line of its message."""

    text: str
    kind: Kind


def find_wrong(results: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Return each failure of kind WRONG, with the name of its command."""
    return [
        f"{outcome.name}: {failure.text}"
        for outcome in outcomes
        for failure in read_failures(results, outcome.name) or ()
        if failure.kind is Kind.WRONG
    ]


def find_unproven(results: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Return a sentence for each command that did not prove tokens, bytes and order to be right. A
    command whose failures are all EXCUSED has proved it."""
    found = []
    for outcome in outcomes:
        if outcome.name not in REPORTS or outcome.result == OK:
            continue
        failures = read_failures(results, outcome.name)
        if failures is None:
            found.append(f"{outcome.name} {outcome.result} without a result that can be read")
        elif outcome.result != FAILED or {each.kind for each in failures} != {Kind.EXCUSED}:
            found.append(f"{outcome.name} {outcome.result}, with no wrong byte found until then")
    return found


def read_failures(results: Path, name: str) -> list[Failure] | None:
    """Return the failures in a command's report; None if the report cannot be read. Commands
    without an entry in REPORTS have no failures."""
    if name not in REPORTS:
        return []
    path = results / name / REPORTS[name]
    try:
        return list(_checks(path) if name == TOKENS else _tests(path))
    except (OSError, ValueError, KeyError, ElementTree.ParseError):
        return None


def _checks(path: Path) -> Iterator[Failure]:
    for check in json.loads(path.read_text())["checks"]:
        text = f"{check['name']} ({check['said'][:120]})"
        if check["result"] == "wrong" or WRONG_ADDRESS.search(check["said"]):
            yield Failure(text, Kind.WRONG)
        elif check["result"] != "ok":
            yield Failure(text, Kind.OTHER)


def _tests(path: Path) -> Iterator[Failure]:
    for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314 - pytest wrote it just now
        name = case.get("name", "")
        for failure in (*case.iter("failure"), *case.iter("error")):
            message = failure.get("message") or "no message"
            is_comparison = bool(failure.tag == "failure" and _COMPARISON.match(message))
            if is_comparison and name.partition("[")[0] in NOT_ABOUT_BYTES:
                kind = Kind.EXCUSED
            elif is_comparison or WRONG_ADDRESS.search(message):
                kind = Kind.WRONG
            else:
                kind = Kind.OTHER
            yield Failure(f"{name}: {message.splitlines()[0][:120]}", kind)


def advice(wrong: Sequence[str], unproven: Sequence[str], sanitize: str) -> list[str]:
    """Return the last lines that `first` prints: whether to run `figures` next, or the command
    `sanitize` instead."""
    if wrong:
        return [
            f"WRONG: {'; '.join(wrong[:5])}" + (f"; and {len(wrong) - 5} more" * (len(wrong) > 5)),
            "DO NOT RUN `figures`: its figures would be those of wrong answers. Run instead",
            f"  {sanitize}",
            "and give the machine back.",
        ]
    if unproven:
        return [
            f"NOT SHOWN: {'; '.join(unproven)}. Read the log first; figures count only once "
            "tokens, bytes and order are shown."
        ]
    return ["tokens, bytes and order are right; `figures` is next, at once"]
