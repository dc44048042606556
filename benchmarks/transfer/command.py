# SPDX-License-Identifier: Apache-2.0
"""The command `stratakv bench transfer`; the package's docstring describes the measurements."""

from __future__ import annotations

import argparse
import gc
from functools import partial
from pathlib import Path

from ..harness.comparison import WrongWork, take_rounds
from ..harness.plots import COLOURS, GATE, add_legend, caption, draw_bars, new_figure, save_figure
from ..harness.report import Report, print_table, run_and_tell
from ..tiers.slab_case import footprint_bytes
from . import copy_case
from .layer_ranges import take_layer_ranges

_LABELS = {
    "pool_to_slab": "pool to slab, scattered blocks",
    "slab_to_pool": "slab to pool, scattered blocks",
    "pool_to_slab_runs": f"pool to slab, runs of {copy_case.RUN_BLOCKS}",
    "slab_to_pool_runs": f"slab to pool, runs of {copy_case.RUN_BLOCKS}",
    "both_ways": "both ways at once",
}


def print_transfer(report: Report) -> None:
    """Print the figure, limit, ratio and gate of each row."""
    rows = []
    for name, gate in copy_case.GATES.items():
        ratio = report.ratios[name]
        comparison = report.figures["contests"].get(name)
        if comparison is not None:
            rates = [f"{comparison['median'] / 1e9:.2f}", f"{comparison['limit_median'] / 1e9:.2f}"]
            value = f"{ratio:.2f}"
        else:
            taken = report.figures["submissions"][name]
            rates = [
                f"{1e6 * taken['submit_cpu_seconds']:.0f} us",
                f"{1e6 * taken['copy_cpu_seconds']:.0f} us",
            ]
            value = f"{ratio:.3f}"
        rows.append([name.replace("_", " "), *rates, value, gate.wanted, gate.verdict(ratio)])
    columns = ["what", "GB/s", "memcpy GB/s", "ratio", "gate", ""]
    print_table("Pool and slab on the CPU device, against memcpy in turn", columns, rows)
    print_layer_ranges(report)


def print_layer_ranges(report: Report) -> None:
    """Print the gain of computing while layers are loaded, which has no gate."""
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
    """Draw bars of the copy ratios by block size, and of the cost of submitting."""
    figure, [[copies, submits]] = new_figure(1, 2, 4.4, width_ratios=(5, 2))
    sizes = list(copy_case.SIZES)
    series = {
        _LABELS[move]: [report.ratios[copy_case.copy_name(move, size)] for size in sizes]
        for move in copy_case.MOVES
    }
    light_and_dark = (COLOURS[0], COLOURS[5], COLOURS[1], COLOURS[6], COLOURS[3])
    draw_bars(copies, sizes, series, light_and_dark)
    caption(copies, "Blocks copied between pool and slab", "block", "share of memcpy's rate")
    shares = [100 * report.ratios[copy_case.submit_name(size)] for size in sizes]
    draw_bars(submits, sizes, {"": shares}, fmt="%.1f")
    submits.tick_params(axis="x", labelsize=7)
    caption(submits, "Handing a job over", "block", "% of its copying time")
    least = copy_case.GATES[copy_case.copy_name(copy_case.MOVES[0], sizes[0])].least or 0.0
    most = 100 * (copy_case.GATES[copy_case.submit_name(sizes[0])].most or 0.0)
    words = f"promised: at least {least:g}; right: at most {most:g} %"
    copies.axhline(least, color=GATE, linewidth=1.5, label=words)
    submits.axhline(most, color=GATE, linewidth=1.5, zorder=0)
    add_legend(figure, copies, columns=2)
    return save_figure(figure, report.environment, path)


def run(arguments: argparse.Namespace) -> int:
    """Measure all figures; return 0, or 1 after printing an error."""
    scale = copy_case.QUICK if arguments.quick else copy_case.FULL
    report = Report("transfer", "stratakv bench transfer" + " --quick" * arguments.quick)

    work = partial(measure, report, scale)
    return run_and_tell(report, arguments.out, work, print_transfer, plot_transfer, WrongWork)


def measure(report: Report, scale: copy_case.Scale) -> None:
    """Measure all figures and fill the report. Raises WrongWork if wrong blocks were copied."""
    region_bytes = footprint_bytes(scale.region_bytes)
    report.figures["plan"] = {
        "device": "cpu",
        "region_bytes": region_bytes,
        "job_blocks": copy_case.JOB_BLOCKS,
        "run_blocks": copy_case.RUN_BLOCKS,
        "copies_are_timed_by": "the wall clock",
        "submissions_are_timed_by": "processor seconds of the calling thread",
    }
    report.figures["contests"] = {}
    submissions = report.figures["submissions"] = {}
    for size, block_bytes in copy_case.SIZES.items():
        rig = copy_case.Rig(block_bytes, region_bytes)
        try:
            for comparison in rig.comparisons(size):
                take_rounds(comparison, scale.rounds).add_to(report)
            taken = copy_case.take_submissions(rig, scale.submissions)
            submissions[copy_case.submit_name(size)] = taken.figures()
            report.ratios[copy_case.submit_name(size)] = taken.ratio
        finally:
            rig.close()
            gc.collect()
    cells = report.figures["layer_ranges"] = take_layer_ranges(scale.cached, scale.rounds)
    report.ratios = {name: report.ratios[name] for name in copy_case.GATES}
    report.ratios |= {name: cell["ratio"] for name, cell in cells.items()}
