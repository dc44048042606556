# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `stratakv bench tiers`. Knows nothing of how anything was measured."""

from __future__ import annotations

from pathlib import Path

from ..report import Report, print_table
from .gates import GATES
from .scale import SIZES

_FAMILIES = ("slab_put", "slab_get", "ssd_write", "ssd_read_cold", "ssd_churn")
_MET, _MISSED = "#2b6cb0", "#c53030"


def print_tiers(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate."""
    rows = []
    for name, ratio in report.ratios.items():
        gate = GATES[name]
        contest = report.figures["contests"].get(name)
        rates = ["", ""]
        if contest is not None:
            ours, limit = contest["median"] / 1e9, contest["limit_median"] / 1e9
            rates = [f"{ours:.2f} / {limit:.2f}", contest["limit"]]
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
    _print_besides(report)


def _print_besides(report: Report) -> None:
    rows = [
        [
            name.replace("_", " "),
            f"{contest['median'] / 1e9:.2f} / {contest['beside_median'] / 1e9:.2f}",
            f"{contest['beside_ratio']:.2f}",
        ]
        for name, contest in report.figures["contests"].items()
        if "beside_ratio" in contest
    ]
    limit = report.figures["plan"]["disk_limit"]
    title = (
        f"Beside it, promising nothing: against {limit} with eight buffers, which stay in a cache"
    )
    print_table(title, ["what", "GB/s / limit", "ratio"], rows)


def _spread(report: Report, name: str) -> str:
    low, high = report.figures["spreads"].get(name, (None, None))
    return "" if low is None else f"{low:.2f}..{high:.2f}"


def plot_tiers(report: Report, path: Path) -> Path:
    """Bars of the ratios by size of block, their gates as lines."""
    # Imported here: the table and the JSON must not need a plotting library to be imported.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9.6, 4.2), layout="constrained")
    names = [f"{family}_{size}" for family in _FAMILIES for size in SIZES]
    ratios = [report.ratios[name] for name in names]
    met = [GATES[name].is_met(ratio) for name, ratio in zip(names, ratios, strict=True)]
    bars = axes.bar(range(len(names)), ratios, color=[_MET if each else _MISSED for each in met])
    axes.bar_label(bars, labels=[f"{ratio:.2f}" for ratio in ratios], fontsize=8, padding=2)
    for position, name in enumerate(names):
        axes.hlines(GATES[name].least or 0.0, position - 0.45, position + 0.45, color="#b7791f")
    labels = [name.replace("_", "\n", 1).replace("_", "\n") for name in names]
    axes.set_xticks(range(len(names)), labels, fontsize=7)
    axes.set_ylabel("of the limit")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    limit = report.figures["plan"]["disk_limit"]
    pages = "huge" if report.figures["plan"]["huge_pages"] else "plain"
    axes.set_title(
        f"Limits: memcpy; {limit}, random, O_DIRECT, as much memory, {pages} pages. Lines: gates",
        fontsize=9,
    )
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
