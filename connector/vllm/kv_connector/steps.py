# SPDX-License-Identifier: Apache-2.0
"""Messages between the two roles in a step: plain values, because vLLM sends them to its workers.

Both roles map the slab. The scheduler role sends its process id and the slab's file descriptor,
with which the worker role maps the slab in the first step."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field

from ....tiers.block import BlockLayout
from ...messages import ConnectorMetadata, ConnectorWorkerOutput


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """The layout of a slab, and the process and file descriptor by which other processes map it."""

    layout: BlockLayout
    num_slots: int
    process_id: int
    descriptor: int

    def map_slab(self) -> MappedSlab:
        """Map the slab. Raises OSError if its process has ended or a file cannot be opened."""
        if self.process_id == os.getpid():
            return MappedSlab(self.layout, self.num_slots, self.descriptor)
        path = f"/proc/{self.process_id}/fd/{self.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return MappedSlab(self.layout, self.num_slots, descriptor)
        finally:
            os.close(descriptor)


class MappedSlab:
    """The memory of another process's slab."""

    def __init__(self, layout: BlockLayout, num_slots: int, descriptor: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self._map = mmap.mmap(descriptor, num_slots * layout.slot_bytes)

    def memory(self) -> memoryview:
        return memoryview(self._map)


@dataclass(slots=True)
class PartLoad:
    """A copy job of a load: the blocks of one cache group on one rank."""

    job_id: int
    rank: int
    slots: list[int]  # the slots of the job's blocks
    digests: list[bytes | None]  # digests of the slots' bytes; None counts as damaged


@dataclass(slots=True)
class RequestLoad:
    """The load of a waiting request."""

    request_id: str
    parts: list[PartLoad] = field(default_factory=list)
    # The request's last blocks, which the load does not fill; only with one cache group.
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """The decisions for one step, from the scheduler side to the worker side."""

    number: int
    place: SlabPlace
    moves: ConnectorMetadata
    loads: list[RequestLoad] = field(default_factory=list)
    # Waiting requests without a copy job, because their loads have failed.
    given_up: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepReport:
    """The worker side's report of a step, to the scheduler side."""

    number: int  # the number of the step that has just run
    output: ConnectorWorkerOutput
    # Blocks with wrong bytes in the slab: job id → their positions in the job.
    damaged: dict[int, list[int]] = field(default_factory=dict)
    error: str | None = None  # why this worker makes no more copies

    def merge(self, other: StepReport) -> None:
        """Merge another rank's report of the same step. No job is in both reports."""
        ours, theirs = self.output, other.output
        ours.finished_stores += theirs.finished_stores
        ours.failed_stores += theirs.failed_stores
        ours.finished_loads += theirs.finished_loads
        ours.failed_loads += theirs.failed_loads
        ours.store_digests |= theirs.store_digests
        ours.num_ended += theirs.num_ended
        # The longest copy counts, because ranks copy in parallel.
        ours.store_copy_seconds = max(ours.store_copy_seconds, theirs.store_copy_seconds)
        ours.load_copy_seconds = max(ours.load_copy_seconds, theirs.load_copy_seconds)
        ours.store_wait_seconds = max(ours.store_wait_seconds, theirs.store_wait_seconds)
        self.damaged |= other.damaged
        self.error = self.error or other.error
