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
    for _ in range(WARM_UPS):
        for launch in launches:
            launch()
    place.synchronise()
    if place.device.type != "cuda":
        return _time_on_cpu(launches, rounds)
    replay = _capture(launches) if in_graph else _loop(launches)
    return _time_on_device(place, replay, len(launches), rounds)


def _capture(launches: Sequence[Launch]) -> Launch:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph.replay


def _loop(launches: Sequence[Launch]) -> Launch:
    def run() -> None:
        for launch in launches:
            launch()

    return run


def _time_on_device(place: Place, replay: Launch, count: int, rounds: int) -> Timing:
    once = _elapsed(place, replay, 1)
    repeats = max(1, min(1000, round(MIN_SECONDS / max(once, 1e-7))))
    taken = [_elapsed(place, replay, repeats) / (repeats * count) for _ in range(rounds)]
    return Timing.of(taken)


def _elapsed(place: Place, replay: Launch, repeats: int) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    place.synchronise()
    begin.record()
    for _ in range(repeats):
        replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _time_on_cpu(launches: Sequence[Launch], rounds: int) -> Timing:
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        for launch in launches:
            launch()
        taken.append((time.perf_counter() - begin) / len(launches))
    return Timing.of(taken)
