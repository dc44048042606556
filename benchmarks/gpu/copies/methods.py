# SPDX-License-Identifier: Apache-2.0
"""The ways to copy a job's blocks: one call a block, one for all, a kernel, or both in turn.

What a job needs is made ready before; the launch that comes back does what a running engine would
do for every job.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from ....kernels.copy.copy_blocks import gather_blocks, scatter_blocks
from ....kernels.copy.copy_blocks_launch import MAX_PROGRAMS
from ....kernels.copy.copy_engine import Batch, copy_batch_plain, cuda_runtime, merge_neighbours
from ..place import Place
from ..stopwatch import Launch
from .jobs import ONE_WAY, Direction, Field, Job, check_jobs
from .streams import on

# Of a kernel that leaves decode undisturbed.
FEW_PROGRAMS = 12
Prepare = Callable[[Place, Job, torch.cuda.Stream | None], Launch]
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Method:
    """`prepare` makes a launch for a job, to be called with the stream as the current one."""

    name: str
    prepare: Prepare
    run_length: int = 1  # of neighbours, in the jobs it is shown
    slots_in_order: bool = False  # whether it fills slots that follow one another

    @property
    def is_for_any_blocks(self) -> bool:
        """Whether it needs no neighbours in the pool."""
        return self.run_length == 1


def job_addresses(job: Job) -> tuple[Addresses, Addresses, Addresses]:
    """Sources, targets and sizes of a job's copies."""
    size = job.pool.shape[1]
    pool = job.pool.data_ptr() + job.block_ids.numpy() * size
    slab = job.slab.data_ptr() + job.slots.numpy() * size
    sizes = np.full(len(pool), size, dtype=np.int64)
    return (pool, slab, sizes) if job.is_to_host else (slab, pool, sizes)


def prepare_single(place: Place, job: Job, stream: torch.cuda.Stream | None) -> Launch:
    """One `cudaMemcpyAsync` a block."""
    pairs = [
        (job.slab[slot], job.pool[block_id])
        for slot, block_id in zip(job.slots.tolist(), job.block_ids.tolist(), strict=True)
    ]
    if not job.is_to_host:
        pairs = [(block, slot) for slot, block in pairs]

    def launch() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return launch


def prepare_batched(
    place: Place, job: Job, stream: torch.cuda.Stream | None, *, merges: bool = False
) -> Launch:
    """One call for all blocks, each an entry, or neighbours joined to one entry before it."""
    addresses = job_addresses(job)
    batch = merge_neighbours(*addresses) if merges else Batch(*addresses)
    if place.is_rehearsal or stream is None:
        return lambda: copy_batch_plain(batch)
    runtime, handle = cuda_runtime(), stream.cuda_stream
    return lambda: runtime.copy_batch(batch, handle)


def prepare_staged(place: Place, job: Job, stream: torch.cuda.Stream | None) -> Launch:
    """A kernel collects the blocks in a buffer on the device, and one copy takes that; or back."""
    ids, rows = job.block_ids.to(job.pool.device), _rows(job)
    staging = torch.empty(rows.shape, dtype=rows.dtype, device=job.pool.device)

    def launch_to_host() -> None:
        gather_blocks(job.pool, ids, staging, kernel=place.kernel)
        rows.copy_(staging, non_blocking=True)

    def launch_to_device() -> None:
        staging.copy_(rows, non_blocking=True)
        scatter_blocks(staging, job.pool, ids, kernel=place.kernel)

    return launch_to_host if job.is_to_host else launch_to_device


def prepare_kernel(
    place: Place, job: Job, stream: torch.cuda.Stream | None, *, programs: int
) -> Launch:
    """A kernel of at most so many programs that reaches into page-locked memory."""
    ids, rows = job.block_ids.to(job.pool.device), _rows(job)
    kernel = place.kernel
    if job.is_to_host:
        return lambda: gather_blocks(job.pool, ids, rows, max_programs=programs, kernel=kernel)
    return lambda: scatter_blocks(rows, job.pool, ids, max_programs=programs, kernel=kernel)


_MERGED = partial(prepare_batched, merges=True)
SINGLE = Method("one copy a block", prepare_single)
BATCHED = Method("batched", prepare_batched)
MERGED_4 = Method("batched, runs of 4 merged", _MERGED, run_length=4)
MERGED_16 = Method("batched, runs of 16 merged", _MERGED, run_length=16)
STAGED = Method("gathered, one copy", prepare_staged, slots_in_order=True)
FEW = Method(
    "kernel, 12 programs", partial(prepare_kernel, programs=FEW_PROGRAMS), slots_in_order=True
)
ALL = Method(
    "kernel, uncapped", partial(prepare_kernel, programs=MAX_PROGRAMS), slots_in_order=True
)
METHODS = (SINGLE, BATCHED, MERGED_4, MERGED_16, STAGED, FEW, ALL)


def prepare_checked(
    place: Place,
    field: Field,
    method: Method,
    block_bytes: int,
    what: str,
    direction: Direction = "both",
) -> tuple[list[list[Job]], list[list[Launch]]]:
    """Jobs to the host and to the device and their launches, which have run once and been compared;
    none for a direction that is not asked for. Raises WrongResult."""
    of_lanes = field.jobs(
        block_bytes, run_length=method.run_length, slots_in_order=method.slots_in_order
    )
    jobs = [
        of_lane if direction in ("both", one_way) else []
        for one_way, of_lane in zip(ONE_WAY, of_lanes, strict=True)
    ]
    launches = [
        [method.prepare(place, job, lane) for job in of_lane]
        for of_lane, lane in zip(jobs, field.lanes, strict=True)
    ]
    field.spoil(place)
    for lane, of_lane in zip(field.lanes, launches, strict=True):
        with on(lane):
            for launch in of_lane:
                launch()
    place.synchronise()
    for of_jobs in jobs:
        check_jobs(what, of_jobs)
    return jobs, launches


def _rows(job: Job) -> torch.Tensor:
    """The slots of a job whose slots are in order."""
    first = int(job.slots[0])
    return job.slab[first : first + len(job.slots)]
