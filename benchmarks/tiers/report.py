# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `stratakv bench tiers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..harness.comparison import CONTEST_COLUMNS, Gate, contest_row
from ..harness.plots import (
    GATE,
    MET,
    MISSED,
    caption,
    draw_bars,
    mark_gates,
    new_figure,
    save_figure,
)
from ..harness.report import Report, print_table
from .cost_cases import NAMES as CHECKSUM_NAMES
from .cost_cases import print_codecs
from .scale import SIZES

LOOK_UPS = "index_lookups_per_second"
LOOK_UPS_WHILE_CHURNING = "index_lookups_per_second_while_churning"
BYTES_PER_ENTRY = "index_bytes_per_entry"
REOPEN = "reopen_over_sequential_read"
# What a picture calls them.
_FAMILIES = {
    "slab_put": "slab, put",
    "slab_get": "slab, get",
    "ssd_write": "ssd, durable write",
    "ssd_read_cold": "ssd, cold read",
    "ssd_churn": "ssd, turned over",
}


def _gates() -> dict[str, Gate]:
    gates = {}
    for size in SIZES:
        small = size == "256KiB"
        gates[f"slab_put_{size}"] = gates[f"slab_get_{size}"] = Gate(least=0.8)
        gates[f"ssd_write_{size}"] = Gate(least=0.7 if small else 0.85)
        gates[f"ssd_read_cold_{size}"] = Gate(least=0.9)
        gates[f"ssd_churn_{size}"] = Gate(least=0.5 if small else 0.85)
    gates |= dict(zip(CHECKSUM_NAMES, (Gate(most=0.08), Gate(most=0.15)), strict=True))
    gates[LOOK_UPS] = gates[LOOK_UPS_WHILE_CHURNING] = Gate(least=500_000)
    gates[BYTES_PER_ENTRY] = Gate(most=256)
    gates[REOPEN] = Gate(most=1.5)
    return gates


GATES: Mapping[str, Gate] = _gates()


def print_tiers(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate."""
    rows = [contest_row(report, name, GATES[name]) for name in report.ratios]
    rows = [[name.replace("_", " "), *cells] for name, *cells in rows]
    title = (
        "Tiers against the limits of this machine, measured in turn. "
        "A/A: the limit against itself, quartiles"
    )
    print_table(title, CONTEST_COLUMNS, rows)
    _print_disk_limits(report)
    print_codecs(report)


def _print_disk_limits(report: Report) -> None:
    """Every limit of the disk in one table; the one that decides has a mark."""
    rows = []
    for name, comparison in report.figures["contests"].items():
        if "beside_ratio" not in comparison:
            continue
        ours = comparison["median"]
        only = {"median": comparison["limit_median"], "ratio": report.ratios[name]}
        for limit, cell in comparison.get("by_limit", {comparison["limit"]: only}).items():
            mark = "decides" if limit == comparison["limit"] else ""
            rows.append(_limit_row(name, limit, ours, cell["median"], cell["ratio"], mark))
        beside = comparison["beside_median"], comparison["beside_ratio"]
        limit = f"{report.figures['plan']['disk_limit']}, eight buffers"
        rows.append(_limit_row(name, limit, ours, *beside, "in a cache: promises nothing"))
    title = (
        "Every limit of the disk; x8: eight requests at a time. But for eight buffers, which stay "
        "in a cache, all have as much memory as the store, and the strictest of them decides"
    )
    print_table(title, ["what", "limit", "GB/s / limit", "ratio", ""], rows)


def _limit_row(
    name: str, limit: str, ours: float, theirs: float, ratio: float, mark: str
) -> list[str]:
    rates = f"{ours / 1e9:.2f} / {theirs / 1e9:.2f}"
    return [name.replace("_", " "), limit, rates, f"{ratio:.2f}", mark]


def plot_tiers(report: Report, path: Path) -> Path:
    """Bars of the ratios, a group for each family and a bar for each size, with their gates."""
    figure, [[axes]] = new_figure(1, 1, 4.6)
    names = [[f"{family}_{size}" for family in _FAMILIES] for size in SIZES]
    ratios = [[report.ratios[name] for name in row] for row in names]
    colours = [
        [MET if GATES[name].is_met(report.ratios[name]) else MISSED for name in row]
        for row in names
    ]
    series = dict(zip(SIZES, ratios, strict=True))
    draw_bars(axes, list(_FAMILIES.values()), series, colours, fmt="%.2f")
    width = 0.84 / len(SIZES)
    for number, (size, row) in enumerate(zip(SIZES, names, strict=True)):
        places = [place - 0.42 + width * (number + 0.5) for place in range(len(row))]
        gates = [GATES[name].least for name in row]
        mark_gates(axes, dict(zip(places, gates, strict=True)), width, GATE)
        for place in places:
            axes.annotate(size, (place, 0), (0, 4), textcoords="offset points", rotation=90,
                          ha="center", fontsize=8, color="white")  # fmt: skip
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    plan = report.figures["plan"]
    pages = "huge" if plan["huge_pages"] else "plain"
    several = any("by_limit" in comparison for comparison in report.figures["contests"].values())
    disk = f"{plan['disk_limit']} or a stricter one" if several else plan["disk_limit"]
    title = (
        "Slab and SSD store, as a share of what memory and disk can do\n"
        f"1.0: memcpy (slab); {disk}, O_DIRECT, random places, {pages} pages (ssd). "
        "Orange: promised"
    )
    caption(axes, title, y="share of the limit")
    return save_figure(figure, report.environment, path)
