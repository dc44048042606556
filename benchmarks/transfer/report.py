# SPDX-License-Identifier: Apache-2.0
"""The table and the plot of `stratakv bench transfer`. Knows nothing of how it was measured."""

from __future__ import annotations

from pathlib import Path

from ..report import Report, print_table
from .scale import GATES, MOVES, SIZES, copy_name, submit_name

_COLOURS = ("#2b6cb0", "#63a4d8", "#2f7d4f", "#7fbf98", "#b7791f")


def print_transfer(report: Report) -> None:
    """What a person reads: figure, limit, ratio, gate."""
    rows = []
    for name, gate in GATES.items():
        ratio = report.ratios[name]
        contest = report.figures["contests"].get(name)
        if contest is not None:
            rates = [f"{contest['median'] / 1e9:.2f}", f"{contest['limit_median'] / 1e9:.2f}"]
            value = f"{ratio:.2f}"
        else:
            taken = report.figures["submissions"][name]
            rates = [
                f"{1e6 * taken['submit_cpu_seconds']:.0f} us",
                f"{1e6 * taken['copy_cpu_seconds']:.0f} us",
            ]
            value = f"{ratio:.3f}"
        verdict = "met" if gate.is_met(ratio) else "missed"
        rows.append([name.replace("_", " "), *rates, value, gate.wanted, verdict])
    columns = ["what", "GB/s", "memcpy GB/s", "ratio", "gate", ""]
    print_table("Pool and slab on the CPU device, against memcpy in turn", columns, rows)


def print_layer_ranges(report: Report) -> None:
    """What computing while layers are still being loaded gains; nothing is promised of it."""
    rows = []
    for name, cell in report.figures["layer_ranges"].items():
        parts = [f"{1e3 * cell[key]:.1f}" for key in ("copy_seconds", "compute_seconds")]
        ratios = [f"{cell[key]:.2f}" for key in ("most_to_win", "ratio", "cpu_ratio")]
        quartiles = "{:.2f} to {:.2f}".format(*cell["ratio_quartiles"])
        rows.append([name.replace("_", " "), *parts, *ratios, quartiles])
    columns = ["cached, suffix, ranges", "copy ms", "compute ms", "at most", "ratio", "cpu ratio",
               "quartiles"]  # fmt: skip
    print_table("Loaded whole, over loaded by layers: time to the first token", columns, rows)


def plot_transfer(report: Report, path: Path) -> Path:
    """Bars of the copying ratios by size of block, and of what submitting costs."""
    # Imported here: the table and the JSON must not need a plotting library to be imported.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (copies, submits) = pyplot.subplots(
        1, 2, figsize=(9.6, 3.8), layout="constrained", width_ratios=(3, 1)
    )
    width = 0.8 / len(MOVES)
    for index, (move, colour) in enumerate(zip(MOVES, _COLOURS, strict=True)):
        places = [place + (index - len(MOVES) / 2 + 0.5) * width for place in range(len(SIZES))]
        ratios = [report.ratios[copy_name(move, size)] for size in SIZES]
        copies.bar(places, ratios, width=0.9 * width, color=colour, label=move.replace("_", " "))
    copies.set_xticks(range(len(SIZES)), list(SIZES))
    copies.set_title("Copying, of memcpy", fontsize=9)
    copies.legend(fontsize=7, loc="lower right")
    shares = [100 * report.ratios[submit_name(size)] for size in SIZES]
    bars = submits.bar(list(SIZES), shares, color=_COLOURS[0], width=0.6)
    submits.bar_label(bars, labels=[f"{share:.1f} %" for share in shares], fontsize=8, padding=2)
    submits.set_title("Submitting, % of copying", fontsize=9)
    submits.tick_params(axis="x", labelsize=7)
    for axes, gate in (
        (copies, GATES[copy_name(MOVES[0], next(iter(SIZES)))].least or 0.0),
        (submits, 100 * (GATES[submit_name(next(iter(SIZES)))].most or 0.0)),
    ):
        axes.axhline(gate, color="#c53030", linewidth=1)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
