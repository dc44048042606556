# SPDX-License-Identifier: Apache-2.0
"""Where the sections of `stratakv bench gpu` run, and how long work takes there.

A rehearsal runs every section on the CPU with the plain kernels, at sizes of a few kilobytes: it
shows that the benchmark works and says nothing of any GPU.

Work is captured in a CUDA graph, replayed, and timed by events. A graph leaves Python and launch
overhead out, as a serving engine does. A caller gives one callable for each set of buffers, and
together the sets are larger than the level-2 cache, so that a launch finds its data in memory. In a
rehearsal the clock of the CPU takes the events' place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from ..harness.report import median, percentile

SECTION_SECONDS = 90.0
Choice = TypeVar("Choice")


class WrongResult(Exception):
    """Something that was to be timed gave a wrong answer; says which and how far off."""


class SectionOver(Exception):
    """A section's time is spent; what it has measured until here stands."""


@dataclass(slots=True)
class Place:
    """The device, the sizes, and one section's deadline, which `start_section` sets anew."""

    device: torch.device
    is_quick: bool
    is_rehearsal: bool
    peers: Path | None = None
    _deadline: float = field(default=float("inf"))

    def choose(self, full: Choice, quick: Choice, rehearsal: Choice) -> Choice:
        """The size, or the list of cases, for this run."""
        if self.is_rehearsal:
            return rehearsal
        return quick if self.is_quick else full

    def start_section(self, seconds: float = SECTION_SECONDS) -> None:
        """Called before every section."""
        self._deadline = time.monotonic() + seconds

    def check_time(self) -> None:
        """Called by sections before every case. Raises SectionOver."""
        if time.monotonic() > self._deadline:
            raise SectionOver

    @property
    def kernel(self) -> str:
        """The kernel to name in calls: under test on a device, the plain one in a rehearsal."""
        return "plain" if self.is_rehearsal else "triton"

    def synchronise(self) -> None:
        """Wait for everything given to the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def release_memory(self) -> None:
        """Give back what the last section's tensors held."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def check_close(
    what: str, got: torch.Tensor, expected: torch.Tensor, *, absolute: float, relative: float = 0.0
) -> None:
    """Compare in float32, NaN as a difference. Raises WrongResult."""
    if got.shape != expected.shape:
        raise WrongResult(f"{what}: expected {list(expected.shape)}, got {list(got.shape)}")
    wide, right = got.float(), expected.to(got.device).float()
    off = (wide - right).abs() - relative * right.abs()
    worst = off.max().item() if off.numel() else 0.0
    if not worst <= absolute:
        raise WrongResult(f"{what}: {worst:.3g} beyond what is allowed, which is {absolute:.3g}")


Launch = Callable[[], object]
WARM_UPS = 2
MIN_SECONDS = 0.02  # of one timed replay: events have a resolution of half a microsecond


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one launch, over several timed rounds."""

    median: float
    p10: float
    p90: float
    rounds: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        return cls(median(seconds), percentile(seconds, 10), percentile(seconds, 90), len(seconds))

    def figures(self) -> dict[str, float]:
        """The entries of a row."""
        return {"seconds": self.median, "seconds_p10": self.p10, "seconds_p90": self.p90}


def time_launches(
    place: Place, launches: Sequence[Launch], *, rounds: int = 7, in_graph: bool = True
) -> Timing:
    """Seconds of one launch. All `launches` run in turn, so that each finds its data cold.

    `in_graph` false times them as they are called, for work a graph cannot hold; what the host
    takes to submit them is then part of it, unless the device is kept busy long enough.
    """

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
    """A point of the current stream, with its time."""
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
