# SPDX-License-Identifier: Apache-2.0
"""Findings of the step `first`: wrong tokens, bytes or order, after which nothing is measured.

`tools/gpu_tokens.py` names its own in its JSON. Of the tests every failed comparison counts, and
every access out of bounds, but for those of `NOT_ABOUT_BYTES`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from .running import OK, Outcome
from .steps import KERNELS, ORDER, TOKENS

# An error of these kinds leaves the device unusable, and comes of a wrong address.
WRONG_ADDRESS = re.compile(
    r"illegal memory access|misaligned address|device-side assert|illegal instruction", re.I
)
_COMPARISON = re.compile(r"assert\b|AssertionError")
# test → why its failed comparison is no wrong byte.
NOT_ABOUT_BYTES = {
    "test_the_pool_is_sized_by_what_is_left": "others hold memory meanwhile",
    "test_without_the_events_the_fault_is_seen": "beside others the planted fault may not show",
    "test_without_the_event_the_faults_are_seen": "beside others the planted fault may not show",
}


def find_wrong(results: Path, outcomes: Sequence[Outcome]) -> list[str]:
    """Everything that was found to be wrong, with the command that found it."""
    found: list[str] = []
    for outcome in outcomes:
        folder = results / outcome.name
        if outcome.name == TOKENS:
            found += (f"{TOKENS}: {each}" for each in _wrong_tokens(folder / "tokens.json"))
        elif outcome.name in (ORDER, KERNELS):
            found += (f"{outcome.name}: {each}" for each in _wrong_tests(folder / "junit.xml"))
    return found


def find_unproven(outcomes: Sequence[Outcome]) -> list[str]:
    """The commands that would have shown tokens, bytes and order to be right, and did not end
    well."""
    ended = {each.name: each.result for each in outcomes}
    return [name for name in (TOKENS, ORDER, KERNELS) if name in ended and ended[name] != OK]


def _wrong_tokens(path: Path) -> Iterator[str]:
    try:
        checks = json.loads(path.read_text())["checks"]
    except (OSError, ValueError, KeyError):
        return  # it came to no word; its outcome says so
    for check in checks:
        if check["result"] == "wrong" or WRONG_ADDRESS.search(check["said"]):
            yield f"{check['name']} ({check['said'][:120]})"


def _wrong_tests(path: Path) -> Iterator[str]:
    try:
        tree = ElementTree.parse(path)  # noqa: S314 - pytest wrote it a moment ago
    except (OSError, ElementTree.ParseError):
        return
    for case in tree.iter("testcase"):
        name = case.get("name", "")
        for failure in (*case.iter("failure"), *case.iter("error")):
            message = failure.get("message", "")
            is_comparison = failure.tag == "failure" and _COMPARISON.match(message)
            if name.partition("[")[0] in NOT_ABOUT_BYTES and is_comparison:
                continue
            if is_comparison or WRONG_ADDRESS.search(message):
                yield f"{name}: {message.splitlines()[0][:120]}"
                break


def advice(wrong: Sequence[str], unproven: Sequence[str], sanitize: str) -> list[str]:
    """The last lines of `first`: whether `figures` comes next. `sanitize` is the command that comes
    instead."""
    if wrong:
        return [
            f"WRONG: {'; '.join(wrong[:5])}" + (f"; and {len(wrong) - 5} more" * (len(wrong) > 5)),
            "DO NOT RUN `figures`: its figures would be those of wrong answers. Run instead",
            f"  {sanitize}",
            "and give the machine back.",
        ]
    if unproven:
        return [
            f"NOT SHOWN: {', '.join(unproven)} did not end well, though nothing wrong was found. "
            "Read the log first; figures count only once it has."
        ]
    return ["tokens, bytes and order are right; `figures` is next, at once"]
