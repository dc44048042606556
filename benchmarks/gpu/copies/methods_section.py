# SPDX-License-Identifier: Apache-2.0
"""The section that times copies of blocks from pool to slab and back, by every method, size and
direction. The 64 blocks of a job are scattered in the pool and in a page-locked slab. Every byte of
every job is compared before the job is timed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ....kernels.copy.copy_engine import merge_neighbours
from ....kernels.kernel_choice import KernelRefused
from ...harness.report import median
from ..plots import bytes_name, draw_copies
from ..section import Launch, Place, Results, Row, Section, SectionOver, Target
from .methods import (
    BLOCKS,
    DIRECTIONS,
    METHODS,
    ONE_WAY,
    Direction,
    Field,
    Job,
    Method,
    job_addresses,
    on,
    page_locked,
    prepare_checked,
    time_both_ways,
    time_one_way,
)

NAME = "copies"
SUBMISSIONS = 15  # timed submissions of each case
NEARLY_BEST = 0.98
TARGETS = (
    Target("blocks_to_host_over_pinned", "blocks of 2 MiB to the host, of the ceiling", least=0.95),
    Target(
        "blocks_to_device_over_pinned", "blocks of 2 MiB to the device, of the ceiling", least=0.95
    ),
    Target("blocks_both_over_pinned", "blocks of 2 MiB both ways, of that ceiling", least=0.95),
    Target("submit_64_blocks_microseconds", "CPU time to submit 64 blocks", most=10.0, unit=" µs"),
)


def run(place: Place, results: Results) -> None:
    """Measure all cases, with the targets' cases first."""
    target_size = place.choose(2 << 20, 2 << 20, 256)
    others = place.choose((64 << 10, 256 << 10, 5 << 20), (256 << 10,), (128,))
    half_bytes = place.choose(640 << 20, 256 << 20, BLOCKS * target_size)
    with page_locked(place, 2 * half_bytes, lambda note: results.add_note(NAME, note)) as slab:
        field = Field.make(place, slab)
        try:
            for block_bytes in (target_size, *others):
                for method in METHODS:
                    measure_method(place, results, field, method, block_bytes)
        except SectionOver:
            set_ratios(results, target_size)
            raise
    set_ratios(results, target_size)


def measure_method(
    place: Place, results: Results, field: Field, method: Method, block_bytes: int
) -> None:
    """Add a method's rows for three directions, or a note if the machine cannot run the method."""
    try:
        for direction in DIRECTIONS:
            place.check_time()
            results.add_row(NAME, measure(place, results, field, method, block_bytes, direction))
    except (torch.OutOfMemoryError, KernelRefused) as error:
        results.add_note(NAME, f"{method.name}, {bytes_name(block_bytes)}: left out: {error}")


def measure(
    place: Place,
    results: Results,
    field: Field,
    method: Method,
    block_bytes: int,
    direction: Direction,
) -> Row:
    """Check the bytes of a case, then time the case; return its row. Raises WrongResult."""
    case = f"{method.name}, {bytes_name(block_bytes)}, {direction}"
    (out, back), launches = prepare_checked(place, field, method, block_bytes, case, direction)
    row: Row = {
        "case": case,
        "method": method.name,
        "direction": direction,
        "block_bytes": block_bytes,
        "is_for_any_blocks": method.is_for_any_blocks,
    }
    if direction == "both":
        seconds = time_both_ways(place, field.lanes, *launches)
    else:
        stream = field.lanes.to_host if out else field.lanes.to_device
        of_lane = launches[0] or launches[1]
        seconds = time_one_way(place, stream, of_lane)
        row["submit_microseconds"] = submit_microseconds(place, stream, of_lane)
        if not method.is_for_any_blocks:
            row["merge_microseconds"] = merge_microseconds((out or back)[0])
    moved = sum(jobs[0].num_bytes for jobs in (out, back) if jobs)
    rate = moved / seconds / 1e9
    row["gb_per_second"] = rate
    row["over_pinned"] = results.ratio_to_ceiling(rate, f"pinned_{direction}_gb_per_second")
    return row


def submit_microseconds(
    place: Place, stream: torch.cuda.Stream | None, launches: Sequence[Launch]
) -> float:
    """Return the median CPU time, in microseconds, of one launch on an idle GPU."""
    taken = []
    with on(stream):
        for number in range(SUBMISSIONS):
            launch = launches[number % len(launches)]
            place.synchronise()
            begin = time.perf_counter()
            launch()
            taken.append(time.perf_counter() - begin)
    place.synchronise()
    return median(taken) * 1e6


def merge_microseconds(job: Job) -> float:
    """Return the median CPU time, in microseconds, of joining a job's adjacent blocks."""
    addresses = job_addresses(job)
    taken = []
    for _ in range(SUBMISSIONS):
        begin = time.perf_counter()
        merge_neighbours(*addresses)
        taken.append(time.perf_counter() - begin)
    return median(taken) * 1e6


def set_ratios(results: Results, block_bytes: int) -> None:
    """Set the targets' figures from the rows with blocks of `block_bytes` and methods for any
    blocks. Methods with merged runs are left out, because blocks are only sometimes adjacent. The
    submission time, in the direction in which it is longer, is that of the method with the lowest
    CPU time among the methods that are nearly as fast as the fastest."""
    rows = [
        row
        for row in results.rows(NAME)
        if row["block_bytes"] == block_bytes and row["is_for_any_blocks"]
    ]
    best = {
        direction: max(
            (row["gb_per_second"] for row in rows if row["direction"] == direction), default=0.0
        )
        for direction in DIRECTIONS
    }
    submissions = []
    for direction in ONE_WAY:
        rate = best[direction]
        if not rate:
            continue
        ratio = results.ratio_to_ceiling(rate, f"pinned_{direction}_gb_per_second")
        if ratio is not None:
            results.set_ratio(f"blocks_{direction}_over_pinned", ratio)
        submissions.append(
            min(
                row["submit_microseconds"]
                for row in rows
                if row["direction"] == direction and row["gb_per_second"] >= NEARLY_BEST * rate
            )
        )
    if len(submissions) == len(ONE_WAY):
        results.set_ratio("submit_64_blocks_microseconds", max(submissions))
        if best["both"]:
            one_way = max(best[direction] for direction in ONE_WAY)
            results.set_ratio("both_ways_over_one_way", best["both"] / one_way)
            if ceiling := results.ceilings.get("pinned_both_gb_per_second"):
                results.set_ratio("blocks_both_over_pinned", best["both"] / ceiling)


SECTION = Section(NAME, "Blocks between the pool and the CPU", run, draw_copies, TARGETS)
