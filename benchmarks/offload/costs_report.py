# SPDX-License-Identifier: Apache-2.0
"""The tables and the plot of the sections of `stratakv bench offload` that step engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..harness.plots import new_figure, save_figure
from ..harness.report import Report, print_table
from .scale import CONVOY, GATES, TOLD, WORST_CASE

_MET, _MISSED = "#2b6cb0", "#c53030"


def print_costs(report: Report) -> None:
    """The ratios with their gates, and the cells of the worst case."""
    rows = []
    for name, gate in GATES.items():
        if name in report.ratios:
            ratio = report.ratios[name]
            verdict = "met" if gate.is_met(ratio) else "missed"
            rows.append([name.replace("_", " "), f"{ratio:.3f}", gate.wanted, verdict])
    told = [name for name in TOLD if name in report.ratios]
    rows += [[name.replace("_", " "), f"{report.ratios[name]:.3f}", "", ""] for name in told]
    columns = ["with tiers, against without", "ratio", "gate", ""]
    print_table("Medians over alternating pairs, processor seconds unless named", columns, rows)
    cells = report.figures.get(WORST_CASE, {})
    if cells:
        print_table(
            "Worst case: one request at a time, without tiers over with",
            ["cell", "cpu", "wall", "ms/token with", "without", "cached tokens"],
            [_row(name, cell) for name, cell in cells.items()],
        )
    print_convoys(report)


def print_convoys(report: Report) -> None:
    """What requests together behind one prefix gain, by tier."""
    convoys = report.figures.get(CONVOY, {})
    if convoys:
        print_table(
            "Convoy: requests at once behind one prefix, without tiers over with",
            ["prefix from", "cpu", "wall", "ms/token with", "without", "cached tokens"],
            [_row(tier, figures) for tier, figures in convoys.items()],
        )


def _row(name: str, figures: dict[str, Any]) -> list[str]:
    cached = figures["cached_tokens"]
    return [
        name,
        f"{figures['cpu_ratio']:.3f}",
        f"{figures['wall_ratio']:.3f}",
        f"{1e3 * figures['cpu_seconds_per_token_with_tiers']:.4f}",
        f"{1e3 * figures['cpu_seconds_per_token_without']:.4f}",
        " ".join(f"{tier} {tokens}" for tier, tokens in cached.items() if tokens) or "-",
    ]


def plot_costs(report: Report, path: Path) -> Path:
    """Bars of the gated ratios, and the cells of the worst case where they were measured."""
    names = [name for name in GATES if name in report.ratios]
    cells = report.figures.get(WORST_CASE, {})
    figure, panels = new_figure(1, 1 + bool(cells), (6.4 + 5.2 * bool(cells), 4.4))
    axes = panels[0][0]
    ratios = [report.ratios[name] for name in names]
    met = [GATES[name].is_met(report.ratios[name]) for name in names]
    bars = axes.barh(names, ratios, color=[_MET if each else _MISSED for each in met])
    axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], fontsize=8, padding=2)
    for place, name in enumerate(names):
        gate = GATES[name].least or GATES[name].most or 0.0
        axes.vlines(gate, place - 0.45, place + 0.45, color="#b7791f")
    axes.set_title("With tiers, against without. Lines: gates", fontsize=9)
    if cells:
        _plot_cells(panels[0][1], cells)
    for each in panels[0]:
        each.invert_yaxis()
        each.tick_params(labelsize=7)
        each.margins(x=0.12)
    return save_figure(figure, report.environment, path)


def _plot_cells(axes: Any, cells: dict[str, dict[str, Any]]) -> None:
    ratios = [(cell["cpu_ratio"], cell["wall_ratio"]) for cell in cells.values()]
    places = range(len(cells))
    axes.plot([cpu for cpu, _ in ratios], places, "o", color=_MET, label="processor seconds")
    axes.plot([wall for _, wall in ratios], places, "x", color="#2f7d4f", label="wall")
    axes.set_yticks(places, list(cells))
    axes.axvline(GATES["worst_case"].least or 0.0, color="#b7791f")
    axes.set_xscale("log")
    axes.legend(fontsize=7)
    axes.set_title("Worst case, cell by cell (log)", fontsize=9)
