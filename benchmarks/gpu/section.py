# SPDX-License-Identifier: Apache-2.0
"""Definitions for the sections of `stratakv bench gpu`: device, deadlines, timing and results.

A rehearsal, which tests the benchmark without a GPU, runs every section on the CPU with the plain
kernels, at sizes of a few kilobytes. The JSON is written after every case, so the results of an
interrupted run are kept.

Work is captured in a CUDA graph, replayed, and timed by events. As in a serving engine, a graph
excludes Python and launch overhead. A caller passes a callable for each set of buffers. Together
the sets are larger than the level-2 cache, so that a launch reads its data from memory. A rehearsal
uses the CPU's clock instead of events."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..harness.gate import Gate
from ..harness.plots import save_figure
from ..harness.report import Report, median, percentile

SECTION_SECONDS = 90.0
Choice = TypeVar("Choice")


class WrongResult(Exception):
    """A launch to be timed gave a wrong result; the message names the launch and the difference."""


class SectionOver(Exception):
    """A section has reached its deadline; its results so far are kept."""


@dataclass(slots=True)
class Place:
    """The device, the form of the run, the run's deadline, and the section's deadline, which
    `start_section` sets."""

    device: torch.device
    is_quick: bool
    is_rehearsal: bool
    peers: Path | None = None
    _deadline: float = field(default=float("inf"))
    run_ends: float = float("inf")

    def choose(self, full: Choice, quick: Choice, rehearsal: Choice) -> Choice:
        """Return the value for the form of the run."""
        if self.is_rehearsal:
            return rehearsal
        return quick if self.is_quick else full

    def start_section(self, seconds: float = SECTION_SECONDS) -> None:
        """Set the deadline of a section, before it runs."""
        self._deadline = min(time.monotonic() + seconds, self.run_ends)

    def check_time(self) -> None:
        """Raise SectionOver after the deadline. Sections call `check_time` before every case."""
        if time.monotonic() > self._deadline:
            raise SectionOver

    @property
    def kernel(self) -> str:
        """The value for arguments `kernel`: Triton's on a GPU, plain in a rehearsal."""
        return "plain" if self.is_rehearsal else "triton"

    def synchronise(self) -> None:
        """Wait for all work on the GPU; a rehearsal has no such work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Free the GPU memory that torch caches for new tensors."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_close(
    what: str, got: torch.Tensor, expected: torch.Tensor, *, absolute: float, relative: float = 0.0
) -> None:
    """Raise WrongResult if `got` and `expected` differ in float32; NaN is a difference."""
    if got.shape != expected.shape:
        raise WrongResult(f"{what}: expected {list(expected.shape)}, got {list(got.shape)}")
    wide, right = got.float(), expected.to(got.device).float()
    off = (wide - right).abs() - relative * right.abs()
    worst = off.max().item() if off.numel() else 0.0
    if not worst <= absolute:
        raise WrongResult(f"{what}: {worst:.3g} beyond what is allowed, which is {absolute:.3g}")


Launch = Callable[[], object]
WARM_UPS = 2
MIN_SECONDS = 0.02  # least time of a replay, because the resolution of events is half a microsecond


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one launch, as statistics over several timed rounds."""

    median: float
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(median(seconds), percentile(seconds, 10), percentile(seconds, 90), len(seconds))

    def figures(self) -> dict[str, float]:
        """Return the entries of a row: the median and the 10th and 90th percentile, in seconds."""
        return {"seconds": self.median, "seconds_p10": self.p10, "seconds_p90": self.p90}


def time_launches(
    place: Place, launches: Sequence[Launch], *, rounds: int = 7, in_graph: bool = True
) -> Timing:
    """Return the seconds of one launch. All `launches` run in turn, so that no launch finds its
    data in a cache. If `in_graph` is false, for work that a graph cannot contain, the launches are
    called directly. The seconds then include the host's time to submit the launches, unless the GPU
    is busy for longer."""

    def launch_all() -> None:
        for launch in launches:
            launch()

    for _ in range(WARM_UPS):
        launch_all()
    place.synchronise()
    replay: Launch = launch_all
    repeats = 1
    if place.device.type == "cuda":
        replay = _capture(launch_all) if in_graph else launch_all
        once = _elapsed(place, replay, 1)
        repeats = max(1, min(1000, round(MIN_SECONDS / max(once, 1e-7))))
    count = repeats * len(launches)
    return Timing.of([_elapsed(place, replay, repeats) / count for _ in range(rounds)])


