# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench trace [PATH ...]`: replays traces with eviction policies and filters.

A PATH is a trace (JSON Lines with hash_ids, plain or gzip) or a folder of traces. Without a PATH,
two traces are generated, of chats and of coding agents. Each trace is replayed with every eviction
policy in one tier of 1 to 50 % of the trace's distinct blocks, and with admission filters in two
tiers. LRU and the optimal policy (Belady's) are the references. No bytes are moved."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ...tiers.admission import DEFAULT_FILTER, FILTERS, known_filters
from ...tiers.errors import TierConfigError
from ...tiers.policies.known_policies import (
    DEFAULT_POLICY,
    POLICIES,
    known_policies,
    policy_factory,
)
from ...tiers.settings import readers
from ...tiers.settings.format import format_value
from ...tiers.settings.suggestions import did_you_mean
from ...tiers.settings.values import ConfigError
from ..harness.plots import MET, add_legend, caption, new_figure, save_figure
from ..harness.report import Report, print_table, progress, run_and_tell
from . import replay
from .formats import AGENTS, CHAT, Trace, TraceError, trace_files, trace_name

_INFINITE_PERCENT = 100
_BASELINES = (replay.HEADS_FIRST, replay.OPT)
# ratio → column of the table
_ADMISSION_RATIOS: Mapping[str, str] = {
    "admission_written_over_write_through": "written over write-through",
    "admission_points_lost": "points lost",
    "admission_points_below_write_through": "points below write-through",
}


def fill_report(
    report: Report, traces: Mapping[str, Trace], answers: Sequence[replay.Answer]
) -> None:
    """Compute limits, figures and ratios from the answers; `report` must already have the plan.

    gap_closed                sum(hit - LRU) / sum(OPT - LRU) over all traces and capacities
    worst_points_below_lru    the largest difference, in points, of LRU's hit rate and the policy's
    admission_written_over_write_through_TRACE_PAIR   blocks written with the filter, over blocks
    written by write-through
    admission_points_lost_TRACE_PAIR                  points that the filter loses in write-back
    admission_points_below_write_through_TRACE_PAIR   points by which it is below write-through"""
    report.figures["plan"]["traces"] = {
        name: {
            "requests": len(trace.prompts),
            "accesses": trace.num_accesses,
            "blocks": trace.num_blocks,
            "seconds": trace.seconds,
        }
        for name, trace in traces.items()
    }
    one: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in traces}
    two: dict[str, dict[str, dict[str, Any]]] = {name: {} for name in traces}
    for answer in answers:
        trace = traces[answer.cell.trace]
        match answer.cell, answer.outcome:
            case replay.Cell() as cell, replay.Outcome() as outcome if (
                cell.percent == _INFINITE_PERCENT
            ):
                report.limits[f"infinite_{trace.name}"] = asdict(outcome)
            case replay.Cell() as cell, replay.Outcome() as outcome:
                one[trace.name].setdefault(cell.row, {})[str(cell.percent)] = asdict(outcome) | {
                    "capacity_blocks": trace.capacity_blocks(cell.percent),
                    "microseconds_per_block": 1e6 * answer.seconds / trace.num_accesses,
                }
            case replay.PairCell() as cell, replay.TwoTierOutcome() as outcome:
                # The pair is named by the capacities, in percent of the distinct blocks.
                pair = f"{cell.upper_percent}_over_{cell.lower_percent}"
                rows = two[trace.name].setdefault(pair, {})
                rows[row_name(cell)] = asdict(outcome) | {"hit_percent": outcome.hit_percent}
    report.figures["one_tier"] = {name: _in_order(rows) for name, rows in one.items()}
    report.figures["two_tiers"] = two
    for name in traces:
        report.limits[f"opt_{name}"] = {
            percent: figures["hit_percent"] for percent, figures in one[name][replay.OPT].items()
        }
    _add_policy_ratios(report)
    _add_admission_ratios(report)


def row_name(cell: replay.PairCell) -> str:
    """Return the name of a row of two tiers."""
    name = cell.arrangement.value
    if cell.lower != replay.LRU:
        name += f", {cell.lower} below"
    if cell.admission != replay.ADMIT_ALL:
        name += f", admission {cell.admission}"
    return name


