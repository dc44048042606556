# SPDX-License-Identifier: Apache-2.0
"""The section that times decode steps during copies of blocks in both directions, by copy method.

Steps run in a stream of high priority and copies in streams of low priority. Windows of steps
without copies and of steps during copies alternate, so that a changing clock affects both kinds of
windows. Each step is timed separately, because a mean would hide the steps that wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from ....kernels.kernel_choice import PLAIN, KernelRefused
from ...harness.report import percentile
from ..attention.cases import decode_case, make_batch
from ..plots import draw_interference
from ..section import (
    WARM_UPS,
    Launch,
    Place,
    Results,
    Row,
    Section,
    SectionOver,
    Target,
    check_close,
    record_event,
)
from .methods import (
    ALL,
    BATCHED,
    BLOCKS,
    FEW,
    Field,
    Method,
    check_jobs,
    new_stream,
    on,
    page_locked,
    prepare_checked,
)

NAME = "interference"
METHODS = (BATCHED, FEW, ALL)
HIGH_PRIORITY = -1
STEPS_AHEAD = 4  # steps queued on the GPU, so that the GPU never waits for the host
JOBS_AHEAD = 2  # copy jobs queued in each direction
FIRST_STEPS = 5  # uncounted steps at the start of a window, during which the copies begin
# The least rate of a method that counts for the target, as a share of the fastest method's rate:
# slower copies would disturb a step less.
RATE_OF_FASTEST = 0.8
TARGETS = (
    Target(
        "decode_p99_while_streaming", "p99 of a decode step beside copies, over alone", most=1.05
    ),
)


class DecodeStep:
    """The attention of a decode step, repeated over layers that together far exceed the level-2
    cache: on a GPU, four layers of 268 MB."""

    def __init__(self, place: Place) -> None:
        requests, tokens = place.choose((32, 2048), (32, 2048), (2, 16))
        layers, self._passes = place.choose((4, 4), (4, 4), (2, 1))
        self._kernel = place.kernel
        self._batch = make_batch(place, decode_case("a step", requests, tokens), layers)
        self.outs, self._expected = (
            [torch.zeros_like(self._batch.q) for _ in range(layers)] for _ in range(2)
        )
        for layer, out in enumerate(self._expected):
            self._batch.run(PLAIN, layer, out=out)

    @property
    def kv_bytes(self) -> int:
        return sum(kv.nbytes for kv in self._batch.layers)

    def run(self) -> None:
        """Launch the attention of all layers, as many times as a step has passes."""
        for _ in range(self._passes):
            for layer, out in enumerate(self.outs):
                self._batch.run(self._kernel, layer, out=out)

    def check(self, what: str) -> None:
        """Compare the output of the last run with that of the plain kernel. Raises WrongResult."""
        for number, (out, expected) in enumerate(zip(self.outs, self._expected, strict=True)):
            check_close(f"{what}, layer {number}", out, expected, absolute=2e-3, relative=2e-2)

    def prepare(self, place: Place, stream: torch.cuda.Stream | None) -> Launch:
        """Return a launch of the step, whose output has been checked. On a GPU, the launch is a
        CUDA graph, captured in `stream` and with the priority of `stream`."""
        with on(stream):
            for _ in range(WARM_UPS):
                self.run()
        place.synchronise()
        self.check("decode")
        if stream is None:
            return self.run
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        return graph.replay


class Pump:
    """A queue that always has a few copy jobs of one direction, and counts the copied bytes."""

    def __init__(
        self, stream: torch.cuda.Stream | None, launches: Sequence[Launch], job_bytes: int
    ) -> None:
        self._stream = stream
        self._launches = launches
        self._job_bytes = job_bytes
        self._begin: torch.cuda.Event | None = None
        self._ends: list[torch.cuda.Event] = []
        self._finished = 0
        self.moved_bytes = 0
        self.seconds = 0.0

    def start(self) -> None:
        """Begin a window of time."""
        self._ends, self._finished = [], 0
        if self._stream is not None:
            with on(self._stream):
                self._begin = record_event()

    def top_up(self) -> None:
        """Queue jobs until JOBS_AHEAD jobs are unfinished. A rehearsal copies one job."""
        if self._stream is None:
            begin = time.perf_counter()
            self._launches[0]()
            self.seconds += time.perf_counter() - begin
            self.moved_bytes += self._job_bytes
            return
        self._count_finished()
        while len(self._ends) - self._finished < JOBS_AHEAD:
            with on(self._stream):
                self._launches[len(self._ends) % len(self._launches)]()
                self._ends.append(record_event())

    def stop(self) -> None:
        """End the window; add the bytes of finished jobs, and the time to the last job's end."""
        self._count_finished()
        if self._begin is not None and self._finished:
            self.moved_bytes += self._finished * self._job_bytes
            self.seconds += self._begin.elapsed_time(self._ends[self._finished - 1]) / 1e3

    @property
    def gb_per_second(self) -> float:
        """The GB/s over all windows; 0 before the first job has finished."""
        return self.moved_bytes / self.seconds / 1e9 if self.seconds else 0.0

    def _count_finished(self) -> None:
        for end in self._ends[self._finished :]:
            if not end.query():  # type: ignore[no-untyped-call]
                break
            self._finished += 1


