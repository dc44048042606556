# SPDX-License-Identifier: Apache-2.0
"""The plot of `stratakv bench serve`, as a PNG file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..harness.plots import new_figure, save_figure
from ..harness.report import Report

_LABELS = {
    "transformers_serial": "transformers,\none at a time",
    "transformers_padded": "transformers,\npadded batch",
    "http": "StrataKV\nover HTTP",
    "engine": "StrataKV's\nengine alone",
}
_OURS, _OTHER = "#2f7d4f", "#8a8f98"


def plot_serve(report: Report, path: Path) -> Path:
    """Left: output tokens a second by who made them. Right: hit rates, measured and usual."""
    figures = report.figures
    panels = [name for name in ("comparison", "workloads") if name in figures]
    figure, axes = new_figure(1, len(panels), (5.2 * len(panels), 3.8))
    for name, panel in zip(panels, axes[0], strict=True):
        (_plot_comparison if name == "comparison" else _plot_hit_rates)(panel, figures[name])
    return save_figure(figure, report.environment, path)


def _plot_comparison(axes: Any, comparison: Mapping[str, Any]) -> None:
    names = [name for name in _LABELS if name in comparison]
    bars = axes.bar(
        [_LABELS[name] for name in names],
        [comparison[name]["output_throughput"] for name in names],
        color=[_OTHER if name.startswith("transformers") else _OURS for name in names],
        width=0.6,
    )
    axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel("output tokens a second")
    axes.set_title("The same unique prompts", fontsize=10)


def _plot_hit_rates(axes: Any, workloads: Mapping[str, Any]) -> None:
    places = range(len(workloads))
    measured = [100 * figures.get("hit_rate", 0.0) for figures in workloads.values()]
    usual = [100 * figures["usual_hit_rate"] for figures in workloads.values()]
    bars = axes.barh([y + 0.2 for y in places], measured, 0.38, color=_OURS, label="measured")
    axes.barh([y - 0.2 for y in places], usual, 0.38, color=_OTHER, label="usual")
    axes.bar_label(bars, fmt="%.0f %%", padding=3, fontsize=8)
    axes.set_yticks(list(places), list(workloads), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("prompt tokens found in a cache, %")
    axes.legend(fontsize=8, frameon=False, loc="lower right")
