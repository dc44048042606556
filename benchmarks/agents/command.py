# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench agents [TRACE ...]`: compares the scheduling policies `continuum` and `fcfs`.

Jobs of agents run in virtual time under each policy, with equal memory: generated jobs whose tools
take 0.2 to 2 s or 5 to 60 s, and recorded sessions (TRACE, JSON Lines with session_id). Each job
runs with and without a CPU tier of four times the pool. Scheduler, cache manager and pins are the
engine's own; no model is computed. The figures are three ratios, continuum over fcfs: tokens
computed again although the previous turn had computed them, tokens loaded again, and the 99th
percentile of the time to the first token. The ratios of tokens count the tokens of all runs
together; the ratio of times is the median over the seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...tiers.settings import readers
from ..harness.comparison import WrongWork, quartiles
from ..harness.gate import Gate
from ..harness.plots import MET, MISSED, REFERENCE, caption, label_bars, new_figure, save_figure
from ..harness.report import Report, median, print_table, run_and_tell
from ..trace.formats import TraceError, trace_files, trace_name
from .simulation import BLOCK_SIZE, Job, Outcome, Simulation, make_jobs, read_jobs

POLICIES = ("fcfs", "continuum")
SHORT: Mapping[str, tuple[float, float]] = {
    "grep": (0.2, 1.0), "read": (0.3, 1.2), "edit": (0.5, 2.0),
}  # fmt: skip
LONG: Mapping[str, tuple[float, float]] = {"test": (5.0, 60.0), "build": (10.0, 40.0)}
TIER_POOLS = 4  # the tier's blocks, divided by the pool's blocks
# The pool size to which the gates apply: a fifth of all blocks that the jobs write.
GATED_BLOCKS = 2500
TRACE_SHARE = 0.05  # the pool's blocks, divided by a recorded trace's distinct blocks
NO_WORSE = Gate(most=1.02)


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a run: seeds, jobs and pools."""

    seeds: int
    jobs: int
    pools: tuple[int, ...]
    gated: int  # the pool size whose ratios are compared with the gates


FULL = Scale(9, 60, (2000, GATED_BLOCKS, 3000), GATED_BLOCKS)
QUICK = Scale(2, 12, (600,), 600)


@dataclass(frozen=True, slots=True)
class Scene:
    """Jobs of agents, and the sizes of the engine's pool and tier."""

    name: str
    has_long_tools: bool
    num_blocks: int
    tier_blocks: int

    def gates(self) -> dict[str, Gate]:
        """The gate of each ratio, by the ratio's name."""
        if self.has_long_tools:
            return dict.fromkeys(("recomputed", "reloaded", "ttft_p99"), NO_WORSE)
        if self.tier_blocks:
            return {"reloaded": Gate(most=0.7), "ttft_p99": Gate(most=1.0)}
        return {"recomputed": Gate(most=0.7)}


def compare(runs: Sequence[Sequence[Job]], scene: Scene) -> dict[str, Any]:
    """Return each policy's figures on the same jobs: token sums, times of each run, and ratios."""
    found: list[list[Outcome]] = []
    for jobs in runs:
        simulations = [
            Simulation(jobs, policy, scene.num_blocks, scene.tier_blocks) for policy in POLICIES
        ]
        found.append([simulation.run() for simulation in simulations])
    sums = {
        name: [sum(getattr(each[i], f"{name}_tokens") for each in found) for i in range(2)]
        for name in ("recomputed", "reloaded", "prompt")
    }
    times = [[each.p99() for each in pair] for pair in found]
    ratios = [continuum / fcfs for fcfs, continuum in times]
    figures: dict[str, Any] = {
        "blocks": scene.num_blocks,
        "tier_blocks": scene.tier_blocks,
        "tokens": sums,
        "p99_seconds": times,
        "p99_quartiles": quartiles(ratios),
        "ratios": {"ttft_p99": median(ratios)},
    }
    for name in ("recomputed", "reloaded"):
        fcfs, continuum = sums[name]
        if fcfs or continuum:
            figures["ratios"][name] = continuum / fcfs if fcfs else float(continuum)
    return figures