def run(place: Place, results: Results) -> None:
    """Add a row for each method."""
    half_bytes, block_bytes = place.choose(
        (256 << 20, 2 << 20), (256 << 20, 2 << 20), (2 * BLOCKS * 256, 256)
    )
    stream = None if place.is_rehearsal else new_stream(HIGH_PRIORITY)
    step = DecodeStep(place)
    launch = step.prepare(place, stream)
    with page_locked(place, 2 * half_bytes, lambda note: results.add_note(NAME, note)) as slab:
        field = Field.make(place, slab)
        try:
            for method in METHODS:
                place.check_time()
                try:
                    row = measure(place, field, method, block_bytes, stream, launch)
                except (torch.OutOfMemoryError, KernelRefused) as error:
                    results.add_note(NAME, f"{method.name}: left out: {error}")
                    continue
                step.check(f"decode beside copies, {method.name}")
                results.add_row(NAME, row | {"kv_bytes": step.kv_bytes})
        except SectionOver:
            set_ratio(results)
            raise
    set_ratio(results)


def measure(
    place: Place,
    field: Field,
    method: Method,
    block_bytes: int,
    stream: torch.cuda.Stream | None,
    launch: Launch,
) -> Row:
    """Time steps without and during copies, in turn. Raises WrongResult for wrong copies."""
    windows, steps = place.choose((6, 60), (5, 60), (2, 4))
    jobs, launches = prepare_checked(place, field, method, block_bytes, method.name)
    pumps = [
        Pump(lane, of_lane, of_jobs[0].num_bytes)
        for lane, of_lane, of_jobs in zip(field.lanes, launches, jobs, strict=True)
    ]
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(windows):
        alone += time_steps(place, stream, launch, steps)
        beside += time_steps(place, stream, launch, steps, pumps)
    for of_lane in jobs:
        check_jobs(f"{method.name} beside decode", of_lane)
    return _row(method, alone, beside, pumps) | {"block_bytes": block_bytes}


def time_steps(
    place: Place,
    stream: torch.cuda.Stream | None,
    launch: Launch,
    steps: int,
    pumps: Sequence[Pump] = (),
) -> list[float]:
    """Return the seconds of `steps` steps during the copies of `pumps`, when all work has ended."""
    for pump in pumps:
        pump.start()
    time_them = _time_on_cpu if stream is None else _time_on_device
    taken = time_them(stream, launch, FIRST_STEPS + steps, pumps)
    for pump in pumps:
        pump.stop()
    place.synchronise()
    return taken[FIRST_STEPS:]


def _time_on_device(
    stream: torch.cuda.Stream | None, launch: Launch, steps: int, pumps: Sequence[Pump]
) -> list[float]:
    begins: list[torch.cuda.Event] = []
    ends: list[torch.cuda.Event] = []
    for number in range(steps):
        if number >= STEPS_AHEAD:
            ends[number - STEPS_AHEAD].synchronize()
        for pump in pumps:
            pump.top_up()
        with on(stream):
            begins.append(record_event())
            launch()
            ends.append(record_event())
    ends[-1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in zip(begins, ends, strict=True)]


def _time_on_cpu(
    stream: torch.cuda.Stream | None, launch: Launch, steps: int, pumps: Sequence[Pump]
) -> list[float]:
    taken = []
    for _ in range(steps):
        for pump in pumps:
            pump.top_up()
        begin = time.perf_counter()
        launch()
        taken.append(time.perf_counter() - begin)
    return taken


def _row(
    method: Method, alone: Sequence[float], beside: Sequence[float], pumps: Sequence[Pump]
) -> Row:
    row: Row = {"case": method.name, "steps": len(beside)}
    for name, percent in (("p50", 50), ("p99", 99)):
        apart, together = percentile(alone, percent), percentile(beside, percent)
        row[f"{name}_alone_seconds"], row[f"{name}_beside_seconds"] = apart, together
        row[f"{name}_over_alone"] = together / apart
    to_host, to_device = (pump.gb_per_second for pump in pumps)
    row["to_host_gb_per_second"], row["to_device_gb_per_second"] = to_host, to_device
    row["copies_gb_per_second"] = to_host + to_device
    return row


def set_ratio(results: Results) -> None:
    """Set the target's figure: the lowest p99 ratio of methods with RATE_OF_FASTEST of the best
    rate."""
    rows = results.rows(NAME)
    fastest = max((row["copies_gb_per_second"] for row in rows), default=0.0)
    ratios = [
        row["p99_over_alone"]
        for row in rows
        if row["copies_gb_per_second"] >= RATE_OF_FASTEST * fastest
    ]
    if ratios:
        results.set_ratio("decode_p99_while_streaming", min(ratios))


SECTION = Section(NAME, "Decode while blocks stream", run, draw_interference, TARGETS)
