# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench vllm`: the time to the first token in vLLM, with StrataKV's or vLLM's tiers.

The figures compare seconds to the first token of prompts whose first 3,600 tokens have already been
computed. The engine and the model (with random weights) are always the same; only the place of the
KV differs. The engines run in the Python of --python; docs/vllm.md lists the required packages.

ssd_over_fs               The time with vLLM's own fs tier over the time with StrataKV's SSD tier,
                          after a restart.
slab_over_memory          The time with vLLM's own memory region or an LMCache server over shared
                          memory, whichever is faster, over the time with StrataKV's slab, which
                          needs a copy and two checks more than the region.
vllm_load_over_best_peer  The lower of ssd_over_fs and slab_over_memory.
server_over_cold          The time of computing the prompt over the time of loading its prefix by
                          TCP from a cache server that another process has filled.
no_hit_cost               Seconds of new prompts with StrataKV's tiers, over the seconds without
                          tiers. A region that is being read stores no new chunks; the stored share
                          is printed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ...tiers.settings.values import ConfigError
from ..core.vllm_cases import interpreter
from ..harness import plots
from ..harness.comparison import Outcome, WrongWork
from ..harness.gate import Gate
from ..harness.peer import PeerFailed
from ..harness.report import Report, median, print_table, run_and_tell
from ..harness.served import ServerFailed
from . import cases

FULL_PAIRS, QUICK_PAIRS = 9, 3
LEAST_PAIRS, MOST_PAIRS = cases.IN_TURN - 1, 100
BEST_PEER, NO_HIT = "vllm_load_over_best_peer", "no_hit_cost"
PEERS = ("ssd_over_fs", "slab_over_memory")
GATES = {BEST_PEER: Gate(least=0.9), NO_HIT: Gate(most=1.03)}
# Comparison → the label of StrataKV's side in table and picture.
OURS = {
    "ssd_over_fs": "our SSD, after a restart", "slab_over_memory": "our slab",
    "server_over_cold": "our cache server", NO_HIT: "unique prompts",
}  # fmt: skip
NOT_RUN = {
    "a peer's tier in another process": "vLLM's p2p tier moves blocks by NIXL, which is for GPUs",
    "LMCache's disk": "only its memory was; its server goes on when vLLM is started again",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument(
        cases.FLAG, metavar="PATH", required=True, help="a Python interpreter that has vLLM"
    )
    parser.add_argument("--pairs", type=int, help="alternating pairs of each ratio (9, quick 3)")


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error. Raises ConfigError."""
    pairs = arguments.pairs
    if pairs is None:
        pairs = QUICK_PAIRS if arguments.quick else FULL_PAIRS
    if not LEAST_PAIRS <= pairs <= MOST_PAIRS:
        raise ConfigError(f"--pairs takes {LEAST_PAIRS} to {MOST_PAIRS}, not {pairs}")
    python = interpreter(arguments.python, cases.FLAG)
    command = f"stratakv bench vllm {cases.FLAG} PYTHON" + " --quick" * arguments.quick
    report = Report("vllm", command)
    work = partial(measure, report, python, pairs)
    failures = (WrongWork, ServerFailed, PeerFailed)
    return run_and_tell(report, arguments.out, work, print_vllm, plot_vllm, *failures)


def measure(report: Report, python: str, pairs: int) -> None:
    """Measure all figures and fill the report. Raises WrongWork, PeerFailed, ServerFailed."""
    load = os.getloadavg()
    not_run = report.figures["not_run"] = dict(NOT_RUN)
    versions, outcomes = cases.measure(python, pairs, not_run)
    report.figures["plan"] = versions | {
        "pairs": pairs, "prefix_tokens": cases.PREFIX_TOKENS,
        "prefix_bytes": cases.PROMPT_BYTES, "chunk_bytes": cases.CHUNK_BYTES,
        "load_average_before": load, "load_average_after": os.getloadavg(),
    }  # fmt: skip
    fill_report(report, outcomes)


def fill_report(report: Report, outcomes: Sequence[Outcome]) -> None:
    """Add ratios, spreads, rates, and the seconds to the first token by the place of the prefix."""
    report.figures |= {"contests": {}, "spreads": {}, "seconds": {}}
    seconds, cold = report.figures["seconds"], []
    for outcome in outcomes:
        name = outcome.comparison.name
        outcome.add_to(report, (lambda ratio: 1.0 / ratio) if name == NO_HIT else float)
        if name == NO_HIT:
            continue
        seconds[OURS[name]] = 1.0 / median(outcome.ours)
        if outcome.besides:
            seconds |= {peer: 1.0 / median(rates) for peer, rates in outcome.by_limit.items()}
        cold += outcome.besides or outcome.limits
    seconds["computing"] = 1.0 / median(cold)
    report.ratios[BEST_PEER] = min(report.ratios[name] for name in PEERS)


def print_vllm(report: Report) -> None:
    """Print the seconds by place of the prefix, then the ratios with spreads and gates."""
    plan, cold = report.figures["plan"], report.figures["seconds"]["computing"]
    title = f"vLLM {plan['version']}: first token behind {plan['prefix_tokens']:,} tokens of KV"
    rows = [
        [name, f"{1e3 * seconds:,.0f}", f"{seconds / cold:.1%}"]
        for name, seconds in sorted(report.figures["seconds"].items(), key=lambda each: each[1])
    ]
    print_table(title, ("from", "ms", "of computing"), rows)
    rows = []
    for name, ratio in report.ratios.items():
        both = (report.figures["spreads"].get(each) for each in (name, f"{name}_aa"))
        spreads = [f"{each[0]:.2f}..{each[1]:.2f}" if each else "" for each in both]
        verdict = f"{GATES[name].wanted} {GATES[name].verdict(ratio)}" if name in GATES else ""
        taken = report.figures["contests"].get(name, {})
        rows.append([name, taken.get("limit", ""), f"{ratio:.3f}", *spreads, verdict])
        for peer, rates in taken.get("by_limit", {}).items():
            if peer != taken["limit"]:
                rows.append(["", peer, f"{rates['ratio']:.3f}", "", "", ""])
    columns = ("what", "other side", "ratio", "quartiles", "A/A", "gate")
    print_table(f"Alternating pairs of each ratio: {plan['pairs']}", columns, rows)
    if least := min(plan["no_hit_stored"], default=0.0):
        print(f"unique prompts: the slab took at least {least:.0%} of their chunks")
    for what, why in report.figures["not_run"].items():
        print(f"not measured: {what}: {why}")


def plot_vllm(report: Report, path: Path) -> Path:
    """Draw bars of the seconds to the first token by the place of the prefix, each with its factor
    over computing."""
    figure, panels = plots.new_figure(1, 1, 3.6)
    axes = panels[0, 0]
    seconds = dict(sorted(report.figures["seconds"].items(), key=lambda each: -each[1]))
    millis = [1e3 * each for each in seconds.values()]
    colours = [plots.MET if name in OURS.values() else plots.PLAIN for name in seconds]
    plots.draw_times(axes, list(seconds), millis, max(millis), colours)
    tokens = report.figures["plan"]["prefix_tokens"]
    title = f"Time to first token of vLLM behind {tokens:,} tokens, by where their KV cache lies"
    plots.caption(axes, title, "ms: median (blue: our tiers below vLLM)")
    return plots.save_figure(figure, report.environment, path)