def _in_order(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows with ascending capacities, the policies before the references."""
    names = [name for name in rows if name not in _BASELINES] + list(_BASELINES)
    return {name: dict(sorted(rows[name].items(), key=lambda item: int(item[0]))) for name in names}


def _add_policy_ratios(report: Report) -> None:
    policy = report.figures["plan"]["policy"]
    pooled_gain = pooled_gap = 0.0
    worst = 0.0
    for name, rows in report.figures["one_tier"].items():
        cells = [
            (rows[policy][percent]["hit_percent"], lru["hit_percent"],
             rows[replay.OPT][percent]["hit_percent"])
            for percent, lru in rows[replay.LRU].items()
        ]  # fmt: skip
        gain = sum(hit - lru for hit, lru, _ in cells)
        gap = sum(opt - lru for _, lru, opt in cells)
        worst = max(worst, *(lru - hit for hit, lru, _ in cells))
        # The share is undefined if the optimal policy has no gain.
        if gap > 0:
            report.ratios[f"gap_closed_{name}"] = gain / gap
        pooled_gain += gain
        pooled_gap += gap
    if pooled_gap > 0:
        report.ratios["gap_closed"] = pooled_gain / pooled_gap
    report.ratios["worst_points_below_lru"] = worst


def _add_admission_ratios(report: Report) -> None:
    admission = report.figures["plan"]["admission"]
    back = replay.Arrangement.WRITE_BACK.value
    filtered = back if admission == replay.ADMIT_ALL else f"{back}, admission {admission}"
    for name, pairs in report.figures["two_tiers"].items():
        for pair, rows in pairs.items():
            through, ours = rows[replay.Arrangement.WRITE_THROUGH.value], rows[filtered]
            report.ratios[f"admission_written_over_write_through_{name}_{pair}"] = (
                ours["written_per_block"] / through["written_per_block"]
            )
            report.ratios[f"admission_points_lost_{name}_{pair}"] = (
                rows[back]["hit_percent"] - ours["hit_percent"]
            )
            report.ratios[f"admission_points_below_write_through_{name}_{pair}"] = (
                through["hit_percent"] - ours["hit_percent"]
            )


def print_traces(report: Report) -> None:
    """Print the tables of one tier and of two tiers."""
    percents = [str(percent) for percent in report.figures["plan"]["capacities_percent"]]
    for name, rows in report.figures["one_tier"].items():
        infinite = report.limits[f"infinite_{name}"]
        pairs = report.figures["two_tiers"][name]
        print_table(
            f"{name}: hits and prefill work saved, % (infinite: {_shares(infinite)})",
            ["tier holds, of distinct blocks", *(f"{percent} %" for percent in percents), "µs"],
            [
                [row, *(_shares(cells[percent]) for percent in percents), _cost(cells)]
                for row, cells in rows.items()
            ],
        )
        print_table(
            f"{name}: two tiers, hits upper + lower = all, %; S: written a prompt block",
            ["lower tier", *(pair.replace("_", " ") + " %" for pair in pairs)],
            _pair_rows(pairs),
        )
    print("µs: of the replay with this policy, for one block of a prompt, at the worst capacity.")
    plan = report.figures["plan"]
    print_table(
        f"Admission {plan['admission']}, on write-back",
        ["trace and tiers, %", *_ADMISSION_RATIOS.values()],
        [
            [
                f"{name}: {pair.replace('_', ' ')}",
                *(f"{report.ratios[f'{ratio}_{name}_{pair}']:.3f}" for ratio in _ADMISSION_RATIOS),
            ]
            for name, pairs in report.figures["two_tiers"].items()
            for pair in pairs
        ],
    )
    ratios = {k: v for k, v in report.ratios.items() if not k.startswith("admission_")}
    print_table(
        f"Policy {plan['policy']}, over all traces and capacities",
        ["what", "ratio"],
        [[name.replace("_", " "), f"{ratio:.3f}"] for name, ratio in ratios.items()],
    )


def _shares(figures: Mapping[str, float]) -> str:
    return f"{figures['hit_percent']:.1f} / {figures['work_percent']:.1f}"


def _cost(cells: Mapping[str, Mapping[str, float]]) -> str:
    return f"{max(figures['microseconds_per_block'] for figures in cells.values()):.2f}"


def _pair_rows(pairs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    names = list(next(iter(pairs.values())))
    return [
        [
            name,
            *(
                f"{rows[name]['upper_percent']:.1f} + {rows[name]['lower_percent']:.1f} = "
                f"{rows[name]['hit_percent']:.1f}, S {rows[name]['written_per_block']:.3f}"
                for rows in pairs.values()
            ),
        ]
        for name in names
    ]


_COLOURS = {replay.LRU: "#8a8f98", replay.OPT: "#222222", replay.HEADS_FIRST: "#c9a0a0"}
_DASHED = (replay.OPT, replay.HEADS_FIRST)


def plot_traces(report: Report, path: Path) -> Path:
    """Draw a column of panels for each trace: one tier above, two tiers below."""
    names = list(report.figures["one_tier"])
    figure, panels = new_figure(2, len(names), 6.0)
    for column, name in enumerate(names):
        _plot_hits(panels[0][column], report.figures["one_tier"][name], report, name)
        _plot_writes(panels[1][column], report.figures["two_tiers"][name])
        panels[1][column].tick_params(labelleft=column == 0)
    panels[0][0].set_ylabel("hits, % of prompt blocks", fontsize=9)
    add_legend(figure, panels[0][0], columns=6)
    return save_figure(figure, report.environment, path)


def _plot_hits(axes: Any, rows: Mapping[str, Any], report: Report, name: str) -> None:
    for row, cells in rows.items():
        axes.plot(
            [int(percent) for percent in cells],
            [figures["hit_percent"] for figures in cells.values()],
            label=row,
            color=_COLOURS.get(row),
            linestyle="--" if row in _DASHED else "-",
            linewidth=2.2 if row == report.figures["plan"]["policy"] else 1.2,
            marker=".",
        )
    axes.axhline(report.limits[f"infinite_{name}"]["hit_percent"], color="#dddddd", zorder=0)
    percents = [int(percent) for percent in rows[replay.LRU]]
    axes.set_xscale("log")
    axes.set_xticks(percents, [str(percent) for percent in percents])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    caption(axes, name, "one tier, % of distinct blocks")


def _plot_writes(axes: Any, pairs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Draw a bar of the written blocks, with the hits as text, for each row of the middle pair of
    capacities. The remaining pairs are in the JSON and the tables."""
    pair = list(pairs)[len(pairs) // 2]
    rows = pairs[pair]
    written = [cells["written_per_block"] for cells in rows.values()]
    names = [name.replace(", ", "\n").replace("admission ", "") for name in rows]
    bars = axes.barh(names, written, color=MET, height=0.6)
    for bar, cells in zip(bars, rows.values(), strict=True):
        axes.annotate(
            f"{cells['hit_percent']:.1f} %", (bar.get_width(), bar.get_y() + 0.3), (3, 0),
            textcoords="offset points", va="center", fontsize=8,
        )  # fmt: skip
    axes.invert_yaxis()
    axes.tick_params(labelsize=8)
    axes.set_xlim(0, 1.6 * max(*written, 0.01))
    upper, lower = pair.split("_over_")
    x = "written per prompt block\n(beside the bars: hits)"
    caption(axes, f"two tiers, {upper} % over {lower} %", x)


CAPACITIES_PERCENT = (1, 2, 5, 10, 20, 50)
PAIRS_PERCENT = ((1, 5), (2, 10), (5, 20))
# The requests of a generated trace, as many as in the public traces, and of a quick run.
_REQUESTS = {CHAT.name: (12_000, 1_500), AGENTS.name: (7_000, 600)}
MAX_SEED = 2**32 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark; `stratakv bench` itself adds `--quick` and `--out`."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="*",
        help="traces, or folders of them (default: made-up ones)",
    )  # fmt: skip
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="which one the ratios are about: a name, or module:attribute (the product's own)",
    )
    parser.add_argument(
        "--admission", metavar="NAME", help="which filter the ratios are about (the product's own)"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the made-up traces (1)")


def run(arguments: argparse.Namespace) -> int:
    """Replay everything; return 0, or 1 after an error message. Raises ConfigError."""
    policy = choose_policy(arguments.policy)
    admission = choose_filter(arguments.admission)
    readers.integer_within(0, MAX_SEED)("--seed", arguments.seed)
    report = Report("trace", "stratakv bench trace")

    def take() -> None:
        try:
            sources = choose_sources(arguments)
            traces = load(sources)
            measure(report, sources, traces, policy, admission)
        except TraceError as error:
            raise ConfigError(str(error)) from error

    return run_and_tell(report, arguments.out, take, print_traces, plot_traces, replay.CellFailed)


def choose_policy(name: str | None) -> str:
    """Return the policy of the ratios: a name, or the `module:attribute` of a factory. Raises
    ConfigError for a policy that is unknown, cannot be loaded or breaks the contract."""
    if name is None:
        return DEFAULT_POLICY
    if ":" not in name:
        _known("--policy", name, known_policies())
    try:
        policy_factory(name)
    except TierConfigError as error:
        raise ConfigError(f"--policy {format_value(name)}: {error}") from error
    return name


def choose_filter(name: str | None) -> str:
    """Return the admission filter of the ratios. Raises ConfigError for an unknown filter."""
    return DEFAULT_FILTER if name is None else _known("--admission", name, known_filters())


def _known(flag: str, name: str, table: Sequence[str]) -> str:
    if name not in table:
        near = did_you_mean(name, table) or f"; there are: {', '.join(table)}"
        raise ConfigError(f"{flag} takes a name, and there is no {format_value(name)}{near}")
    return name


def choose_sources(arguments: argparse.Namespace) -> list[replay.Source]:
    """Return the named traces, or the traces to generate. Raises TraceError, ConfigError."""
    if arguments.paths:
        if arguments.quick:
            raise ConfigError("--quick replays made-up traces; leave out PATH, or --quick")
        files = trace_files([readers.path("PATH", path) for path in arguments.paths])
        names = unique_names([trace_name(file) for file in files])
        return [replay.Source(name, path=file) for name, file in zip(names, files, strict=True)]
    return [
        replay.Source(name, requests=quick if arguments.quick else full, seed=arguments.seed)
        for name, (full, quick) in _REQUESTS.items()
    ]


def unique_names(names: Sequence[str]) -> list[str]:
    """Return unique keys for the report, of letters, digits and underscores."""
    plain = [re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_") or "trace" for name in names]
    unique: list[str] = []
    for name in plain:
        number, candidate = 1, name
        while candidate in unique:
            number += 1
            candidate = f"{name}_{number}"
        unique.append(candidate)
    return unique


def load(sources: Sequence[replay.Source]) -> dict[str, Trace]:
    """Return all traces by name. Raises TraceError."""
    traces = {source.name: source.load() for source in sources}
    for name, trace in traces.items():
        if not trace.num_accesses:
            raise TraceError(f"trace {name} has no prompt with a block; there is nothing to cache")
    return traces


def measure(
    report: Report,
    sources: Sequence[replay.Source],
    traces: Mapping[str, Trace],
    policy: str,
    admission: str,
) -> None:
    """Run every cell and fill the report. Raises CellFailed."""
    report.figures["plan"] = {
        "capacities_percent": list(CAPACITIES_PERCENT),
        "pairs_percent": [list(pair) for pair in PAIRS_PERCENT],
        "policy": policy,
        "admission": admission,
        "made_up": sources[0].path is None,
        "seed": sources[0].seed if sources[0].path is None else None,
    }
    cells = make_cells(list(traces), policy, admission)
    answers: dict[replay.AnyCell, replay.Answer] = {}
    with progress(Console(stderr=True)) as bar:
        steps = bar.add_task("replaying", total=len(cells))
        for answer in replay.run_cells(cells, sources, traces):
            answers[answer.cell] = answer
            bar.update(steps, advance=1, description=f"replaying {answer.cell.trace}")
    fill_report(report, traces, [answers[cell] for cell in cells])


def make_cells(names: Sequence[str], policy: str, admission: str) -> list[replay.AnyCell]:
    """Return all cells to replay, trace by trace."""
    cells: list[replay.AnyCell] = []
    for name in names:
        cells.append(replay.Cell(name, replay.LRU, 100))  # an infinite cache, which evicts nothing
        for row in (*dict.fromkeys((*POLICIES, policy)), replay.HEADS_FIRST, replay.OPT):
            cells += [replay.Cell(name, row, percent) for percent in CAPACITIES_PERCENT]
        for upper, lower in PAIRS_PERCENT:
            cells += [replay.PairCell(name, upper, lower, each) for each in replay.Arrangement]
            back = replay.Arrangement.WRITE_BACK
            if policy != replay.LRU:
                cells.append(replay.PairCell(name, upper, lower, back, lower=policy))
            cells += [
                replay.PairCell(name, upper, lower, back, admission=each)
                for each in dict.fromkeys((*FILTERS, admission))
                if each != replay.ADMIT_ALL
            ]
    return cells
