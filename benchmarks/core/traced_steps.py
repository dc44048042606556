# SPDX-License-Identifier: Apache-2.0
"""The cost of a step trace for steps of 256 decodes, with and without the trace in turns.

    round     without   with ──── until all is written    without

A round's ratio is the time of the turn with the trace over the mean of the two turns without it, so
a machine that slows down does not change the ratio. The ratio of the two turns without the trace
shows the noise, below which differences are meaningless. The two figures are the processor seconds
of the whole process, whose writer thread makes and writes the records, and of the thread of the
steps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ...connector.base import NullConnector
from ...engine.config.engine_config import SchedulerConfig
from ...engine.observer import GuardedObservers
from ...engine.trace.step_trace import StepTrace
from ..harness.comparison import quartiles
from ..harness.gate import Gate
from ..harness.report import Report, median, print_table
from .cases import Decodes, WrongWork

LEAST_ROUNDS = 9
TURNS = 3  # turns of a round
WRITTEN_SECONDS = 60.0  # limit for writing the records in the queue
TRACED, TRACED_THREAD, FLOOR = (
    "steps_traced_over_untraced", "steps_traced_over_untraced_thread", "steps_untraced_twice",
)  # fmt: skip
TRACE_GATE = Gate(most=1.02)


class Spent(NamedTuple):
    """Processor seconds of a turn."""

    process: float
    thread: float  # of the thread that runs the steps


@dataclass(frozen=True, slots=True)
class TraceRound:
    """The three turns of a round."""

    before: Spent
    traced: Spent
    after: Spent


class TracedSteps:
    """Decodes of at most `max_steps` steps, which a step trace records in some turns."""

    def __init__(self, trace: StepTrace, max_steps: int) -> None:
        self._trace = trace
        self._heard = GuardedObservers([trace])
        self._decodes = Decodes(0, max_steps)

    def take_round(self, count: int) -> TraceRound:
        """Run three turns of `count` steps. Raises WrongWork if the trace is not written in
        time."""
        return TraceRound(
            self._turn(count, None), self._turn(count, self._heard), self._turn(count, None)
        )

    def _turn(self, count: int, heard: GuardedObservers | None) -> Spent:
        # All turns use one scheduler, because the times of two schedulers differ by up to 5 %.
        self._decodes.scheduler._observer = heard
        process, thread = time.process_time(), time.thread_time()
        for _ in range(count):
            self._decodes.step()
        thread = time.thread_time() - thread
        if heard is not None and not self._trace.wait_until_written(WRITTEN_SECONDS):
            raise WrongWork(f"the step trace was not written within {WRITTEN_SECONDS:.0f} s")
        return Spent(time.process_time() - process, thread)


@contextmanager
def traced_steps(max_steps: int) -> Iterator[TracedSteps]:
    """Yield decodes with a step trace that is written to a temporary file."""
    with TemporaryDirectory(prefix="stratakv-bench-") as folder:
        trace = StepTrace(Path(folder) / "trace.jsonl", SchedulerConfig(), NullConnector())
        try:
            yield TracedSteps(trace, max_steps)
        finally:
            trace.close()


def take_trace_rounds(steps: TracedSteps, rounds: int, count: int) -> list[TraceRound]:
    """Measure `rounds` rounds, with `count` steps per turn, after one uncounted round."""
    steps.take_round(count)
    return [steps.take_round(count) for _ in range(rounds)]


def add_trace_ratios(report: Report, rounds: Sequence[TraceRound]) -> None:
    """Add the medians and quartiles of the ratios within a round."""
    found = {
        TRACED: [2 * r.traced.process / (r.before.process + r.after.process) for r in rounds],
        TRACED_THREAD: [2 * r.traced.thread / (r.before.thread + r.after.thread) for r in rounds],
        FLOOR: [r.after.process / r.before.process for r in rounds],
    }
    report.ratios |= {name: median(ratios) for name, ratios in found.items()}
    report.figures["trace"] = {
        "rounds": len(rounds),
        "quartiles": {name: quartiles(ratios) for name, ratios in found.items()},
    }


def print_trace(report: Report) -> None:
    """Print the ratios of the trace, and the gate of the process's ratio."""
    rows = []
    for name, (low, high) in report.figures["trace"]["quartiles"].items():
        ratio = report.ratios[name]
        verdict = f"{TRACE_GATE.wanted} {TRACE_GATE.verdict(ratio)}" if name == TRACED else ""
        rows.append([name.replace("_", " "), f"{ratio:.3f}", f"{low:.3f}..{high:.3f}", verdict])
    print_table("A step trace, processor seconds", ["what", "ratio", "quartiles", "gate"], rows)
