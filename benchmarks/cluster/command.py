# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench cluster`: measures prompts that one node computes and another answers.

handover_over_recompute   The time from the request at the router to the second token, less the
    router's seconds for the prefill node's acknowledged answer, divided by the decode node's time
    to the first token of the same prompt with an empty cache. A ticket may contain the first token
    before any block arrives; the second token needs the blocks.
whole_over_recompute      The same without subtracting the prefill node's seconds.
handover_over_wire        The time of as many bare bytes as the prompt's blocks have, on one
    connection through a link, divided by the time from the request at the decode node to its second
    token. The prefill node has already answered, and all blocks come through the same link.
push_by_chunk             The time from the request at a prefill node to its acknowledged answer if
    the prompt is one step, which sends all blocks at the end, divided by that time in many steps.
    The link's rate is set so that sending the bytes takes as long as the prefill.
itl_p99_split_over_mixed  The 99th percentile of the seconds between events of all streams behind a
    router: with a prefill and a decode node, divided by that of two nodes without tiers that each
    prefill and decode. The two clusters get the same arrivals, one core per node and the same token
    limit per step.
computed_once             Prompt tokens that both nodes computed, divided by the prompt's tokens."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ...tiers.settings.values import ConfigError
from ..harness import plots
from ..harness.comparison import WrongWork, quartiles
from ..harness.gate import Gate
from ..harness.load_client import RequestFailed
from ..harness.peer import PeerFailed
from ..harness.report import Report, chosen, median, print_table, ratios, run_and_tell
from ..harness.served import ServerFailed
from . import cases
from .cases import FULL, QUICK, Pairs, Scale

MOST_PAIRS = 1000
WHOLE, ONCE = "whole_over_recompute", "computed_once"


class Case(NamedTuple):
    """A ratio, the function that measures its pairs, and the names of the two sides."""

    ratio: str
    take: Callable[[Scale, Path, ExitStack], Pairs]
    ours: str
    other: str


CASES: Mapping[str, Case] = {
    "handover": Case("handover_over_recompute", cases.take_handover, "hand-over", "computing"),
    "wire": Case("handover_over_wire", cases.take_wire, "bare bytes", "hand-over"),
    "push": Case("push_by_chunk", cases.take_push, "at the end", "by chunk"),
    "itl": Case("itl_p99_split_over_mixed", cases.take_itl, "split", "mixed"),
}
GATES: Mapping[str, Gate] = {
    "handover_over_recompute": Gate(most=0.15),
    "handover_over_wire": Gate(least=0.8),
    "push_by_chunk": Gate(least=1.5),
    "itl_p99_split_over_mixed": Gate(most=0.6),
    ONCE: Gate(most=1.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument(
        "--cases", metavar="NAME,...", help=f"only these: {', '.join(CASES)} (default: all)"
    )
    parser.add_argument("--pairs", type=int, help="alternating pairs of each ratio (9, quick 1)")


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error. Raises ConfigError."""
    scale = QUICK if arguments.quick else FULL
    if arguments.pairs is not None:
        if not 1 <= arguments.pairs <= MOST_PAIRS:
            raise ConfigError(f"--pairs takes 1 to {MOST_PAIRS}, not {arguments.pairs}")
        scale = replace(scale, pairs=arguments.pairs)
    wanted = chosen("--cases", arguments.cases or None, list(CASES))
    report = Report("cluster", "stratakv bench cluster" + " --quick" * arguments.quick)
    failures = (WrongWork, ServerFailed, RequestFailed, PeerFailed)
    work = partial(measure, report, scale, wanted)
    return run_and_tell(report, arguments.out, work, print_cluster, plot_cluster, *failures)


def measure(report: Report, scale: Scale, wanted: Sequence[str]) -> None:
    """Measure the chosen cases one after the other, each with its own processes."""
    plan = asdict(scale) | {"load_average_before": os.getloadavg()}
    report.figures |= {"plan": plan, "pairs": {}, "spreads": {}}
    for case in map(CASES.__getitem__, wanted):
        folder = tempfile.TemporaryDirectory(prefix="stratakv-bench-")
        with folder as scratch, ExitStack() as stack:
            add_pairs(report, case, case.take(scale, Path(scratch), stack))
    plan["load_average_after"] = os.getloadavg()


def add_pairs(report: Report, case: Case, pairs: Pairs) -> None:
    """Add a case's ratio, the ratio's spread and limit, and the other values of its pairs."""
    report.figures["pairs"][case.ratio] = {
        case.ours: pairs.ours, case.other: pairs.others, "seen": pairs.seen,
    }  # fmt: skip
    found = {case.ratio: ratios(pairs.ours, pairs.others)}
    if case.ratio == "handover_over_recompute":
        found[WHOLE] = ratios(pairs.seen["whole_seconds"], pairs.others)
        found[ONCE] = pairs.seen["computed_once"]
    for name, taken in found.items():
        report.ratios[name] = median(taken)
        report.figures["spreads"][name] = quartiles(taken)
    for limit in ("link_reached", "link_bits"):
        if limit in pairs.seen:
            report.limits[f"{case.ratio}_{limit}"] = median(pairs.seen[limit])
    report.limits[f"{case.ratio}_limit"] = median(pairs.others)


def print_cluster(report: Report) -> None:
    """Print, for each figure, the values of the two sides, the ratio, its spread and its gate."""
    rows = []
    for name, ratio in report.ratios.items():
        taken = report.figures["pairs"].get(name, {})
        sides = [f"{side} {1e3 * median(v):,.1f}" for side, v in taken.items() if side != "seen"]
        low, high = report.figures["spreads"][name]
        verdict = f"{GATES[name].wanted} {GATES[name].verdict(ratio)}" if name in GATES else ""
        spread = f"{low:.3f}..{high:.3f}"
        rows.append([name, *(sides or ("", "")), f"{ratio:.3f}", spread, verdict])
    columns = ("what", "ms", "over ms", "ratio", "quartiles", "gate")
    pairs = report.figures["plan"]["pairs"]
    title = "Prefill here, decode there, on one machine; alternating pairs of each ratio:"
    print_table(f"{title} {pairs}", columns, rows)


def plot_cluster(report: Report, path: Path) -> Path:
    """Draw a bar and the gate for each ratio."""
    figure, panels = plots.new_figure(1, 1, 3.4)
    axes, names = panels[0, 0], list(report.ratios)
    met = [name not in GATES or GATES[name].is_met(report.ratios[name]) for name in names]
    labels = [name.replace("_over_", "\nover ").replace("_", " ") for name in names]
    colours = [[plots.MET if each else plots.MISSED for each in met]]
    plots.draw_bars(axes, labels, {"": list(report.ratios.values())}, colours, "%.2f", 7)
    promised = {
        float(place): GATES[name].least or GATES[name].most
        for place, name in enumerate(names)
        if name in GATES
    }
    plots.mark_gates(axes, promised, 0.84, plots.GATE)
    plots.caption(axes, "Ratios and what is promised of them (red: missed)", y="ratio")
    return plots.save_figure(figure, report.environment, path)
