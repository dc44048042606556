# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench cluster`: prompts computed on one node and answered by another, on one machine.

handover_over_recompute   From the request at the router to the second token, less the router's
    own seconds of the prefill leg, which ends with the acknowledged answer; over the decode
    node's time to the first token of the same prompt where it finds none of it. The first token
    may come out of a ticket before any block does; the second one takes the blocks.
whole_over_recompute      The same with the prefill leg.
handover_over_wire        Bare bytes of the prompt's blocks, on one connection through a link;
    over the time from the request at the decode node, behind the prefill node's acknowledged
    answer, to its second token, with all blocks through the same link and none before.
push_by_chunk             From the request at a prefill node to its acknowledged answer: where
    the prompt is one step, so that all is pushed at the end, over where it is many, through a
    link on which the bytes take as long as the prompt takes without it.
itl_p99_split_over_mixed  99th percentile of the seconds between events of all streams, behind a
    router: one prefill and one decode node, over two without tiers that do both; the same
    arrivals, a core for each node, as many tokens in a step.
computed_once             Prompt tokens computed by both nodes, over those of the prompt.
"""

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
    """A ratio, the function that takes its pairs, and the names of both sides."""

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
    """The options of this benchmark; `--quick` and `--out` are the dispatcher's."""
    parser.add_argument(
        "--cases", metavar="NAME,...", help=f"only these: {', '.join(CASES)} (default: all)"
    )
    parser.add_argument("--pairs", type=int, help="alternating pairs of each ratio (9, quick 1)")


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal. Raises ConfigError."""
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
    """Take one case after the other, each in processes of its own."""
    plan = asdict(scale) | {"load_average_before": os.getloadavg()}
    report.figures |= {"plan": plan, "pairs": {}, "spreads": {}}
    for case in map(CASES.__getitem__, wanted):
        folder = tempfile.TemporaryDirectory(prefix="stratakv-bench-")
        with folder as scratch, ExitStack() as stack:
            add_pairs(report, case, case.take(scale, Path(scratch), stack))
    plan["load_average_after"] = os.getloadavg()


def add_pairs(report: Report, case: Case, pairs: Pairs) -> None:
    """Add the ratio, its spread, its limit, and the further values of the pairs."""
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
    """Print both sides, ratio, spread and gate of each figure."""
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
    """Draw a bar for each ratio, with its gate."""
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
