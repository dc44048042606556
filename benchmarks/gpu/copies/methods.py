# SPDX-License-Identifier: Apache-2.0
"""Jobs of 64 blocks between a pool on the GPU and a page-locked slab, and copy methods.

pool  [blocks of all jobs, and as many blocks without a job]       ids in random order
slab  [ slots of jobs to the host | slots of jobs to the device ]

A method copies the blocks of a job by one call for each block, one call for all blocks, a kernel
launch, or a kernel launch and a call. Each direction has a CUDA stream. `prepare` does the work
that is needed once for a job, and returns a function with the work of a running engine for every
job. A rehearsal has ordinary memory and no streams."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ....kernels.copy.copy_blocks import gather_blocks, scatter_blocks
from ....kernels.copy.copy_blocks_launch import MAX_PROGRAMS
from ....kernels.copy.copy_engine import (
    Batch,
    CudaError,
    PageLockedMemory,
    copy_batch_plain,
    cuda_runtime,
    merge_neighbours,
)
from ....kernels.kernel_choice import KernelRefused
from ..section import Launch, Place, WrongResult, time_launches


class Lanes(NamedTuple):
    """A CUDA stream of the lowest priority for each direction; None in a rehearsal."""

    to_host: torch.cuda.Stream | None
    to_device: torch.cuda.Stream | None


def make_lanes(place: Place) -> Lanes:
    """Return two new streams, without waits for the default stream: callers must synchronise."""
    if place.is_rehearsal:
        return Lanes(None, None)
    return Lanes(new_stream(), new_stream())


def new_stream(priority: int = 0) -> torch.cuda.Stream:
    """Return a new stream. 0 is the lowest priority; a lower number is a higher priority."""
    return torch.cuda.Stream(priority=priority)  # type: ignore[no-untyped-call]


def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[object]:
    """Return a context in which work is launched in `stream`; None changes nothing."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def page_locked(
    place: Place, num_bytes: int, note: Callable[[str], None]
) -> Iterator[torch.Tensor]:
    """Yield a uint8 tensor `[num_bytes]` in page-locked memory. On exit, the memory is freed after
    the end of all work on the GPU. `note` is called with a remark if the memory had to be torch's
    own page-locked memory."""
    if place.is_rehearsal:
        yield torch.zeros(num_bytes, dtype=torch.uint8)
        return
    with contextlib.ExitStack() as stack:
        try:
            owner = stack.enter_context(PageLockedMemory(num_bytes, cuda_runtime()))
            memory = owner.tensor()
        except (CudaError, KernelRefused) as error:
            note(f"the page-locked memory is torch's own, for want of another: {error}")
            memory = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)
        stack.callback(place.synchronise)
        yield memory


def time_one_way(
    place: Place, stream: torch.cuda.Stream | None, launches: Sequence[Launch]
) -> float:
    """Return the seconds of one launch in `stream`, or of its submission if that is longer."""
    with on(stream):
        return time_launches(place, launches, in_graph=False).median


def time_both_ways(
    place: Place, lanes: Lanes, to_host: Sequence[Launch], to_device: Sequence[Launch]
) -> float:
    """Return the seconds of two concurrent launches, one in each direction."""

    def wait(waiting: torch.cuda.Stream | None, other: torch.cuda.Stream | None) -> None:
        if waiting is not None and other is not None:
            waiting.wait_stream(other)

    def launch_pair(out: Launch, back: Launch) -> None:
        out()
        with on(lanes.to_device):
            back()

    pairs = [
        functools.partial(launch_pair, out, back)
        for out, back in zip(to_host, to_device, strict=True)
    ]
    # The timing events are in the stream to the host, with which the other stream starts and ends.
    begin = functools.partial(wait, lanes.to_device, lanes.to_host)
    end = functools.partial(wait, lanes.to_host, lanes.to_device)
    launches: list[Launch] = [begin, *pairs, end]
    with on(lanes.to_host):
        timing = time_launches(place, launches, in_graph=False)
    return timing.median * len(launches) / len(pairs)


BLOCKS = 64  # blocks of a job
MAX_JOBS = 64
SEED = 20260
Direction = Literal["to_host", "to_device", "both"]
ONE_WAY: tuple[Direction, ...] = ("to_host", "to_device")
DIRECTIONS: tuple[Direction, ...] = (*ONE_WAY, "both")


@dataclass(frozen=True, slots=True)
class Job:
    """A copy of blocks `block_ids[i]` of the pool to slots `slots[i]` of the slab, or back."""

    pool: torch.Tensor  # [num_blocks, bytes], on the device
    slab: torch.Tensor  # [num_slots, bytes]
    block_ids: torch.Tensor  # int64 [64], on the CPU
    slots: torch.Tensor  # int64 [64], on the CPU
    is_to_host: bool

    @property
    def num_bytes(self) -> int:
        return len(self.slots) * self.pool.shape[1]


