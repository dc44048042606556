# SPDX-License-Identifier: Apache-2.0
"""The plot of `stratakv bench trace`: hits by capacity, and writes against hits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..harness.plots import MET, new_figure, save_figure
from ..harness.report import Report
from .cells import HEADS_FIRST, LRU, OPT

_COLOURS = {LRU: "#8a8f98", OPT: "#222222", HEADS_FIRST: "#c9a0a0"}
_DASHED = (OPT, HEADS_FIRST)


def plot_traces(report: Report, path: Path) -> Path:
    """One column for each trace: one tier above, two tiers below."""
    names = list(report.figures["one_tier"])
    figure, panels = new_figure(2, len(names), (4.4 * len(names) + 1.0, 7.4))
    for column, name in enumerate(names):
        _plot_hits(panels[0][column], report.figures["one_tier"][name], report, name)
        _plot_writes(panels[1][column], report.figures["two_tiers"][name])
    panels[0][0].set_ylabel("hits, % of prompt blocks")
    for column, axes in enumerate(panels[1]):
        axes.invert_yaxis()
        axes.tick_params(labelleft=column == 0)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), fontsize=8,
                  frameon=False)  # fmt: skip
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
    axes.set_title(name, fontsize=10)
    axes.set_xlabel("tier, % of distinct blocks")


def _plot_writes(axes: Any, pairs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """A bar for each row of the table of the middle pair: what it writes, and beside it its hits.
    The other pairs are in the JSON and in the tables."""
    pair = list(pairs)[len(pairs) // 2]
    rows = pairs[pair]
    written = [cells["written_per_block"] for cells in rows.values()]
    bars = axes.barh(list(rows), written, color=MET, height=0.6)
    axes.bar_label(
        bars, labels=[f"{cells['hit_percent']:.1f} % hits" for cells in rows.values()],
        fontsize=8, padding=3,
    )  # fmt: skip
    axes.tick_params(labelsize=8)
    axes.set_xlim(0, 1.45 * max(*written, 0.01))
    upper, lower = pair.split("_over_")
    axes.set_xlabel(
        f"two tiers, {upper} % over {lower} % of distinct blocks:\n"
        "blocks written below for each prompt block", fontsize=8,
    )  # fmt: skip
