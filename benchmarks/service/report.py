# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `stratakv bench service`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness.plots import GATE, MISSED, new_figure, save_figure
from ..harness.report import Report, print_table
from .scale import CASES, GATES, LIMITS, SIZES, row_name

# With one client, and with more.
_OURS, _THEIRS = ("#2b6cb0", "#90bce4"), ("#6b7078", "#c3c7cd")
_OTHERS = ("redis", "mooncake")


def print_service(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate."""
    rows = []
    for name, ratio in report.ratios.items():
        comparison = report.figures["contests"].get(name)
        cells = ["", "", "", ""]
        value = f"{ratio:,.0f}"
        if comparison is not None:
            ours, limit = comparison["median"] / 1e9, comparison["limit_median"] / 1e9
            costs = (comparison[key] for key in ("cpu_seconds_per_gb", "limit_cpu_seconds_per_gb"))
            cells = [
                f"{ours:.2f} / {limit:.2f}",
                comparison["limit"],
                " / ".join(map(_short, costs)),
            ]
            cells.append(_spread(report, f"{name}_aa"))
            value = f"{ratio:.2f}"
        gate = GATES.get(name)
        verdict = "" if gate is None else ("met" if gate.is_met(ratio) else "missed")
        wanted = "" if gate is None else f"{gate.wanted} {verdict}"
        rows.append([name, cells[0], cells[1], value, _spread(report, name), *cells[2:], wanted])
    columns = ["what", "GB/s / limit", "limit", "ratio", "quartiles", "cpu s/GB", "A/A", "gate"]
    title = (
        "The cache service against this machine's loopback and memory, measured in turn. cpu s/GB: "
        "of both ends, ours / limit. A/A: the limit against itself, quartiles"
    )
    print_table(title, columns, rows)
    for what, why in report.figures["skipped"].items():
        print(f"skipped: {what}: {why}")


def _short(value: float) -> str:
    return f"{value:.2f}"


def _spread(report: Report, name: str) -> str:
    low, high = report.figures["spreads"].get(name, (None, None))
    if low is None:
        return ""
    return f"{low:.2f}..{high:.2f}" if high < 1000 else f"{low / 1e3:.0f}k..{high / 1e3:.0f}k"


def plot_service(report: Report, path: Path) -> Path:
    """For each size of block a panel: the cases, a bar for each number of clients, and gates."""
    figure, panels = new_figure(len(SIZES), 1, (10.4, 3.4 * len(SIZES)), sharex=True)
    counts = report.figures["plan"]["clients"]
    cases = [
        case
        for case in CASES
        if any(row_name(case.name, s, n) in report.ratios for s in SIZES for n in counts)
    ]
    width = 0.8 / len(counts)
    for (axes,), size in zip(panels, SIZES, strict=True):
        for number, clients in enumerate(counts):
            for place, case in enumerate(cases):
                ratio = report.ratios.get(row_name(case.name, size, clients))
                if ratio is None:
                    continue
                x = place + (number - len(counts) / 2 + 0.5) * width
                colours = _THEIRS if case.transport in _OTHERS else _OURS
                bars = axes.bar([x], [ratio], 0.94 * width, color=colours[min(number, 1)])
                axes.bar_label(bars, labels=[f"{ratio:.2f}"], fontsize=7, padding=2)
                gate = GATES.get(row_name(case.name, size, clients))
                if gate is not None:
                    colour = GATE if gate.is_met(ratio) else MISSED
                    axes.hlines(gate.least or 0.0, x - width / 2, x + width / 2, color=colour, lw=2)
        axes.axhline(1.0, color="#bbbbbb", linewidth=0.8, zorder=0)
        axes.set_title(f"Blocks of {size}", fontsize=9)
        axes.set_ylabel("share of the limit", fontsize=8)
        axes.margins(x=0.01, y=0.12)
    labels = [
        f"{case.name.replace('_', ' ', 1).replace('_', chr(10))}\nof {LIMITS[case.limit]}"
        for case in cases
    ]
    panels[-1][0].set_xticks(range(len(cases)), labels, fontsize=7.5)
    _add_legend(figure, counts)
    return save_figure(figure, report.environment, path)


def _add_legend(figure: Any, counts: Sequence[int]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = [f"{count} client{'s' * (count > 1)}" for count in counts]
    handles: list[Any] = [
        Patch(color=colours[min(number, 1)], label=f"{whose}, {each}")
        for whose, colours in (("StrataKV", _OURS), ("another server", _THEIRS))
        for number, each in enumerate(words)
    ]
    handles.append(Line2D([], [], color=GATE, lw=2, label="promised at least (red: missed)"))
    figure.legend(handles=handles, loc="outside upper center", ncols=5, fontsize=8, frameon=False)
