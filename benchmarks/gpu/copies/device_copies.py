# SPDX-License-Identifier: Apache-2.0
"""The section that times copies between pool and slab by the connector's copy device.

The section `copies` times CUDA calls only. The section `copy device` times everything from a
caller's request to the end of the copy: the plan, the threads, the events and the waits for events.
Every byte is compared once before the timing. A rehearsal uses the CPU's copy device."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

import torch

from ....connector.device.base import CopyDevice, Event, Stream
from ....connector.device.device_choice import make_device
from ....tiers.block import BlockLayout
from ....tiers.slab.cpu_slab import CpuSlab
from ...harness.report import median
from ..section import Place, Results, Row, Section, Target, WrongResult
from .methods import BLOCKS, DIRECTIONS, ONE_WAY, SEED, Direction

NAME = "copy device"
LAYOUT = BlockLayout(32, 16, 8, 128, "bfloat16")  # 2 MiB
REHEARSAL_LAYOUT = BlockLayout(2, 16, 1, 32, "bfloat16")
JOBS = 8  # jobs per direction, which are queued at the same time
WAIT_SECONDS = 60.0
TARGETS = (
    Target("device_to_host_over_pinned", "the copy device's stores, of the ceiling", least=0.95),
    Target("device_to_device_over_pinned", "the copy device's loads, of the ceiling", least=0.95),
    Target("device_both_over_pinned", "the copy device both ways, of that ceiling", least=0.95),
    Target(
        "device_submit_64_blocks_microseconds",
        "CPU time the caller pays for 64 blocks",
        most=10.0,
        unit=" µs",
    ),
)


class Field:
    """A copy device with pool and slab; half of the blocks and slots are for each direction."""

    def __init__(self, device: CopyDevice, slab: CpuSlab, pool: torch.Tensor) -> None:
        self.device = device
        self.slab = slab
        self.pages = pool.view(torch.uint8).reshape(len(pool), -1)
        generator = random.Random(SEED)
        blocks, slots = list(range(len(pool))), list(range(slab.num_slots))
        generator.shuffle(blocks)
        generator.shuffle(slots)
        cuts = range(0, len(blocks), BLOCKS)
        jobs = [(blocks[at : at + BLOCKS], slots[at : at + BLOCKS]) for at in cuts]
        self.jobs = {Stream.STORE: jobs[: len(jobs) // 2], Stream.LOAD: jobs[len(jobs) // 2 :]}

    def queue(self, direction: Direction) -> tuple[list[Event], list[float]]:
        """Queue all jobs of a direction; return the jobs' events, and each call's CPU seconds."""
        streams = {"to_host": [Stream.STORE], "to_device": [Stream.LOAD]}.get(direction)
        events, seconds = [], []
        for number in range(len(self.jobs[Stream.STORE])):
            for stream in streams or list(Stream):
                began = time.thread_time()
                events.append(self.device.copy(stream, *self.jobs[stream][number]))
                seconds.append(time.thread_time() - began)
        return events, seconds

    def check(self) -> None:
        """Compare source and target of every copy. Raises WrongResult."""
        memory = torch.frombuffer(self.slab.memory(), dtype=torch.uint8)
        rows = memory.view(self.slab.num_slots, -1)
        for stream, jobs in self.jobs.items():
            for block_ids, slots in jobs:
                if not torch.equal(self.pages[block_ids].cpu(), rows[slots]):
                    raise WrongResult(f"a {stream.value} of {BLOCKS} blocks left other bytes")


def run(place: Place, results: Results) -> None:
    """Add a row for each direction."""
    rounds = place.choose(7, 3, 1)
    with _field(place) as field:
        for direction in ONE_WAY:
            _finish(field.queue(direction)[0])
        field.check()
        for direction in DIRECTIONS:
            place.check_time()
            results.add_row(NAME, measure(field, results, direction, rounds))
    set_ratios(results)


def measure(field: Field, results: Results, direction: Direction, rounds: int) -> Row:
    """Time rounds from the first call to the end of the last copy; return a row of medians."""
    taken, submitted, num_bytes = [], [], 0
    for _ in range(rounds):
        began = time.perf_counter()
        events, seconds = field.queue(direction)
        _finish(events)
        taken.append(time.perf_counter() - began)
        submitted += seconds
        num_bytes = len(events) * BLOCKS * field.pages.shape[1]
    rate = num_bytes / median(taken) / 1e9
    return {
        "case": direction,
        "gb_per_second": rate,
        "over_pinned": results.ratio_to_ceiling(rate, f"pinned_{direction}_gb_per_second"),
        "submit_microseconds": median(submitted) * 1e6,
    }


def set_ratios(results: Results) -> None:
    """Set the ratios to the measured limits, which have targets, and the other ratios."""
    rows = {row["case"]: row for row in results.rows(NAME)}
    for direction in DIRECTIONS:
        ratio = rows[direction]["over_pinned"]
        if ratio is not None:
            results.set_ratio(f"device_{direction}_over_pinned", ratio)
    one_way = max(rows[direction]["gb_per_second"] for direction in ONE_WAY)
    results.set_ratio("device_both_ways_over_one_way", rows["both"]["gb_per_second"] / one_way)
    submit = max(rows[direction]["submit_microseconds"] for direction in ONE_WAY)
    results.set_ratio("device_submit_64_blocks_microseconds", submit)


@contextlib.contextmanager
def _field(place: Place) -> Iterator[Field]:
    layout = REHEARSAL_LAYOUT if place.is_rehearsal else LAYOUT
    num_blocks = 2 * BLOCKS * place.choose(JOBS, JOBS // 2, 1)
    device = make_device("cpu" if place.is_rehearsal else str(place.device))
    slab = CpuSlab(layout, num_blocks * layout.slot_bytes)
    try:
        shape = (num_blocks, layout.page_bytes // 2)
        bits = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=place.device)
        pool = bits.view(torch.bfloat16)
        words = torch.frombuffer(slab.memory(), dtype=torch.int64)
        torch.arange(len(words), out=words)
        del words  # the slab could not be unmapped while a view exists
        device.register_slab(slab)
        device.register_pool(pool)
        place.synchronise()
        if not device.wait_locked(WAIT_SECONDS):
            raise WrongResult(f"the slab is not page-locked after {WAIT_SECONDS} s")
        yield Field(device, slab, pool)
    finally:
        if device.close(WAIT_SECONDS):
            slab.close()


def _finish(events: list[Event]) -> None:
    for event in events:
        if not event.wait(WAIT_SECONDS) or event.error() is not None:
            raise WrongResult(f"a copy of {BLOCKS} blocks did not end well: {event.error()}")


SECTION = Section(NAME, "Blocks by the copy device", run, None, TARGETS)