def record_event() -> torch.cuda.Event:
    """Return an event with timing, recorded at the present end of the current stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _capture(launch: Launch) -> Launch:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def _elapsed(place: Place, replay: Launch, repeats: int) -> float:
    if place.device.type != "cuda":
        began = time.perf_counter()
        replay()
        return time.perf_counter() - began
    place.synchronise()
    begin = record_event()
    for _ in range(repeats):
        replay()
    end = record_event()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


MAX_REASON = 300  # characters of an error message in a note
Row = dict[str, Any]  # a measured case: "case" is its name, all other entries are plain values


@dataclass(frozen=True, slots=True)
class Target(Gate):
    """A limit for a ratio or figure, with the name in `ratios` and a description."""

    name: str
    what: str


class Results:
    """The results of a run, to which the sections add rows, notes and ratios."""

    def __init__(self, report: Report, directory: Path) -> None:
        self.report = report
        self._directory = directory

    @property
    def ceilings(self) -> Mapping[str, float]:
        """The GPU's limits by name (`device_copy_gb_per_second`, …)."""
        return self.report.limits

    def set_ceiling(self, name: str, value: float) -> None:
        """Set a limit of the GPU. Only the section `ceilings` sets limits."""
        self.report.limits[name] = value

    def add_row(self, section: str, row: Row) -> None:
        """Add a measured case to a section and write the report. Raises OSError."""
        self.report.figures.setdefault(section, {"rows": []})["rows"].append(row)
        self.write()

    def add_note(self, section: str, note: str) -> None:
        """Add a remark to a section, such as a case left out or a peer not found."""
        self.report.figures.setdefault(section, {"rows": []}).setdefault("notes", []).append(note)

    def rows(self, section: str) -> list[Row]:
        """Return the measured rows of a section, in order; empty if there are none."""
        found: list[Row] = self.report.figures.get(section, {}).get("rows", [])
        return found

    def set_ratio(self, name: str, value: float) -> None:
        """Set a figure for comparison with a target or with another run."""
        self.report.ratios[name] = value

    def ratio_to_ceiling(self, value: float, ceiling: str) -> float | None:
        """Return the value divided by a limit; None if the limit was not measured."""
        limit = self.report.limits.get(ceiling)
        return value / limit if limit else None

    def write(self) -> Path:
        """Write the results so far; return the path. Raises OSError."""
        return self.report.write(self._directory)


# A function that draws a section's rows and the GPU's limits; the result is None without data.
Draw = Callable[[Sequence[Row], Mapping[str, float]], Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A section of the benchmark. `run` compares each case with a reference, times the case, and
    adds rows and ratios."""

    name: str
    title: str
    run: Callable[[Place, Results], None]
    draw: Draw | None = None
    targets: tuple[Target, ...] = ()

    def plot(self, results: Results, directory: Path) -> Path | None:
        """Draw `gpu-NAME.png`; return None if nothing was measured."""
        rows = results.rows(self.name)
        figure = self.draw(rows, results.ceilings) if self.draw is not None and rows else None
        if figure is None:
            return None
        return save_figure(figure, results.report.environment, directory / f"gpu-{self.name}.png")


def run_cases(
    place: Place,
    results: Results,
    section: str,
    cases: Sequence[Any],
    measure: Callable[[Any], None],
) -> None:
    """Measure each case in turn. Each failure of a case, such as too little memory, is added as a
    note; failures other than too little memory raise RuntimeError after all cases. A wrong result
    ends the section. Raises SectionOver, WrongResult.
    """
    failed = []
    for case in cases:
        place.check_time()
        try:
            measure(case)
        except (SectionOver, WrongResult):
            raise
        except torch.OutOfMemoryError:
            results.add_note(section, f"{case.name}: left out, the device has too little memory")
        except Exception as error:  # noqa: BLE001 - Triton's errors have no other base in common
            results.add_note(section, f"{case.name}: failed: {one_line(error)}")
            failed.append(case.name)
        place.release_memory()
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(cases)} cases failed: {', '.join(failed)}")


def one_line(error: BaseException) -> str:
    """Return the type and message of an error on one line, at most MAX_REASON characters."""
    words = " ".join(str(error).split())[:MAX_REASON]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
