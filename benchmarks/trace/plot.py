# SPDX-License-Identifier: Apache-2.0
"""The plot of `stratakv bench trace`: hits by capacity, and writes against hits.

Knows nothing of how the figures were measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..report import Report
from .cells import HEADS_FIRST, LRU, OPT

_COLOURS = {LRU: "#8a8f98", OPT: "#222222", HEADS_FIRST: "#c9a0a0"}
_DASHED = (OPT, HEADS_FIRST)


def plot_traces(report: Report, path: Path) -> Path:
    """One column for each trace: one tier above, two tiers below."""
    # Imported here: the table and the JSON must not need a plotting library to be imported.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(report.figures["one_tier"])
    size = (4.2 * len(names), 7.2)
    figure, panels = pyplot.subplots(2, len(names), figsize=size, layout="constrained",
                                     squeeze=False)  # fmt: skip
    for column, name in enumerate(names):
        _plot_hits(panels[0][column], report.figures["one_tier"][name], report, name)
        _plot_writes(panels[1][column], report.figures["two_tiers"][name])
    panels[0][0].legend(fontsize=7, frameon=False)
    panels[1][0].legend(fontsize=7, frameon=False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


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
    axes.set_ylabel("hits, % of prompt blocks")
    axes.spines[["top", "right"]].set_visible(False)


def _plot_writes(axes: Any, pairs: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Each row of the table is a line over the pairs: to the left is less wear, above more hits."""
    for row in next(iter(pairs.values())):
        axes.plot(
            [rows[row]["written_per_block"] for rows in pairs.values()],
            [rows[row]["hit_percent"] for rows in pairs.values()],
            label=row,
            marker=".",
        )
    axes.set_xlim(left=0)
    shares = ", ".join(pairs).replace("_", " ")
    axes.set_xlabel(
        f"two tiers, {shares} %:\nblocks written below for each prompt block", fontsize=8
    )
    axes.set_ylabel("hits of both, % of prompt blocks")
    axes.spines[["top", "right"]].set_visible(False)
