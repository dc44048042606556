# SPDX-License-Identifier: Apache-2.0
"""The pictures of `stratakv bench gpu`, with a function for each section."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..harness import plots
from .section import Row

Ceilings = Mapping[str, float]
_DIRECTIONS = {"to_host": "to the host", "to_device": "to the device", "both": "both at once"}
_DASHED = {"linestyle": "--", "color": plots.REFERENCE, "linewidth": 1}
DEVICE_COPY = "device_copy_gb_per_second"


def draw_ceilings(rows: Sequence[Row], ceilings: Ceilings) -> Any:
    """Draw bars of the page-locked copies by piece size; the title has the remaining limits."""
    pinned = [row for row in rows if row["case"].startswith("pinned")]
    if not pinned:
        return None
    figure, [axes] = _panels(1)
    labels = [
        f"{row['case'].removeprefix('pinned_').removesuffix('_gb_per_second').replace('_', ' ')}\n"
        f"{bytes_name(row['piece_bytes'])}"
        for row in pinned
    ]
    plots.draw_bars(axes, labels, {"": [row["value"] for row in pinned]}, fmt="%.3g")
    others = {DEVICE_COPY: "GB/s on the device", "matmul_bf16_tflops": "TFLOP/s"}
    title = [f"{ceilings[name]:,.3g} {unit}" for name, unit in others.items() if name in ceilings]
    plots.caption(axes, "; ".join(["Page-locked copies, by size of a piece", *title]), y="GB/s")
    return figure


def draw_copies(rows: Sequence[Row], ceilings: Ceilings) -> Any:
    """Draw GB/s over the block size: a panel for each direction, a line for each method."""
    figure, panels = _panels(len(_DIRECTIONS))
    sizes = sorted({row["block_bytes"] for row in rows})
    for axes, (direction, title) in zip(panels, _DIRECTIONS.items(), strict=True):
        of_direction = [row for row in rows if row["direction"] == direction]
        plots.draw_lines(axes, _points(of_direction, "block_bytes", "gb_per_second", "method"))
        ceiling = ceilings.get(f"pinned_{direction}_gb_per_second")
        if ceiling is not None:
            axes.axhline(ceiling, **_DASHED)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [bytes_name(size) for size in sizes], fontsize=8)
        axes.minorticks_off()
        plots.caption(axes, f"64 blocks {title}", x="block")
    panels[0].set_ylabel("GB/s (log); dashed: page-locked ceiling")
    plots.add_legend(figure, panels[0], columns=4)
    return figure


def draw_interference(rows: Sequence[Row], _: Ceilings) -> Any:
    """Draw, at the left, step times during copies over times without copies; at the right,
    rates."""
    figure, (times, rates) = _panels(2)
    names = [row["case"].replace(", ", ",\n") for row in rows]
    series = {
        label: [row[key] for row in rows]
        for key, label in (("p50_over_alone", "median"), ("p99_over_alone", "p99"))
    }
    plots.draw_bars(times, names, series, fmt="%.3f")
    times.axhline(1.0, **_DASHED)
    plots.caption(times, "Decode step while blocks stream, over alone", legend=True)
    plots.draw_bars(rates, names, {"": [row["copies_gb_per_second"] for row in rows]}, fmt="%.3g")
    plots.caption(rates, "Blocks meanwhile, out and in, GB/s")
    return figure


def draw_steps(rows: Sequence[Row], _: Ceilings) -> Any:
    """Draw, at the left, seconds of a step by batch; at the right, the bytes read per second."""
    figure, (times, rates) = _panels(2)
    found = {(row["way"], row["requests"], row["context"]): row for row in rows}
    batches = list(dict.fromkeys((row["requests"], row["context"]) for row in rows))
    labels = [f"{requests} x\n{context:,}" for requests, context in batches]
    for axes, key, factor, title in (
        (times, "seconds", 1e3, "A decode step, ms"),
        (rates, "gb_per_second", 1.0, "Weights and KV read, GB/s"),
    ):
        series = {
            way: [factor * found[way, *b][key] if (way, *b) in found else None for b in batches]
            for way in dict.fromkeys(row["way"] for row in rows)
        }
        plots.draw_bars(axes, labels, series)
        plots.caption(axes, title, legend=axes is times)
    return figure


def draw_phases(rows: Sequence[Row], _: Ceilings) -> Any:
    """Draw seconds to the first token over the cached length, a line for each phase."""
    figure, panels = _panels(2)
    for axes, key, title in zip(
        panels,
        ("seconds", "cold_over_this"),
        ("Seconds to the first token (log)", "Times as fast as computing (log)"),
        strict=True,
    ):
        there = [row for row in rows if key == "seconds" or row["phase"] != "cold"]
        plots.draw_lines(axes, {"cold": []} | _points(there, "tokens", key, "phase"))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        plots.caption(axes, title, x="tokens cached, or computed where cold", legend=True)
    return figure


def draw_writes(rows: Sequence[Row], ceilings: Ceilings) -> Any:
    """Draw bandwidth over the number of tokens, a line for each pool and order."""
    figure, [axes] = _panels(1)
    plots.draw_lines(axes, _points(rows, "tokens", "gb_per_second", "pool", "order"))
    _line(axes, ceilings.get(DEVICE_COPY), "device copy")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plots.caption(
        axes, "KV writes", "tokens in one launch", "bytes that must move, GB/s", legend=True
    )
    return figure


def draw_decode(rows: Sequence[Row], ceilings: Ceilings, grid: frozenset[str]) -> Any:
    """Draw bandwidth over the bytes that a case reads; the cases of `grid` have their own
    colour."""
    figure, [axes] = _panels(1)
    in_grid, float8, other = kinds = (
        "requests x context, bf16, group 4", "float8 pool", "another shape or type",
    )  # fmt: skip
    named = []
    for row in rows:
        kind = in_grid if row["case"] in grid else float8 if row["pool"] != "as q" else other
        named.append(row | {"kind": kind})
        axes.annotate(
            row["case"], (row["read_bytes"], row["gb_per_second"]),
            xytext=(4, 4), textcoords="offset points", fontsize=6,
        )  # fmt: skip
    points = _points(named, "read_bytes", "gb_per_second", "kind")
    plots.draw_lines(axes, {kind: points.get(kind, []) for kind in kinds}, linestyle="none")
    ceiling = ceilings.get(DEVICE_COPY)
    _line(axes, ceiling, "device copy")
    _line(axes, ceiling and 0.88 * ceiling, "target of large cases", linestyle=":")
    rates = [row["gb_per_second"] for row in rows]
    axes.set_xscale("log")
    axes.set_yscale("log" if math.log10(max(rates) / min(rates)) > 1 else "linear")
    title, x = "Paged decode over a scattered pool", "K and V of one layer, bytes"
    plots.caption(axes, title, x, "K and V read, GB/s", legend=True)
    return figure


def draw_prefill(
    rows: Sequence[Row], ceilings: Ceilings, target: float, grid: frozenset[str]
) -> Any:
    """Draw a bar for each case and a line for the target; the cases of `grid` have their own
    colour."""
    figure, [axes] = _panels(1)
    cases = [row["case"] for row in rows]
    colours = [plots.COLOURS[case in grid] for case in cases]
    plots.draw_bars(axes, cases, {"": [row["tflops"] for row in rows]}, [colours], fmt="%.3g")
    _line(axes, target, "target", linestyle=":")
    _line(axes, ceilings.get("matmul_bf16_tflops"), "matrix product, bf16")
    axes.tick_params(axis="x", rotation=40)
    title = "Paged prefill: chunk + context in tokens"
    plots.caption(axes, title, y="TFLOP/s, masked keys left out", legend=True)
    return figure


def draw_sweep(rows: Sequence[Row], _: Ceilings) -> Any:
    """Draw the time of every tried launch, divided by the time of the chosen launch."""
    rows = [row for row in rows if "best_over_chosen" in row]
    if not rows:
        return None
    figure, [axes] = _panels(1)
    for index, row in enumerate(rows):
        measured = [trial for trial in row["tried"] if "seconds" in trial]
        unit = next(trial["seconds"] for trial in measured if trial["is_chosen"])
        others = [trial["seconds"] / unit for trial in measured]
        axes.scatter([index] * len(others), others, color=plots.COLOURS[0], s=18, zorder=3)
    _line(axes, 1.0, "chosen")
    axes.set_yscale("log")
    labels = [f"{row['case']}\n{row['swept']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=8, rotation=20)
    title = "Launch parameters: below the line is better"
    plots.caption(axes, title, y="time in units of the chosen launch's", legend=True)
    return figure


def draw_peers(rows: Sequence[Row], _: Ceilings) -> Any:
    """Draw the kernel's time over each peer's time, by case; return None without a peer."""
    rows = [row for row in rows if row["peers"]]
    if not rows:
        return None
    figure, [axes] = _panels(1)
    series = {
        name: [row["seconds"] / row["peers"][name] if name in row["peers"] else None
               for row in rows]
        for name in dict.fromkeys(name for row in rows for name in row["peers"])
    }  # fmt: skip
    plots.draw_bars(axes, [row["case"] for row in rows], series)
    _line(axes, 1.0, "ours")
    axes.tick_params(axis="x", rotation=40)
    y = "our time over theirs (above 1: they are faster)"
    plots.caption(axes, "Peers on the same tensors", y=y, legend=True)
    return figure


def bytes_name(size: int) -> str:
    """Return a size as text: 2097152 → `2 MiB`."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def _points(rows: Sequence[Row], x: str, y: str, *names: str) -> dict[str, list[Any]]:
    """Return the points of each line; rows that agree in all `names` are one line."""
    series: dict[str, list[Any]] = {}
    for row in rows:
        label = ", ".join(row[name] for name in names)
        series.setdefault(label, []).append((row[x], row[y]))
    return series


def _panels(count: int) -> tuple[Any, Any]:
    figure, axes = plots.new_figure(1, count, 4.6)
    return figure, axes[0]


def _line(axes: Any, value: float | None, label: str, linestyle: str = "--") -> None:
    if value:
        colour = plots.GATE if linestyle == ":" else plots.REFERENCE
        axes.axhline(value, linestyle=linestyle, color=colour, label=label, linewidth=1)
