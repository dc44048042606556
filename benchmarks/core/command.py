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
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ..harness.command import run_and_tell
from ..harness.plots import GATE, caption, draw_bars, mark_gates, new_figure, save_figure
from ..harness.report import Report, median, print_table, ratios
from .cases import (
    BLOCK_SIZE,
    NUM_RUNNING,
    NUM_WAITING,
    PROMPT_TOKENS,
    Case,
    WrongWork,
    cycle_case,
    evicting_case,
    hash_cases,
    hashed_dtype,
    look_up_cases,
    step_case,
)

TITLES: Mapping[str, str] = {
    "hash": "name blocks: SHA-256, int32 ids (ours)",
    "hash_pickle_sha256": "  SHA-256 of pickled tuples",
    "hash_sha256_cbor": "  SHA-256 of CBOR (ours, for routers)",
    "sha256_alone": "  limit: SHA-256 of all bytes at once",
    "cycles_half_cached": f"{PROMPT_TOKENS:,} tokens in and out, half cached",
    "cycles_evicting": "  nothing cached, a full pool",
    "look_up_hit": f"look up {PROMPT_TOKENS:,} tokens, all cached",
    "look_up_miss": "  nothing cached",
    "steps": f"schedule and update, {NUM_RUNNING} decodes",
    "steps_with_waiting": f"  {NUM_WAITING:,} more waiting",
}
# ratio → the case above the line, the case below it
RATIOS: Mapping[str, tuple[str, str]] = {
    "hash_vs_pickle_sha256": ("hash", "hash_pickle_sha256"),
    "hash_vs_sha256_cbor": ("hash", "hash_sha256_cbor"),
    "hash_over_sha256_alone": ("hash", "sha256_alone"),
    "steps_with_waiting_over_without": ("steps_with_waiting", "steps"),
}
LIMIT = "sha256_alone"
# What vLLM's own Python core was seen to do: lowest and highest. Never measured in the same run.
REFERENCE_SOURCE = "vLLM 0.32, two cores, one thread, measured on another day"
REFERENCE: Mapping[str, tuple[float, float]] = {
    "hash": (9.1e6, 9.1e6),
    "hash_pickle_sha256": (9.1e6, 9.1e6),  # its default, so it stands beside ours too
    "hash_sha256_cbor": (3.5e6, 3.5e6),
    "cycles_half_cached": (3060.0, 3390.0),
    "steps": (312.0, 373.0),
}
_PANELS = (
    ("tokens/s", "naming blocks"),
    ("cycles/s", "requests"),
    ("look-ups/s", "prefix look-ups"),
    ("steps/s", "steps"),
)


@dataclass(slots=True)
class Rounds:
    """What one case took, round by round."""

    wall_seconds: list[float] = field(default_factory=list)
    busy_seconds: list[float] = field(default_factory=list)  # of the thread, on a processor


def fill_report(report: Report, cases: Sequence[Case], rounds: Sequence[Rounds]) -> None:
    """Turn seconds into figures, limits and ratios."""
    rates = {
        case.name: [case.count / seconds for seconds in taken.wall_seconds]
        for case, taken in zip(cases, rounds, strict=True)
    }
    report.figures["plan"] = {
        "block_size": BLOCK_SIZE,
        "token_dtype": hashed_dtype(),
        "repeats": len(rounds[0].wall_seconds),
    }
    report.figures["rates"] = {
        case.name: _figures(case, taken) for case, taken in zip(cases, rounds, strict=True)
    }
    report.figures["reference"] = {
        "source": REFERENCE_SOURCE,
        "rates": {name: {"low": low, "high": high} for name, (low, high) in REFERENCE.items()},
    }
    report.limits[f"{LIMIT}_tokens_per_second"] = median(rates[LIMIT])
    for name, (above, below) in RATIOS.items():
        report.ratios[name] = median(ratios(rates[above], rates[below]))


def _figures(case: Case, taken: Rounds) -> dict[str, Any]:
    busy = sum(taken.busy_seconds) / sum(taken.wall_seconds)
    return {
        "unit": case.unit,
        "median": case.count / median(taken.wall_seconds),
        "lowest": case.count / max(taken.wall_seconds),
        "highest": case.count / min(taken.wall_seconds),
        # Below 1, others had the processor meanwhile, and the rate is lower for it.
        "processor_share": busy,
    }


def print_core(report: Report) -> None:
    """The tables a person reads."""
    rows = [
        [
            TITLES[name],
            f"{figures['median']:,.0f}",
            f"{figures['highest']:,.0f}",
            figures["unit"],
            f"{figures['processor_share']:.2f}",
            _reference(name),
        ]
        for name, figures in report.figures["rates"].items()
    ]
    columns = ["what", "median", "highest", "unit", "CPU share", "vLLM 0.32 *"]
    repeats = report.figures["plan"]["repeats"]
    print_table(f"One thread, blocks of {BLOCK_SIZE} tokens, {repeats} rounds", columns, rows)
    print(f"* {REFERENCE_SOURCE}: for orientation, no ratio of this run.")
    print_table(
        "Ratios of this run",
        ["what", "ratio"],
        [[name.replace("_", " "), f"{ratio:.2f}"] for name, ratio in report.ratios.items()],
    )


def _reference(name: str) -> str:
    if name not in REFERENCE:
        return ""
    low, high = REFERENCE[name]
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"


def plot_core(report: Report, path: Path) -> Path:
    """Bars of the medians by unit, with a line where a reference is known."""
    rates = report.figures["rates"]
    figure, panels = new_figure(2, 2, 5.6)
    for axes, (unit, title) in zip(panels.flat, _PANELS, strict=True):
        names = [name for name in rates if rates[name]["unit"] == unit]
        medians = [rates[name]["median"] for name in names]
        labels = ["\n".join(textwrap.wrap(name.replace("_", " "), 14)) for name in names]
        draw_bars(axes, labels, {"": medians}, fmt="{:,.0f}")
        lines: dict[float, float | None] = {
            place: sum(REFERENCE[name]) / 2 for place, name in enumerate(names) if name in REFERENCE
        }
        mark_gates(axes, lines, 0.9, GATE)
        caption(axes, f"{title}, {unit}")
        if max(medians) > 10 * min(medians):
            axes.set_yscale("log")
        axes.margins(y=0.2)
    figure.suptitle(f"Lines: {REFERENCE_SOURCE}", fontsize=9, color=GATE)
    return save_figure(figure, report.environment, path)


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
    readers.integer_within(1, MAX_REPEATS)("--repeats", repeats)
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
