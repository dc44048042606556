# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `stratakv bench service`. Knows nothing of how it was measured."""

from __future__ import annotations

from pathlib import Path

from ..report import Report, print_table
from .scale import CASES, GATES, SIZES, row_name

_MET, _MISSED, _PLAIN = "#2b6cb0", "#c53030", "#8a8f98"


def print_service(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate."""
    rows = []
    for name, ratio in report.ratios.items():
        contest = report.figures["contests"].get(name)
        cells = ["", "", "", ""]
        value = f"{ratio:,.0f}"
        if contest is not None:
            ours, limit = contest["median"] / 1e9, contest["limit_median"] / 1e9
            costs = (contest[key] for key in ("cpu_seconds_per_gb", "limit_cpu_seconds_per_gb"))
            cells = [f"{ours:.2f} / {limit:.2f}", contest["limit"], " / ".join(map(_short, costs))]
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
    """Bars of the ratios by case, one plot for each size of block, gates as lines."""
    # Imported here: the table and the JSON must not need a plotting library to be imported.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, plots = pyplot.subplots(
        1, len(SIZES), figsize=(11.2, 4.2), layout="constrained", sharey=True
    )
    for axes, size in zip(plots, SIZES, strict=True):
        names = [
            row_name(case.name, size, clients)
            for case in CASES
            for clients in report.figures["plan"]["clients"]
            if row_name(case.name, size, clients) in report.ratios
        ]
        ratios = [report.ratios[name] for name in names]
        bars = axes.bar(range(len(names)), ratios, color=[_colour(report, name) for name in names])
        axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], fontsize=7, padding=2)
        for place, name in enumerate(names):
            if name in GATES:
                axes.hlines(GATES[name].least or 0.0, place - 0.45, place + 0.45, color="#b7791f")
        labels = [name.replace(f"_{size}", "").replace("_", " ") for name in names]
        axes.set_xticks(range(len(names)), labels, fontsize=7, rotation=60, ha="right")
        axes.set_title(f"Blocks of {size}", fontsize=9)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    plots[0].set_ylabel("of memcpy (shm), raw TLS (tls), raw TCP")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def _colour(report: Report, name: str) -> str:
    if name not in GATES:
        return _PLAIN
    return _MET if GATES[name].is_met(report.ratios[name]) else _MISSED
