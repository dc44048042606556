# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench core`: how fast the engine names blocks, hands them out and makes up steps.

No model is computed: the real block hasher, cache manager and scheduler do their work, and the
worker's answers are made up. All figures are taken in turn, in as many rounds as there are repeats,
so that what else the machine does meets them alike; each is the median of its rounds, and a ratio
is the median of the ratios within a round. Token ids are int32 throughout.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence

from ...tiers.settings.values import ConfigError
from ..harness.command import run_and_tell
from ..harness.report import Report
from .cases import (
    NUM_WAITING,
    Case,
    WrongWork,
    cycle_case,
    evicting_case,
    hash_cases,
    look_up_cases,
    step_case,
)
from .report import Rounds, fill_report, plot_core, print_core

HASHED_TOKENS = 2**18
MAX_REPEATS = 1000
# How much one timing of each does: some tens of milliseconds.
_CYCLES, _EVICTING, _LOOK_UPS, _STEPS = 400, 200, 1000, 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument("--repeats", type=int, help="timings of each figure (25, quick 5)")


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal. Raises ConfigError."""
    repeats = arguments.repeats
    if repeats is None:
        repeats = 5 if arguments.quick else 25
    if not 1 <= repeats <= MAX_REPEATS:
        raise ConfigError(f"--repeats takes a number from 1 to {MAX_REPEATS}, not {repeats}")
    report = Report("core", "stratakv bench core")
    return run_and_tell(
        report, arguments.out, lambda: measure(report, repeats), print_core, plot_core, WrongWork
    )


def measure(report: Report, repeats: int) -> None:
    """Fill the report. Raises WrongWork where something did not do what it should."""
    cases = make_cases(repeats)
    # As the engine does before its first step: what is there stays, and is not looked at again.
    gc.collect()
    gc.freeze()
    try:
        rounds = take_rounds(cases, repeats)
    finally:
        gc.unfreeze()
    fill_report(report, cases, rounds)


def make_cases(repeats: int) -> list[Case]:
    """What is measured, ready to be called once to warm up and `repeats` times after it."""
    steps = (repeats + 1) * _STEPS
    return [
        *hash_cases(HASHED_TOKENS),
        cycle_case(_CYCLES),
        evicting_case(_EVICTING),
        *look_up_cases(_LOOK_UPS),
        step_case("steps", _STEPS, 0, steps),
        step_case("steps_with_waiting", _STEPS, NUM_WAITING, steps),
    ]


def take_rounds(cases: Sequence[Case], repeats: int) -> list[Rounds]:
    """Wall and processor seconds of each case in each round; the cases take turns."""
    rounds = [Rounds() for _ in cases]
    for case in cases:
        case.work()
    for _ in range(repeats):
        for case, taken in zip(cases, rounds, strict=True):
            wall, busy = time.perf_counter(), time.thread_time()
            case.work()
            taken.busy_seconds.append(time.thread_time() - busy)
            taken.wall_seconds.append(time.perf_counter() - wall)
    return rounds
