# SPDX-License-Identifier: Apache-2.0
"""The sections of `stratakv bench gpu`: their parts, device, deadlines and timing.

A rehearsal runs every section on the CPU with the plain kernels, at sizes of a few kilobytes. It
shows that the benchmark works and says nothing about a GPU. The JSON is written after every case,
so a run that is cut off keeps its results.

Work is captured in a CUDA graph, replayed, and timed by events. As in a serving engine, a graph
leaves out Python and launch overhead. A caller gives a callable for each set of buffers. Together
the sets are larger than the level-2 cache, so that a launch finds its data in memory. A rehearsal
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
    """A launch to be timed gave a wrong result; the message says which and by how much."""


class SectionOver(Exception):
    """A section's time is over; what it has measured so far is kept."""


@dataclass(slots=True)
class Place:
    """The device, the form of the run, and two deadlines: the run's, and the section's, which
    `start_section` sets."""

    device: torch.device
    is_quick: bool
    is_rehearsal: bool
    peers: Path | None = None
    _deadline: float = field(default=float("inf"))
    run_ends: float = float("inf")

    def choose(self, full: Choice, quick: Choice, rehearsal: Choice) -> Choice:
        """The size or the list of cases for this form of the run."""
        if self.is_rehearsal:
            return rehearsal
        return quick if self.is_quick else full

    def start_section(self, seconds: float = SECTION_SECONDS) -> None:
        """Set the deadline of a section, before it runs."""
        self._deadline = min(time.monotonic() + seconds, self.run_ends)

    def check_time(self) -> None:
        """Raises SectionOver after the deadline. Sections call this before every case."""
        if time.monotonic() > self._deadline:
            raise SectionOver

    @property
    def kernel(self) -> str:
        """The kernel's name for calls: the kernel under test on a device, the plain one in a
        rehearsal."""
        return "plain" if self.is_rehearsal else "triton"

    def synchronise(self) -> None:
        """Wait for all work on the device; in a rehearsal there is none."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Give memory that torch keeps for freed tensors back to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_close(
    what: str, got: torch.Tensor, expected: torch.Tensor, *, absolute: float, relative: float = 0.0
) -> None:
    """Compare in float32; NaN counts as a difference. Raises WrongResult."""
    if got.shape != expected.shape:
        raise WrongResult(f"{what}: expected {list(expected.shape)}, got {list(got.shape)}")
    wide, right = got.float(), expected.to(got.device).float()
    off = (wide - right).abs() - relative * right.abs()
    worst = off.max().item() if off.numel() else 0.0
    if not worst <= absolute:
        raise WrongResult(f"{what}: {worst:.3g} beyond what is allowed, which is {absolute:.3g}")


Launch = Callable[[], object]
WARM_UPS = 2
MIN_SECONDS = 0.02  # shortest timed replay, because events have a resolution of half a microsecond


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one launch over several timed rounds."""

    median: float
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(median(seconds), percentile(seconds, 10), percentile(seconds, 90), len(seconds))

    def figures(self) -> dict[str, float]:
        """The entries of a row: the median and the 10th and 90th percentile, in seconds."""
        return {"seconds": self.median, "seconds_p10": self.p10, "seconds_p90": self.p90}


def time_launches(
    place: Place, launches: Sequence[Launch], *, rounds: int = 7, in_graph: bool = True
) -> Timing:
    """Seconds of one launch. All `launches` run in turn, so that none finds its data in a cache.
    With `in_graph` false the launches are called directly, for work that a graph cannot hold. Then
    the host's time to submit them counts too, unless the device stays busy long enough."""

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
    """An event with timing, recorded at this point of the current stream."""
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
Row = dict[str, Any]  # a measured case: "case" is its name, the other entries are plain values


@dataclass(frozen=True, slots=True)
class Target(Gate):
    """A limit for one ratio or figure: its name in `ratios`, and its description."""

    name: str
    what: str


class Results:
    """The results of a run, to which the sections add rows, notes and ratios."""

    def __init__(self, report: Report, directory: Path) -> None:
        self.report = report
        self._directory = directory

    @property
    def ceilings(self) -> Mapping[str, float]:
        """The device's limits by name (`device_copy_gb_per_second`, …)."""
        return self.report.limits

    def set_ceiling(self, name: str, value: float) -> None:
        """Set a limit of the device. Only the section `ceilings` does so."""
        self.report.limits[name] = value

    def add_row(self, section: str, row: Row) -> None:
        """Add a measured case to a section and write the report. Raises OSError."""
        self.report.figures.setdefault(section, {"rows": []})["rows"].append(row)
        self.write()

    def add_note(self, section: str, note: str) -> None:
        """Add a remark to a section, such as a case left out or a peer not found."""
        self.report.figures.setdefault(section, {"rows": []}).setdefault("notes", []).append(note)

    def rows(self, section: str) -> list[Row]:
        """The measured rows of a section, in order; empty if it has none."""
        found: list[Row] = self.report.figures.get(section, {}).get("rows", [])
        return found

    def set_ratio(self, name: str, value: float) -> None:
        """Set a figure for comparison with a target or with another run."""
        self.report.ratios[name] = value

    def ratio_to_ceiling(self, value: float, ceiling: str) -> float | None:
        """The value divided by a limit; None if the limit was not measured."""
        limit = self.report.limits.get(ceiling)
        return value / limit if limit else None

    def write(self) -> Path:
        """Write the results so far; return the path. Raises OSError."""
        return self.report.write(self._directory)


# Draws a section's rows and the device's limits; None if there is nothing to draw.
Draw = Callable[[Sequence[Row], Mapping[str, float]], Any]


@dataclass(frozen=True, slots=True)
class Section:
    """A section. `run` checks each case against its reference before timing it, and adds rows and
    ratios."""

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
    """Measure each case in turn. Too little memory or another error becomes a note; errors raise
    RuntimeError after all cases. A wrong result ends the section. Raises SectionOver, WrongResult.
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
    """Type and message of an error on one line, MAX_REASON characters of it at most."""
    words = " ".join(str(error).split())[:MAX_REASON]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
