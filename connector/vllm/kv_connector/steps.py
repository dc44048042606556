# SPDX-License-Identifier: Apache-2.0
"""Messages between the two sides in a step of vLLM's, sent through vLLM: plain values, so that the
worker may be another process.

The slab is shared: the scheduler side says where to find its file descriptor, and the worker side
maps it when the first step comes.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field

from ....tiers.block import BlockLayout
from ...messages import ConnectorMetadata, ConnectorWorkerOutput


@dataclass(frozen=True, slots=True)
class SlabPlace:
    """A slab's memory, and the process that made it."""

    layout: BlockLayout
    num_slots: int
    process_id: int
    descriptor: int

    def map_slab(self) -> MappedSlab:
        """Map the slab in this process. Raises OSError if its own process, or the right to look
        into that, is gone."""
        if self.process_id == os.getpid():
            return MappedSlab(self.layout, self.num_slots, self.descriptor)
        path = f"/proc/{self.process_id}/fd/{self.descriptor}"
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            return MappedSlab(self.layout, self.num_slots, descriptor)
        finally:
            os.close(descriptor)


class MappedSlab:
    """The memory of a slab, mapped a second time."""

    def __init__(self, layout: BlockLayout, num_slots: int, descriptor: int) -> None:
        self.layout = layout
        self.num_slots = num_slots
        self._map = mmap.mmap(descriptor, num_slots * layout.slot_bytes)

    def memory(self) -> memoryview:
        """All slots, one after the other."""
        return memoryview(self._map)


@dataclass(slots=True)
class PartLoad:
    """A copy job of a load: the blocks of one cache group on one rank."""

    job_id: int
    rank: int
    slots: list[int]  # of the job
    digests: list[bytes | None]  # of the bytes in them; None: not known, and so not trusted


@dataclass(slots=True)
class RequestLoad:
    """The load of a request, which waits for it."""

    request_id: str
    parts: list[PartLoad] = field(default_factory=list)
    # Blocks behind those that come, to which nothing will be copied. Only with one group.
    missing: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """The decisions for one step, from the scheduler side to the worker side."""

    number: int
    place: SlabPlace
    moves: ConnectorMetadata
    loads: list[RequestLoad] = field(default_factory=list)
    # Requests that wait, have no job, and get no blocks.
    given_up: list[str] = field(default_factory=list)


@dataclass(slots=True)
class StepReport:
    """The worker side's report of a step, to the scheduler side."""

    number: int  # of the step that has just run
    output: ConnectorWorkerOutput
    # Blocks of loads whose bytes in the slab were wrong: positions in the job, by its id.
    damaged: dict[int, list[int]] = field(default_factory=dict)
    error: str | None = None  # why this worker moves nothing at all

    def merge(self, other: StepReport) -> None:
        """Merge the report of another rank for this step. A job is one rank's."""
        ours, theirs = self.output, other.output
        ours.finished_stores += theirs.finished_stores
        ours.failed_stores += theirs.failed_stores
        ours.finished_loads += theirs.finished_loads
        ours.failed_loads += theirs.failed_loads
        ours.store_digests |= theirs.store_digests
        ours.num_ended += theirs.num_ended
        # Ranks copy beside each other.
        ours.store_copy_seconds = max(ours.store_copy_seconds, theirs.store_copy_seconds)
        ours.load_copy_seconds = max(ours.load_copy_seconds, theirs.load_copy_seconds)
        ours.store_wait_seconds = max(ours.store_wait_seconds, theirs.store_wait_seconds)
        self.damaged |= other.damaged
        self.error = self.error or other.error
