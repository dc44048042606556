# SPDX-License-Identifier: Apache-2.0
"""`stratakv bench transfer`: copies between the KV pool and the slab, on the CPU device.

Blocks of 64 KiB, 256 KiB, 2 MiB and 5 MiB, single ones and runs of neighbours, one way and both
ways at once, against memcpy of the same pieces between as random places; what submitting a job of
64 blocks costs the step loop; and what a request would gain by computing the first layers while the
last ones are loaded. Every figure and its limit are taken in turn, over more memory
than caches hold, what arrived is compared, and a ratio is the median of the ratios within a round.
"""

from __future__ import annotations

import argparse
import gc

from rich.console import Console

from ..harness.comparison import WrongWork, take_rounds
from ..harness.plots import draw_and_tell
from ..harness.report import Report
from ..tiers.slab_case import footprint_bytes
from .copy_case import CopyCase
from .layer_ranges import take_layer_ranges
from .report import plot_transfer, print_layer_ranges, print_transfer
from .rig import Rig
from .scale import FULL, GATES, JOB_BLOCKS, QUICK, RUN_BLOCKS, SIZES, Scale, submit_name
from .submit_case import take_submissions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options beside `--quick` and `--out`, which are the dispatcher's."""


def run(arguments: argparse.Namespace) -> int:
    """Take all figures; 0, or 1 with the reason on the terminal."""
    scale = QUICK if arguments.quick else FULL
    report = Report("transfer", "stratakv bench transfer" + " --quick" * arguments.quick)
    try:
        measure(report, scale)
        written = report.write(arguments.out)
    except (WrongWork, OSError) as error:
        console = Console(stderr=True)
        console.print(f"bench transfer: {error}", style="red", markup=False, soft_wrap=True)
        return 1
    print_transfer(report)
    print_layer_ranges(report)
    print(f"written: {written}")
    draw_and_tell(lambda: plot_transfer(report, arguments.out / "transfer.png"))
    return 0


def measure(report: Report, scale: Scale) -> None:
    """Fill the report. Raises WrongWork where something else was copied than was asked for."""
    region_bytes = footprint_bytes(scale.region_bytes)
    report.figures["plan"] = {
        "device": "cpu",
        "region_bytes": region_bytes,
        "job_blocks": JOB_BLOCKS,
        "run_blocks": RUN_BLOCKS,
        "copies_are_timed_by": "the wall clock",
        "submissions_are_timed_by": "processor seconds of the calling thread",
    }
    comparisons = report.figures["contests"] = {}
    submissions = report.figures["submissions"] = {}
    ratios = {}
    for size, block_bytes in SIZES.items():
        rig = Rig(block_bytes, region_bytes)
        try:
            for comparison in CopyCase(rig).comparisons(size):
                outcome = take_rounds(comparison, scale.rounds)
                comparisons[comparison.name] = outcome.figures()
                ratios[comparison.name] = outcome.ratio
                report.limits[f"{comparison.name}_limit"] = comparisons[comparison.name][
                    "limit_median"
                ]
            taken = take_submissions(rig, scale.submissions)
            submissions[submit_name(size)] = taken.figures()
            ratios[submit_name(size)] = taken.ratio
        finally:
            rig.close()
            gc.collect()
    cells = report.figures["layer_ranges"] = take_layer_ranges(scale.cached, scale.rounds)
    report.ratios = {name: ratios[name] for name in GATES}
    report.ratios |= {name: cell["ratio"] for name, cell in cells.items()}
