# SPDX-License-Identifier: Apache-2.0
"""The plots of the ceilings, the copies and the interference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...harness.plots import new_figure, save_figure
from ..results import Row

COLOURS = ("#8a8f98", "#2f7d4f", "#2b6cb0", "#4c51bf", "#b7791f", "#c05621", "#97266d")
_DIRECTIONS = {"to_host": "to the host", "to_device": "to the device", "both": "both at once"}


def plot_ceilings(
    rows: Sequence[Row], ceilings: Mapping[str, float], environment: Mapping[str, Any], path: Path
) -> Path | None:
    """Bars of the page-locked copies by the size of a piece; the other ceilings in the title."""
    pinned = [row for row in rows if row["case"].startswith("pinned")]
    if not pinned:
        return None
    figure, panels = panels_of(1)
    axes = panels[0]
    labels = [
        f"{row['case'].removeprefix('pinned_').removesuffix('_gb_per_second').replace('_', ' ')}\n"
        f"{bytes_name(row['piece_bytes'])}"
        for row in pinned
    ]
    bars = axes.bar(range(len(pinned)), [row["value"] for row in pinned], color=COLOURS[1])
    axes.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    axes.set_xticks(range(len(pinned)), labels, fontsize=7)
    axes.set_ylabel("GB/s")
    others = {"device_copy_gb_per_second": "GB/s on the device", "matmul_bf16_tflops": "TFLOP/s"}
    title = [f"{ceilings[name]:,.3g} {unit}" for name, unit in others.items() if name in ceilings]
    axes.set_title("; ".join(["Page-locked copies, by size of a piece", *title]), fontsize=10)
    return save_figure(figure, environment, path)


def plot_copies(
    rows: Sequence[Row], ceilings: Mapping[str, float], environment: Mapping[str, Any], path: Path
) -> Path | None:
    """GB/s over the size of a block: a panel for each direction, a line for each method."""
    if not rows:
        return None
    figure, panels = panels_of(len(_DIRECTIONS))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for axes, (direction, title) in zip(panels, _DIRECTIONS.items(), strict=True):
        for method, colour in zip(methods, COLOURS, strict=False):
            points = sorted(
                (row["block_bytes"], row["gb_per_second"])
                for row in rows
                if row["method"] == method and row["direction"] == direction
            )
            sizes, rates = [size for size, _ in points], [rate for _, rate in points]
            axes.plot(sizes, rates, marker="o", markersize=4, label=method, color=colour)
        ceiling = ceilings.get(f"pinned_{direction}_gb_per_second")
        if ceiling is not None:
            axes.axhline(ceiling, linestyle="--", color="#333333", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        sizes = sorted({row["block_bytes"] for row in rows})
        axes.set_xticks(sizes, [bytes_name(size) for size in sizes], fontsize=8)
        axes.minorticks_off()
        axes.set_title(f"64 blocks {title}", fontsize=10)
        axes.set_xlabel("block")
    panels[0].set_ylabel("GB/s (log); dashed: page-locked ceiling")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return save_figure(figure, environment, path)


def plot_interference(
    rows: Sequence[Row], environment: Mapping[str, Any], path: Path
) -> Path | None:
    """Left: step times against those alone. Right: what the copies reached meanwhile."""
    if not rows:
        return None
    figure, (times, rates) = panels_of(2)
    names = [row["case"].replace(", ", ",\n") for row in rows]
    for place, (key, label) in enumerate((("p50_over_alone", "median"), ("p99_over_alone", "p99"))):
        bars = times.bar(
            [index + 0.4 * place - 0.2 for index in range(len(rows))],
            [row[key] for row in rows],
            0.38,
            label=label,
            color=COLOURS[1 + place],
        )
        times.bar_label(bars, fmt="%.3f", padding=2, fontsize=8)
    times.axhline(1.0, linestyle="--", color="#333333", linewidth=1)
    times.set_title("Decode step while blocks stream, over alone", fontsize=10)
    times.legend(fontsize=8, frameon=False)
    bars = rates.bar(
        range(len(rows)), [row["copies_gb_per_second"] for row in rows], 0.6, color=COLOURS[0]
    )
    rates.bar_label(bars, fmt="%.3g", padding=2, fontsize=8)
    rates.set_title("Blocks meanwhile, out and in, GB/s", fontsize=10)
    for axes in (times, rates):
        axes.set_xticks(range(len(rows)), names, fontsize=8)
        axes.margins(y=0.15)
    return save_figure(figure, environment, path)


def bytes_name(size: int) -> str:
    """2097152 → `2 MiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def panels_of(count: int) -> tuple[Any, Any]:
    """A figure with so many panels beside each other."""
    figure, axes = new_figure(1, count, (4.4 * max(count, 2), 4.2))
    return figure, axes[0]
