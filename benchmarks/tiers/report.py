# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `stratakv bench tiers`."""

from __future__ import annotations

from pathlib import Path

from ..harness.plots import GATE, MET, MISSED, new_figure, save_figure
from ..harness.report import Report, print_table
from .gates import GATES
from .scale import SIZES

# What a picture calls them.
_FAMILIES = {
    "slab_put": "slab, put",
    "slab_get": "slab, get",
    "ssd_write": "ssd, durable write",
    "ssd_read_cold": "ssd, cold read",
    "ssd_churn": "ssd, turned over",
}


def print_tiers(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate."""
    rows = []
    for name, ratio in report.ratios.items():
        gate = GATES[name]
        comparison = report.figures["contests"].get(name)
        rates = ["", ""]
        if comparison is not None:
            ours, limit = comparison["median"] / 1e9, comparison["limit_median"] / 1e9
            rates = [f"{ours:.2f} / {limit:.2f}", comparison["limit"]]
        value = f"{ratio:.2f}" if ratio < 1000 else f"{ratio:,.0f}"
        spreads = [_spread(report, name), _spread(report, f"{name}_aa")]
        verdict = "met" if gate.is_met(ratio) else "missed"
        rows.append([name.replace("_", " "), *rates, value, *spreads, f"{gate.wanted} {verdict}"])
    columns = ["what", "GB/s / limit", "limit", "ratio", "quartiles", "A/A", "gate"]
    title = (
        "Tiers against the limits of this machine, measured in turn. "
        "A/A: the limit against itself, quartiles"
    )
    print_table(title, columns, rows)
    _print_disk_limits(report)


def _print_disk_limits(report: Report) -> None:
    """Every limit of the disk in one table; the one that decides has a mark."""
    rows = []
    for name, comparison in report.figures["contests"].items():
        if "beside_ratio" not in comparison:
            continue
        ours = comparison["median"]
        only = {
            comparison["limit"]: {
                "median": comparison["limit_median"],
                "ratio": report.ratios[name],
            }
        }
        for limit, cell in comparison.get("by_limit", only).items():
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


def _spread(report: Report, name: str) -> str:
    low, high = report.figures["spreads"].get(name, (None, None))
    return "" if low is None else f"{low:.2f}..{high:.2f}"


def plot_tiers(report: Report, path: Path) -> Path:
    """Bars of the ratios, a group for each family and a bar for each size, with their gates."""
    figure, panels = new_figure(1, 1, (9.6, 4.4))
    axes = panels[0][0]
    step = len(SIZES) + 0.6
    cases = [
        (number * step + place, size, f"{family}_{size}")
        for number, family in enumerate(_FAMILIES)
        for place, size in enumerate(SIZES)
    ]
    for place, _, name in cases:
        gate, ratio = GATES[name], report.ratios[name]
        bars = axes.bar([place], [ratio], color=MET if gate.is_met(ratio) else MISSED)
        axes.bar_label(bars, labels=[f"{ratio:.2f}"], fontsize=8, padding=2)
        axes.hlines(gate.least or 0.0, place - 0.45, place + 0.45, color=GATE)
    axes.set_xticks([place for place, _, _ in cases], [size for _, size, _ in cases], fontsize=7)
    families = axes.secondary_xaxis(location=0)
    middles = [number * step + (len(SIZES) - 1) / 2 for number in range(len(_FAMILIES))]
    families.set_xticks(middles, [f"\n{label}" for label in _FAMILIES.values()], fontsize=9)
    families.tick_params(length=0)
    axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
    axes.set_ylabel("share of the limit")
    axes.margins(x=0.02, y=0.12)
    plan = report.figures["plan"]
    pages = "huge" if plan["huge_pages"] else "plain"
    several = any("by_limit" in comparison for comparison in report.figures["contests"].values())
    disk = f"{plan['disk_limit']} or a stricter one" if several else plan["disk_limit"]
    axes.set_title(
        "Slab and SSD store against this machine's memory and disk, in turns\n"
        f"1.0: memcpy (slab), {disk} with O_DIRECT at random places, {pages} pages "
        "(ssd). Orange: promised at least",
        fontsize=8.5,
    )
    return save_figure(figure, report.environment, path)
