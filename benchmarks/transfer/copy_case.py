# SPDX-License-Identifier: Apache-2.0
"""The case of blocks that the engine's jobs copy from pool to slab and back, compared with memcpy.

The limit copies as many bytes between random places of plain memory, in pieces of the same length,
with as many threads. Every region is larger than the caches."""

from __future__ import annotations

import gc
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ...connector.copy_signal import CopySignal
from ...connector.device.base import Event, Stream
from ...connector.device.cpu import CpuCopyDevice, pool_pages, slab_pages
from ...connector.messages import ConnectorMetadata, CopyJob
from ...connector.offload_worker import OffloadWorker
from ...engine.worker.kv_pool import KvPool
from ...tiers.slab.cpu_slab import CpuSlab
from ..harness.comparison import Comparison, WrongWork
from ..harness.gate import Gate
from ..harness.report import median, ratios
from ..tiers.scale import MIB, layout_of

SIZES: Mapping[str, int] = {
    "64KiB": 64 * 1024,
    "256KiB": 256 * 1024,
    "2MiB": 2 * MIB,
    "5MiB": 5 * MIB,
}
JOB_BLOCKS = 64  # blocks of one job
RUN_BLOCKS = 8  # blocks of a run, adjacent in pool and slab
MOVES = (
    "pool_to_slab",
    "slab_to_pool",
    "pool_to_slab_runs",
    "slab_to_pool_runs",
    "both_ways",
)  # each with every block size


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes in bytes and numbers of rounds."""

    region_bytes: int  # least size of pool, slab and each plain region
    rounds: int
    submissions: int
    cached: Sequence[str]  # keys of `layer_ranges.CACHED`


FULL = Scale(region_bytes=128 * MIB, rounds=15, submissions=101, cached=("1k", "3k", "8k"))
QUICK = Scale(region_bytes=32 * MIB, rounds=3, submissions=15, cached=("1k",))


def copy_name(move: str, size: str) -> str:
    return f"{move}_{size}"


def submit_name(size: str) -> str:
    return f"submit_over_copy_{size}"


GATES: Mapping[str, Gate] = {
    **{copy_name(move, size): Gate(least=0.8) for move in MOVES for size in SIZES},
    **{submit_name(size): Gate(most=0.02) for size in SIZES},
}


WAIT_SECONDS = 60.0
_CLOSE_SECONDS = 10.0

Bytes = NDArray[np.uint8]
Pairs = Sequence[tuple[int, int]]  # block, slot


class Rig:
    """A real pool, slab, copy device and worker, and plain memory for the limit."""

    def __init__(self, block_bytes: int, region_bytes: int) -> None:
        layout = layout_of(block_bytes)
        self.block_bytes = block_bytes
        self.num_blocks = region_bytes // block_bytes
        self.rng = random.Random(block_bytes)
        self._slab = CpuSlab(layout, self.num_blocks * layout.slot_bytes)
        self._pool = KvPool(layout, self.num_blocks)
        self.pool: Bytes = pool_pages(self._pool.tensor, block_bytes)
        self.slab: Bytes = slab_pages(self._slab)
        # Plain regions are allocated like the pool: only the device's work differs.
        plain = [KvPool(layout, self.num_blocks).tensor for _ in range(2)]
        self.plain: list[Bytes] = [pool_pages(tensor, block_bytes) for tensor in plain]
        noise = np.frombuffer(os.urandom(MIB), np.uint8)
        for region in (self.pool, self.slab, *self.plain):
            for block in region:
                block[:] = np.resize(noise, block.shape)
        self.device = CpuCopyDevice()
        self.device.register_slab(self._slab)
        self.signal = CopySignal()
        self.worker = OffloadWorker(self.device, self.signal.note_ended)
        self.worker.register_pool(self._pool.tensor)
        self._stamp = 0

    def stamp(self, region: Bytes) -> None:
        """Write a different number to each block of a region; no number is used twice."""
        for block in region:
            self._stamp += 1
            block[:8] = np.frombuffer(self._stamp.to_bytes(8, "little"), np.uint8)

    def check(self, source: Bytes, target: Bytes, moves: Pairs) -> None:
        """Raise WrongWork unless `target` has the blocks of `source` at the places in `moves`."""
        for at, to in moves:
            if not np.array_equal(source[at], target[to]):
                raise WrongWork(f"block {at} was copied, but {to} does not hold it")

    def close(self) -> None:
        """Stop the worker and the device, and free the memory."""
        self.worker.shutdown()
        if not self.device.close(_CLOSE_SECONDS):
            raise WrongWork("copies were still running at the end")
        del self.slab
        self._slab.close()
        del self.pool, self.plain, self._pool
        gc.collect()

    def comparisons(self, size: str) -> list[Comparison]:
        """Return the comparisons of MOVES, in the order of MOVES."""
        run = max(1, min(RUN_BLOCKS, self.num_blocks // 4))
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
        """Copy every block once, in random order, in runs of `run` blocks that are adjacent in pool
        and slab; return bytes per second."""
        starts = self._random_places(run)
        moves = [(at + i, to + i) for at, to in starts for i in range(run)]
        sides = self.pool, self.slab
        source, target = sides if stream is Stream.STORE else sides[::-1]
        self.stamp(source)
        began = time.perf_counter()
        self._wait(self._submit(stream, moves))
        rate = self._rate(began, len(moves))
        self.check(source, target, moves)
        return rate

    def copy(self, run: int = 1) -> float:
        """Copy as many bytes between plain regions; return bytes per second."""
        starts = self._random_places(run)
        source, target = self.plain
        began = time.perf_counter()
        copy_plainly(source, target, starts, run)
        return self._rate(began, run * len(starts))

    def move_both_ways(self) -> float:
        """Store half of the blocks while the other half is loaded; return bytes per second."""
        out, back = self._halves()
        self.stamp(self.pool)
        self.stamp(self.slab)
        began = time.perf_counter()
        self._wait(self._submit(Stream.STORE, out) + self._submit(Stream.LOAD, back))
        rate = self._rate(began, len(out) + len(back))
        self.check(self.pool, self.slab, out)
        self.check(self.slab, self.pool, back)
        return rate

    def copy_both_ways(self) -> float:
        """Copy between plain regions in two directions, in two threads; return bytes a second."""
        out, back = self._halves()
        one, other = self.plain
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(copy_plainly, (one, other), (other, one), (out, back)))
        return self._rate(began, len(out) + len(back))

    def _submit(self, stream: Stream, moves: Pairs) -> list[Event]:
        """Submit jobs; `moves` are pairs (source, target) of the stream's direction."""
        events = []
        for start in range(0, len(moves), JOB_BLOCKS):
            sources, targets = zip(*moves[start : start + JOB_BLOCKS], strict=True)
            blocks, slots = (sources, targets) if stream is Stream.STORE else (targets, sources)
            events.append(self.device.copy(stream, blocks, slots))
            self.signal.jobs_given(1)
        return events

    def _wait(self, events: list[Event]) -> None:
        for event in events:
            if not event.wait(WAIT_SECONDS):
                raise WrongWork(f"a copy did not end within {WAIT_SECONDS:g} s")
            error = event.error()
            if error is not None:
                raise WrongWork(f"a copy failed: {error}")

    def _random_places(self, run: int = 1) -> list[tuple[int, int]]:
        """Return random pairs: the first place of a run, and the first place of its target."""
        starts = range(0, self.num_blocks - run + 1, run)
        return list(
            zip(self.rng.sample(starts, len(starts)), self.rng.sample(starts, len(starts)),
                strict=True)
        )  # fmt: skip

    def _halves(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return (block, slot) of half of the blocks, and (slot, block) of the other half."""
        places = self._random_places()
        half = len(places) // 2
        return places[:half], [(slot, block) for block, slot in places[half:]]

    def _rate(self, began: float, num_blocks: int) -> float:
        return num_blocks * self.block_bytes / (time.perf_counter() - began)


def copy_plainly(source: Bytes, target: Bytes, moves: Pairs, length: int = 1) -> None:
    """Copy `length` adjacent blocks by memcpy, for each of `moves`."""
    for at, to in moves:
        np.copyto(target[to : to + length], source[at : at + length])


@dataclass(slots=True)
class Submissions:
    """The processor seconds of submissions and copies, per job; stores and loads alternate."""

    submit_seconds: list[float] = field(default_factory=list)
    copy_seconds: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """The median ratio of a submission's seconds over the seconds of copying as many blocks."""
        return median(ratios(self.submit_seconds, self.copy_seconds))

    def figures(self) -> dict[str, float]:
        """Return the JSON entries of the submissions."""
        return {
            "submissions": len(self.submit_seconds),
            "blocks": JOB_BLOCKS,
            "submit_cpu_seconds": median(self.submit_seconds),
            "copy_cpu_seconds": median(self.copy_seconds),
        }


def take_submissions(rig: Rig, count: int) -> Submissions:
    """Time `count` submissions and as many copies. Raises WrongWork if a job failed."""
    taken = Submissions()
    _submit(rig, 0)  # the first job, with one-time work, is not counted
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
    """Return random places for a whole job, without repetition if there are enough places."""
    places = rig.rng.sample(range(rig.num_blocks), min(JOB_BLOCKS, rig.num_blocks))
    return (places * -(-JOB_BLOCKS // len(places)))[:JOB_BLOCKS]


def _busy(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
