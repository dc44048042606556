# SPDX-License-Identifier: Apache-2.0
"""How long work takes on the device: captured in a CUDA graph, replayed, timed by events.

A graph leaves Python and launch overhead out, as a serving engine does. A caller gives one callable
for each set of buffers, and together the sets are larger than the level-2 cache, so that a launch
finds its data in memory. In a rehearsal the clock of the CPU takes the events' place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..harness.report import median, percentile
from .place import Place

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
