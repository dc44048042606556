# SPDX-License-Identifier: Apache-2.0
"""Blocks from pool to slab and back, in jobs as the engine makes them, against memcpy.

The limit moves as many bytes between as random places of plain memory, in pieces of the same
length, by as many threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...connector.base import ConnectorMetadata, CopyJob
from ...connector.device.base import Event, Stream
from ..harness.comparison import Comparison, WrongWork
from ..harness.report import median, ratios
from .rig import WAIT_SECONDS, Bytes, Pairs, Rig, copy_plainly
from .scale import JOB_BLOCKS, MOVES, RUN_BLOCKS, copy_name


class CopyCase:
    """What is moved with one rig."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig

    def comparisons(self, size: str) -> list[Comparison]:
        """One for each of MOVES, in its order."""
        run = max(1, min(RUN_BLOCKS, self._rig.num_blocks // 4))
        sides = (
            (lambda: self.move(Stream.STORE), self.copy),
            (lambda: self.move(Stream.LOAD), self.copy),
            (lambda: self.move(Stream.STORE, run), lambda: self.copy(run)),
            (lambda: self.move(Stream.LOAD, run), lambda: self.copy(run)),
            (self.move_both_ways, self.copy_both_ways),
        )
        return [
            Comparison(copy_name(move, size), "bytes/s", "memcpy", ours, limit)
            for move, (ours, limit) in zip(MOVES, sides, strict=True)
        ]

    def move(self, stream: Stream, run: int = 1) -> float:
        """Every block once, in random order, `run` neighbours in the same order on both sides."""
        rig = self._rig
        starts = self._random_places(run)
        moves = [(at + i, to + i) for at, to in starts for i in range(run)]
        source, target = self._sides(stream)
        rig.stamp(source)
        began = time.perf_counter()
        self._wait(self._submit(stream, moves))
        rate = self._rate(began, len(moves))
        rig.check(source, target, moves)
        return rate

    def copy(self, run: int = 1) -> float:
        """The same between plain regions."""
        starts = self._random_places(run)
        source, target = self._rig.plain
        began = time.perf_counter()
        copy_plainly(source, target, starts, run)
        return self._rate(began, run * len(starts))

    def move_both_ways(self) -> float:
        """Half of the blocks out, to half of the slots, while the other slots go to the others."""
        rig = self._rig
        out, back = self._halves()
        rig.stamp(rig.pool)
        rig.stamp(rig.slab)
        began = time.perf_counter()
        self._wait(self._submit(Stream.STORE, out) + self._submit(Stream.LOAD, back))
        rate = self._rate(began, len(out) + len(back))
        rig.check(rig.pool, rig.slab, out)
        rig.check(rig.slab, rig.pool, back)
        return rate

    def copy_both_ways(self) -> float:
        """The same between plain regions, by two threads."""
        out, back = self._halves()
        one, other = self._rig.plain
        threads = [
            threading.Thread(target=copy_plainly, args=(one, other, out)),
            threading.Thread(target=copy_plainly, args=(other, one, back)),
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self._rate(began, len(out) + len(back))

    def _submit(self, stream: Stream, moves: Pairs) -> list[Event]:
        """As jobs; `moves` lead from the stream's source to its target."""
        events = []
        for start in range(0, len(moves), JOB_BLOCKS):
            sources, targets = zip(*moves[start : start + JOB_BLOCKS], strict=True)
            blocks, slots = (sources, targets) if stream is Stream.STORE else (targets, sources)
            events.append(self._rig.device.copy(stream, blocks, slots))
            self._rig.signal.jobs_given(1)
        return events

    def _wait(self, events: list[Event]) -> None:
        for event in events:
            if not event.wait(WAIT_SECONDS):
                raise WrongWork(f"a copy did not end within {WAIT_SECONDS:g} s")
            error = event.error()
            if error is not None:
                raise WrongWork(f"a copy failed: {error}")

    def _sides(self, stream: Stream) -> tuple[Bytes, Bytes]:
        rig = self._rig
        return (rig.pool, rig.slab) if stream is Stream.STORE else (rig.slab, rig.pool)

    def _random_places(self, run: int = 1) -> list[tuple[int, int]]:
        """Where runs begin, and where they go."""
        rig = self._rig
        starts = range(0, rig.num_blocks - run + 1, run)
        return list(
            zip(rig.rng.sample(starts, len(starts)), rig.rng.sample(starts, len(starts)),
                strict=True)
        )  # fmt: skip

    def _halves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """(block, slot) of those that go out and (slot, block) of those that come back."""
        places = self._random_places()
        half = len(places) // 2
        return places[:half], [(slot, block) for block, slot in places[half:]]

    def _rate(self, began: float, num_blocks: int) -> float:
        return num_blocks * self._rig.block_bytes / (time.perf_counter() - began)


@dataclass(slots=True)
class Submissions:
    """Processor seconds, one entry for each job; stores and loads in turn."""

    submit_seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median of the ratios of neighbours."""
        return median(ratios(self.submit_seconds, self.copy_seconds))

    def figures(self) -> dict[str, float]:
        """What the JSON holds of it."""
        return {
            "submissions": len(self.submit_seconds),
            "blocks": JOB_BLOCKS,
            "submit_cpu_seconds": median(self.submit_seconds),
            "copy_cpu_seconds": median(self.copy_seconds),
        }


def take_submissions(rig: Rig, count: int) -> Submissions:
    """Raises WrongWork where a job did not end well."""
    taken = Submissions()
    _submit(rig, 0)  # the first one pays for what is made once
    for number in range(1, count + 1):
        moves = list(zip(_places(rig), _places(rig), strict=True))
        source, target = rig.plain
        taken.copy_seconds.append(_busy(partial(copy_plainly, source, target, moves)))
        taken.submit_seconds.append(_submit(rig, number))
    return taken


def _submit(rig: Rig, job_id: int) -> float:
    job = CopyJob(job_id, _places(rig), _places(rig))
    is_load = bool(job_id % 2)
    meta = ConnectorMetadata(loads=[job]) if is_load else ConnectorMetadata(ahead=[job])
    rig.signal.jobs_given(1)
    seconds = _busy(partial(rig.worker.start_step, meta))
    if not rig.signal.wait_idle(WAIT_SECONDS):
        raise WrongWork(f"a copy did not end within {WAIT_SECONDS:g} s")
    output = rig.worker.poll()
    if (output.finished_loads if is_load else output.finished_stores) != [job_id]:
        raise WrongWork(f"job {job_id} did not end well: {output}")
    return seconds


def _places(rig: Rig) -> list[int]:
    """Random ones for a whole job, each of them once where there are so many."""
    places = rig.rng.sample(range(rig.num_blocks), min(JOB_BLOCKS, rig.num_blocks))
    return (places * -(-JOB_BLOCKS // len(places)))[:JOB_BLOCKS]


def _busy(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
