# SPDX-License-Identifier: Apache-2.0
"""The figures of `stratakv bench trace`: from answers to JSON, ratios and tables.

gap_closed                sum(hit - LRU) / sum(OPT - LRU) over all traces and capacities
worst_points_below_lru    the most that any cell of the policy stays below LRU, in points
admission_written_over_write_through_TRACE_PAIR   blocks written with the filter and without
admission_points_lost_TRACE_PAIR                  what write-back hits more without the filter
admission_points_below_write_through_TRACE_PAIR   what write-through hits more
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..harness.plots import MET, add_legend, caption, new_figure, save_figure
from ..harness.report import Report, print_table
from .cells import HEADS_FIRST, LRU, OPT, Answer, Cell, PairCell
from .contenders import ADMIT_ALL
from .replay import Outcome
from .trace import Trace
from .two_tiers import Arrangement, TwoTierOutcome

_INFINITE_PERCENT = 100
_BASELINES = (HEADS_FIRST, OPT)
# ratio → its column
_ADMISSION_RATIOS: Mapping[str, str] = {
    "admission_written_over_write_through": "written over write-through",
    "admission_points_lost": "points lost",
    "admission_points_below_write_through": "points below write-through",
}


def fill_report(report: Report, traces: Mapping[str, Trace], answers: Sequence[Answer]) -> None:
    """Turn answers into limits, figures and ratios; the plan must be there already."""
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
            case Cell() as cell, Outcome() as outcome if cell.percent == _INFINITE_PERCENT:
                report.limits[f"infinite_{trace.name}"] = asdict(outcome)
            case Cell() as cell, Outcome() as outcome:
                one[trace.name].setdefault(cell.row, {})[str(cell.percent)] = asdict(outcome) | {
                    "capacity_blocks": trace.capacity_blocks(cell.percent),
                    "microseconds_per_block": 1e6 * answer.seconds / trace.num_accesses,
                }
            case PairCell() as cell, TwoTierOutcome() as outcome:
                rows = two[trace.name].setdefault(pair_name(cell), {})
                rows[row_name(cell)] = asdict(outcome) | {"hit_percent": outcome.hit_percent}
    report.figures["one_tier"] = {name: _in_order(rows) for name, rows in one.items()}
    report.figures["two_tiers"] = two
    for name in traces:
        report.limits[f"opt_{name}"] = {
            percent: figures["hit_percent"] for percent, figures in one[name][OPT].items()
        }
    _add_policy_ratios(report)
    _add_admission_ratios(report)


def pair_name(cell: PairCell) -> str:
    """`1_over_5`, in percent of the distinct blocks."""
    return f"{cell.upper_percent}_over_{cell.lower_percent}"


def row_name(cell: PairCell) -> str:
    """What a row of two tiers is called."""
    name = cell.arrangement.value
    if cell.lower != LRU:
        name += f", {cell.lower} below"
    if cell.admission != ADMIT_ALL:
        name += f", admission {cell.admission}"
    return name


def _in_order(rows: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Capacities ascend, policies come before what they are held against."""
    names = [name for name in rows if name not in _BASELINES] + list(_BASELINES)
    return {name: dict(sorted(rows[name].items(), key=lambda item: int(item[0]))) for name in names}


def _add_policy_ratios(report: Report) -> None:
    policy = report.figures["plan"]["policy"]
    pooled_gain = pooled_gap = 0.0
    worst = 0.0
    for name, rows in report.figures["one_tier"].items():
        cells = [
            (rows[policy][percent]["hit_percent"], lru["hit_percent"],
             rows[OPT][percent]["hit_percent"])
            for percent, lru in rows[LRU].items()
        ]  # fmt: skip
        gain = sum(hit - lru for hit, lru, _ in cells)
        gap = sum(opt - lru for _, lru, opt in cells)
        worst = max(worst, *(lru - hit for hit, lru, _ in cells))
        # Where nothing can be gained there is no share of it.
        if gap > 0:
            report.ratios[f"gap_closed_{name}"] = gain / gap
        pooled_gain += gain
        pooled_gap += gap
    if pooled_gap > 0:
        report.ratios["gap_closed"] = pooled_gain / pooled_gap
    report.ratios["worst_points_below_lru"] = worst


def _add_admission_ratios(report: Report) -> None:
    admission = report.figures["plan"]["admission"]
    back = Arrangement.WRITE_BACK.value
    filtered = back if admission == ADMIT_ALL else f"{back}, admission {admission}"
    for name, pairs in report.figures["two_tiers"].items():
        for pair, rows in pairs.items():
            through, ours = rows[Arrangement.WRITE_THROUGH.value], rows[filtered]
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
    """The tables a person reads."""
    percents = [str(percent) for percent in report.figures["plan"]["capacities_percent"]]
    for name, rows in report.figures["one_tier"].items():
        infinite = report.limits[f"infinite_{name}"]
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
            ["lower tier", *(pair.replace("_", " ") + " %" for pair in _pairs(report, name))],
            _pair_rows(report.figures["two_tiers"][name]),
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


def _pairs(report: Report, name: str) -> list[str]:
    return list(report.figures["two_tiers"][name])


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


_COLOURS = {LRU: "#8a8f98", OPT: "#222222", HEADS_FIRST: "#c9a0a0"}
_DASHED = (OPT, HEADS_FIRST)


def plot_traces(report: Report, path: Path) -> Path:
    """One column for each trace: one tier above, two tiers below."""
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
    percents = [int(percent) for percent in rows[LRU]]
    axes.set_xscale("log")
    axes.set_xticks(percents, [str(percent) for percent in percents])
    axes.minorticks_off()
    axes.tick_params(labelsize=8)
    caption(axes, name, "one tier, % of distinct blocks")


def _plot_writes(axes: Any, pairs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """A bar for each row of the table of the middle pair: what it writes, and beside it its hits.
    The other pairs are in the JSON and in the tables."""
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
