# SPDX-License-Identifier: Apache-2.0
"""The cells of the tables: one replay each, in this process or in workers.

A cell is a few plain values, so that it can go to another process, where the traces are read or
generated again.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...tiers.admission import make_filter
from ...tiers.policies.choice import policy_factory
from .formats import Trace, read_trace
from .replay import (
    Arrangement,
    Outcome,
    ReplayTier,
    TwoTierOutcome,
    replay,
    replay_heads_first,
    replay_opt,
    replay_two_tiers,
)
from .synthetic import SHAPES, generate

LRU = "lru"
ADMIT_ALL = "all"
OPT = "opt"
HEADS_FIRST = "lru, heads first"
MAX_WORKERS = 2
# Starting workers takes about a second, which is what so many block accesses take.
WORKERS_FROM_ACCESSES = 4_000_000
CELL_SECONDS = 3600.0  # a policy that takes longer over one cell is broken


class CellFailed(RuntimeError):
    """A worker gave no answer."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a trace comes from: a file, or a generator with its seed."""

    name: str
    path: Path | None = None
    requests: int = 0
    seed: int = 0

    def load(self) -> Trace:
        """The trace. Raises TraceError."""
        if self.path is not None:
            return Trace(self.name, read_trace(self.path).prompts)
        return generate(SHAPES[self.name], self.requests, self.seed)


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay: `row` is a policy, or OPT or HEADS_FIRST, at one capacity."""

    trace: str
    row: str
    percent: int

    def run(self, trace: Trace) -> Outcome:
        blocks = trace.capacity_blocks(self.percent)
        if self.row == OPT:
            return replay_opt(trace, blocks)
        if self.row == HEADS_FIRST:
            return replay_heads_first(trace, blocks)
        return replay(trace, policy_factory(self.row)(blocks), blocks)


@dataclass(frozen=True, slots=True)
class PairCell:
    """One replay of two tiers; `lower` is the policy of the lower one, the upper one's is LRU."""

    trace: str
    upper_percent: int
    lower_percent: int
    arrangement: Arrangement
    lower: str = LRU
    admission: str = ADMIT_ALL

    def run(self, trace: Trace) -> TwoTierOutcome:
        upper, lower = (trace.capacity_blocks(p) for p in (self.upper_percent, self.lower_percent))
        return replay_two_tiers(
            trace,
            self.arrangement,
            ReplayTier(policy_factory(LRU)(upper), upper),
            ReplayTier(policy_factory(self.lower)(lower), lower),
            make_filter(self.admission, lower),
        )


AnyCell = Cell | PairCell


@dataclass(frozen=True, slots=True)
class Answer:
    """What a cell gave, and how long it took."""

    cell: AnyCell
    outcome: Outcome | TwoTierOutcome
    seconds: float


def run_cells(
    cells: Sequence[AnyCell], sources: Sequence[Source], traces: Mapping[str, Trace]
) -> Iterator[Answer]:
    """The answers as they come. Raises CellFailed."""
    accesses = sum(traces[cell.trace].num_accesses for cell in cells)
    workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    if workers < 2 or accesses < WORKERS_FROM_ACCESSES:
        for cell in cells:
            yield _run(cell, traces[cell.trace])
        return
    # Not forked: this process may have threads.
    context = multiprocessing.get_context("spawn")
    # The large ones first, so that no worker is left alone with one at the end.
    ordered = sorted(cells, key=lambda cell: -traces[cell.trace].num_accesses)
    with context.Pool(workers, _start_worker, (list(sources),)) as pool:
        answers = pool.imap_unordered(_run_in_worker, ordered)
        for _ in ordered:
            try:
                yield answers.next(CELL_SECONDS)
            except multiprocessing.TimeoutError as error:
                raise CellFailed(
                    f"no replay ended within {CELL_SECONDS:.0f} seconds: a worker was killed, "
                    "perhaps for want of memory, or a policy is far too slow"
                ) from error


def _run(cell: AnyCell, trace: Trace) -> Answer:
    _ = trace.keyed_chains, trace.next_uses  # made once, and not part of what is timed
    start = time.perf_counter()
    outcome = cell.run(trace)
    return Answer(cell, outcome, time.perf_counter() - start)


_sources: dict[str, Source] = {}
_loaded: dict[str, Trace] = {}  # in a worker: the trace at hand


def _start_worker(sources: Sequence[Source]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    _sources.update({source.name: source for source in sources})


def _run_in_worker(cell: AnyCell) -> Answer:
    if cell.trace not in _loaded:
        _loaded.clear()
        _loaded[cell.trace] = _sources[cell.trace].load()
    return _run(cell, _loaded[cell.trace])
