# SPDX-License-Identifier: Apache-2.0
"""Plots of benchmark figures, as PNG files. Knows nothing of how figures are measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_COLOURS = {
    "cold": "#8a8f98",
    "pool": "#2f7d4f",
    "cpu": "#2b6cb0",
    "ssd": "#b7791f",
    "remote": "#6b46c1",
}


def plot_phases(phases: Mapping[str, Mapping[str, Any]], path: Path) -> Path:
    """Bars of the median time to first token by phase, the 99th percentile as whiskers."""
    # Imported here: the table and the JSON must not need a plotting library to be imported.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(phases)
    medians = [1e3 * phases[name]["ttft_p50_seconds"] for name in names]
    whiskers = [
        1e3 * phases[name]["ttft_p99_seconds"] - m for name, m in zip(names, medians, strict=True)
    ]
    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    colours = [_COLOURS.get(name, "#555555") for name in names]
    bars = axes.bar(names, medians, color=colours, width=0.6)
    axes.errorbar(names, medians, yerr=whiskers, fmt="none", ecolor="#333333", capsize=3)
    axes.bar_label(bars, labels=[f"{value:.0f} ms" for value in medians], padding=3, fontsize=9)
    axes.set_yscale("log")
    axes.set_ylabel("time to first token, ms (log)")
    axes.set_title("Where the document's KV cache was found", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
