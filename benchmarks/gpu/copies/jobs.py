# SPDX-License-Identifier: Apache-2.0
"""Jobs of 64 blocks between a pool on the device and a page-locked slab, and their check.

pool  [blocks of all jobs, and as many again that are in none]     ids in random order
slab  [ slots of the jobs to the host | slots of those to the device ]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ..place import Place, WrongResult
from .streams import Lanes, make_lanes

BLOCKS = 64  # of a job
MAX_JOBS = 64
SEED = 20260
Direction = Literal["to_host", "to_device", "both"]
ONE_WAY: tuple[Direction, ...] = ("to_host", "to_device")
DIRECTIONS: tuple[Direction, ...] = (*ONE_WAY, "both")


@dataclass(frozen=True, slots=True)
class Job:
    """Block `block_ids[i]` of the pool goes to slot `slots[i]` of the slab, or back."""

    pool: torch.Tensor  # [num_blocks, bytes], on the device
    slab: torch.Tensor  # [num_slots, bytes]
    block_ids: torch.Tensor  # int64 [64], on the CPU
    slots: torch.Tensor  # the same
    is_to_host: bool

    @property
    def num_bytes(self) -> int:
        """Moved by it."""
        return len(self.slots) * self.pool.shape[1]


@dataclass(frozen=True, slots=True)
class Field:
    """The memory of one section: random bytes on both sides, and the streams between them."""

    pool: torch.Tensor  # uint8 [4 * half_bytes]
    slab: torch.Tensor  # uint8 [2 * half_bytes]
    lanes: Lanes

    @classmethod
    def make(cls, place: Place, slab: torch.Tensor) -> Field:
        """Fill `slab` and a new pool of twice its size."""
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
        """As many jobs as there is room for, to the host and to the device.

        Blocks are neighbours in the pool, and in the slab, in runs of `run_length`.
        """
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
        """Change every byte of the pool, so that nothing copied before can pass for new."""
        self.pool.add_(1)
        place.synchronise()


def count_jobs(half_bytes: int, block_bytes: int) -> int:
    """How many jobs of such blocks one half of the slab holds, within limits."""
    return max(1, min(MAX_JOBS, half_bytes // (BLOCKS * block_bytes)))


def scattered_ids(count: int, run_length: int, generator: torch.Generator) -> torch.Tensor:
    """0 to `count` - 1, in runs of `run_length` neighbours whose order is random."""
    runs = torch.randperm(count // run_length, generator=generator)
    return (runs[:, None] * run_length + torch.arange(run_length)).flatten()


def check_jobs(what: str, jobs: list[Job]) -> None:
    """Compare every byte of every block on the device. Raises WrongResult."""
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