@dataclass(frozen=True, slots=True)
class Field:
    """The memory of one section, a pool and a slab of random bytes, and a stream per direction."""

    pool: torch.Tensor  # uint8 [4 * half_bytes]
    slab: torch.Tensor  # uint8 [2 * half_bytes]
    lanes: Lanes

    @classmethod
    def make(cls, place: Place, slab: torch.Tensor) -> Field:
        """Return a Field with random bytes in `slab` and in a new pool of twice the slab's size."""
        generator = torch.Generator(place.device).manual_seed(SEED)
        pool = torch.randint(
            0, 256, (2 * slab.numel(),), dtype=torch.uint8, device=place.device, generator=generator
        )
        slab.copy_(pool[: slab.numel()])
        field = cls(pool, slab, make_lanes(place))
        place.synchronise()
        return field

    def jobs(
        self, block_bytes: int, *, run_length: int = 1, slots_in_order: bool = False
    ) -> tuple[list[Job], list[Job]]:
        """Return as many jobs to the host, and jobs to the device, as fit. Each run of `run_length`
        blocks is adjacent in the pool and in the slab."""
        half_bytes = self.slab.numel() // 2
        count = count_jobs(half_bytes, block_bytes)
        blocks = count * BLOCKS
        pool = self.pool[: 4 * blocks * block_bytes].view(4 * blocks, block_bytes)
        slab = self.slab[: 2 * blocks * block_bytes].view(2 * blocks, block_bytes)
        generator = torch.Generator().manual_seed(SEED + run_length)
        ids = scattered_ids(4 * blocks, run_length, generator)[: 2 * blocks].view(2, count, BLOCKS)
        halves = []
        for half in range(2):
            slots = torch.arange(blocks)
            if not slots_in_order:
                slots = scattered_ids(blocks, run_length, generator)
            by_job = (half * blocks + slots).view(count, BLOCKS)
            halves.append(
                [
                    Job(pool, slab, ids[half, job], by_job[job], is_to_host=half == 0)
                    for job in range(count)
                ]
            )
        return halves[0], halves[1]

    def spoil(self, place: Place) -> None:
        """Change every byte of the pool, so that an earlier copy cannot be taken for a new copy."""
        self.pool.add_(1)
        place.synchronise()


def count_jobs(half_bytes: int, block_bytes: int) -> int:
    """Return how many jobs with such blocks fit into half of the slab: 1 to MAX_JOBS."""
    return max(1, min(MAX_JOBS, half_bytes // (BLOCKS * block_bytes)))


def scattered_ids(count: int, run_length: int, generator: torch.Generator) -> torch.Tensor:
    """Return 0 to `count` - 1, as runs of `run_length` consecutive numbers in random order."""
    runs = torch.randperm(count // run_length, generator=generator)
    return (runs[:, None] * run_length + torch.arange(run_length)).flatten()


def check_jobs(what: str, jobs: list[Job]) -> None:
    """Compare every byte of every copied block, on the GPU. Raises WrongResult."""
    if not jobs:
        return
    device, half = jobs[0].pool.device, len(jobs[0].slab) // 2
    first = 0 if jobs[0].is_to_host else half
    slots = jobs[0].slab[first : first + half].to(device)
    for number, job in enumerate(jobs):
        blocks = job.pool[job.block_ids.to(device)]
        copies = slots[(job.slots - first).to(device)]
        wrong = int((blocks != copies).any(dim=1).sum().item())
        if wrong:
            raise WrongResult(
                f"{what}: {wrong} of the {BLOCKS} blocks of job {number} differ on the two sides"
            )


# A number of programs with which a copy kernel does not slow decode down.
FEW_PROGRAMS = 12
Prepare = Callable[[Place, Job, torch.cuda.Stream | None], Launch]
Addresses = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Method:
    """A copy method. `prepare` returns a job's launch, which must be called with the job's stream
    as the current stream."""

    name: str
    prepare: Prepare
    run_length: int = 1  # number of adjacent blocks in the method's jobs
    slots_in_order: bool = False  # whether a job's slots are consecutive

    @property
    def is_for_any_blocks(self) -> bool:
        """Whether the method is for blocks that are not adjacent in the pool."""
        return self.run_length == 1


def job_addresses(job: Job) -> tuple[Addresses, Addresses, Addresses]:
    """Return the source addresses, target addresses and sizes of a job's copies."""
    size = job.pool.shape[1]
    pool = job.pool.data_ptr() + job.block_ids.numpy() * size
    slab = job.slab.data_ptr() + job.slots.numpy() * size
    sizes = np.full(len(pool), size, dtype=np.int64)
    return (pool, slab, sizes) if job.is_to_host else (slab, pool, sizes)


def prepare_single(place: Place, job: Job, stream: torch.cuda.Stream | None) -> Launch:
    """Return a function that copies each block by one `cudaMemcpyAsync`."""
    pairs = [
        (job.slab[slot], job.pool[block_id])
        for slot, block_id in zip(job.slots.tolist(), job.block_ids.tolist(), strict=True)
    ]
    if not job.is_to_host:
        pairs = [(block, slot) for slot, block in pairs]
    return copy_pairs(pairs)


def copy_pairs(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Launch:
    """Return a function that copies, in each pair, the second tensor to the first."""
    pairs = list(pairs)

    def launch() -> None:
        for target, source in pairs:
            target.copy_(source, non_blocking=True)

    return launch


def prepare_batched(
    place: Place, job: Job, stream: torch.cuda.Stream | None, *, merges: bool = False
) -> Launch:
    """Return a function that copies all blocks in one batched call; `merges` joins adjacent
    blocks."""
    addresses = job_addresses(job)
    batch = merge_neighbours(*addresses) if merges else Batch(*addresses)
    if place.is_rehearsal or stream is None:
        return lambda: copy_batch_plain(batch)
    runtime, handle = cuda_runtime(), stream.cuda_stream
    return lambda: runtime.copy_batch(batch, handle)


def prepare_staged(place: Place, job: Job, stream: torch.cuda.Stream | None) -> Launch:
    """Return a function that gathers the blocks into a buffer and copies it, or the reverse."""
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
    """Return a function that launches a kernel of up to `programs` programs, which accesses
    page-locked memory directly."""
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
    """Return the jobs of each direction with their launches. Each launch has run once, and its
    copies have been compared. The lists are empty for an excluded direction. Raises WrongResult."""
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
    """Return the slots of a job, which must be consecutive, as one slice of the slab."""
    first = int(job.slots[0])
    return job.slab[first : first + len(job.slots)]