def measure(report: Report, scale: Scale, traces: Sequence[Path]) -> None:
    """Run all scenes and fill the report. Raises WrongWork and TraceError."""
    report.figures |= {
        "plan": {"seeds": scale.seeds, "jobs": scale.jobs, "block_size": BLOCK_SIZE},
        "scenes": {},
    }
    scenes: list[tuple[Scene, Sequence[Sequence[Job]]]] = []
    for name, tools in (("short tools", SHORT), ("long tools", LONG)):
        runs = [make_jobs(seed, scale.jobs, dict(tools)) for seed in range(scale.seeds)]
        for blocks in scale.pools:
            for tier, word in ((0, "pool alone"), (TIER_POOLS * blocks, "with a CPU tier")):
                title = f"{name}, {blocks} blocks, {word}"
                scenes.append((Scene(title, tools is LONG, blocks, tier), runs))
    for path in trace_files(list(traces)) if traces else ():
        jobs = read_jobs(path)
        blocks = max(_longest(jobs) + 2, int(TRACE_SHARE * _num_blocks(jobs)))
        for tier, word in ((0, "pool alone"), (TIER_POOLS * blocks, "with a CPU tier")):
            title = f"{trace_name(path)}, {blocks} blocks, {word}"
            scenes.append((Scene(title, True, blocks, tier), [jobs]))
    for scene, each_run in scenes:
        figures = compare(each_run, scene)
        report.figures["scenes"][scene.name] = figures
        for name, gate in scene.gates().items():
            if name not in figures["ratios"]:
                continue
            value = figures["ratios"][name]
            figures.setdefault("verdicts", {})[name] = f"{gate.wanted} {gate.verdict(value)}"
            if scene.num_blocks == scale.gated and not scene.has_long_tools:
                short = "_short_tools" if name == "recomputed" else ""
                report.ratios[f"{name}_over_fcfs{short}"] = value


def _num_blocks(jobs: Sequence[Job]) -> int:
    found = {
        token for job in jobs for turn in job.turns for token in (turn.prompt or ())[::BLOCK_SIZE]
    }
    return len(found)


def _longest(jobs: Sequence[Job]) -> int:
    prompts = [len(turn.prompt or ()) + turn.output_tokens for job in jobs for turn in job.turns]
    return -(-max(prompts, default=0) // BLOCK_SIZE)


def print_agents(report: Report) -> None:
    """Print a table with a row for each scene."""
    rows = []
    for name, figures in report.figures["scenes"].items():
        tokens, ratios = figures["tokens"], figures["ratios"]
        row = [name]
        for ratio in ("recomputed", "reloaded"):
            share = f"{100 * tokens[ratio][0] / tokens['prompt'][0]:.1f} %"
            row.append(f"{share} x {ratios[ratio]:.2f}" if ratio in ratios else "none")
        spread = "{:.2f}..{:.2f}".format(*figures["p99_quartiles"])
        row.append(f"{ratios['ttft_p99']:.2f} ({spread})")
        row.append("; ".join(f"{k} {v}" for k, v in figures.get("verdicts", {}).items()))
        rows.append(row)
    columns = ["jobs and memory", "computed again", "loaded again", "first token, p99", "gates"]
    print_table("continuum over fcfs; shares are of prompt tokens under fcfs", columns, rows)


def plot_agents(report: Report, path: Path) -> Path:
    """Draw a panel for each ratio, with a bar for each scene."""
    scenes = report.figures["scenes"]
    ratios = ("recomputed", "reloaded", "ttft_p99")
    figure, [panels] = new_figure(1, len(ratios), 1.2 + 0.25 * len(scenes), sharey=True)
    for axes, ratio in zip(panels, ratios, strict=True):
        found = {name: each["ratios"].get(ratio) for name, each in scenes.items()}
        names = [name for name, value in found.items() if value is not None]
        places = [list(scenes).index(name) for name in names]
        colours = [MET if round(found[name], 2) <= 1.0 else MISSED for name in names]
        bars = axes.barh(places, [found[name] for name in names], 0.7, color=colours)
        label_bars(axes, bars, "%.2f", 7)
        axes.axvline(1.0, color=REFERENCE, linewidth=0.8, zorder=0)
        axes.margins(x=0.2)
        caption(axes, ratio.replace("_", " "), "continuum over fcfs")
    panels[0].set_yticks(range(len(scenes)), list(scenes), fontsize=7)
    panels[0].invert_yaxis()
    figure.suptitle("Agents' jobs, in equal memory: less than 1 is better", fontsize=10)
    return save_figure(figure, report.environment, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument(
        "traces", metavar="TRACE", nargs="*", help="recorded sessions: a .jsonl(.gz), or a folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error."""
    report = Report("agents", "stratakv bench agents" + " --quick" * arguments.quick)
    traces = [readers.path("TRACE", each) for each in arguments.traces]
    work = partial(measure, report, QUICK if arguments.quick else FULL, traces)
    failures = (WrongWork, TraceError)
    return run_and_tell(report, arguments.out, work, print_agents, plot_agents, *failures)
