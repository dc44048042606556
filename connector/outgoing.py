# SPDX-License-Identifier: Apache-2.0
"""Stores blocks of the pool in the slab: evicted blocks, and cold blocks, whose eviction is near.

A step overwrites the blocks that it evicts, so its forward pass waits for the copies of these
blocks. To shorten this wait, cold blocks are copied before their eviction, a bounded amount at a
time, in parallel with forward passes that do not write to them. When a cold block is evicted, the
step waits at most for the rest of the block's copy. A few cold blocks join the job of the evicted
blocks. With a pool in CPU memory all cold blocks join that job, because a copy in parallel with the
forward pass would take a processor from the pass."""

from __future__ import annotations

from collections.abc import Sequence

from ..tiers.hierarchy.hierarchy import StoreTicket
from .base import StoresAhead
from .connector_context import ConnectorContext
from .messages import ConnectorMetadata, CopyJob, EvictedBlock
from .page_keys import GROUP_BYTES, group_of, pages_of

# The most bytes of a job of cold blocks, as evicted blocks of a later step wait for the job.
AHEAD_BYTES = 16 * 1024**2
AHEAD_BLOCKS = 128  # the most blocks of a job of cold blocks, which bounds the time to choose them
AHEAD_JOBS = 2  # in flight
# Up to so many bytes of cold blocks join the job of evicted blocks, because a separate job costs as
# much as copying these bytes.
ALONG_BYTES = 1024**2


class Outgoing(StoresAhead):
    """The store jobs of one connector, from the choice of slots to the end of the copies. A pool
    block has a part on every rank, with its own jobs. A key ends with the block's cache group."""

    def __init__(self, context: ConnectorContext) -> None:
        self._hierarchy = context.hierarchy
        self._parts = context.parts
        self._shards = context.parts.shards
        self._counters = context.counters
        self._job_ids = context.job_ids
        self._tickets: dict[int, StoreTicket] = {}
        # Jobs of cold blocks in flight: job id → key → pool block.
        self._ahead: dict[int, dict[bytes, int]] = {}
        self._ahead_job_of: dict[bytes, int] = {}  # key → id of the job that copies its block
        # Ids of jobs for which the next step waits, even if that step evicts no block; read only.
        self.overtaken: set[int] = set()
        self._void: dict[int, set[bytes]] = {}  # job id → keys whose copies are invalid
        self._batch = max(1, min(AHEAD_BLOCKS, AHEAD_BYTES // self._hierarchy.block_bytes))
        self._copies_beside = context.copies_beside
        self._along = ALONG_BYTES // self._hierarchy.block_bytes

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, job_id: int) -> bool:
        return job_id in self._tickets

    def num_wanted_ahead(self) -> int:
        return self._batch if len(self._ahead) < AHEAD_JOBS else 0

    def names_dropped(self, blocks: Sequence[EvictedBlock]) -> None:
        for block_id, pool_key, _ in pages_of(blocks) if self._ahead else ():
            for shard in self._shards:
                key = pool_key + shard
                job_id = self._ahead_job_of.get(key)
                # A copy of another block with the same key stays valid.
                if job_id is not None and self._ahead[job_id][key] == block_id:
                    self.overtaken.add(job_id)
                    self._void.setdefault(job_id, set()).add(key)

    def plan_stores(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock], meta: ConnectorMetadata
    ) -> None:
        """Find slots for the blocks, and add store jobs to the step's metadata."""
        if self._parts.width > 1:
            evicted, cold = pages_of(evicted), pages_of(cold)
        self._overtake(evicted, meta)
        if not self._copies_beside or (evicted and len(cold) <= self._along):
            evicted, cold = [*evicted, *cold], ()
        for index, blocks in self._by_part(evicted):
            if job := self._begin_store_job(blocks, index):
                meta.stores.append(job)
        for index, blocks in self._by_part(cold):
            if not (job := self._begin_store_job(blocks, index)):
                continue
            meta.ahead.append(job)
            keys = self._tickets[job.job_id].keys
            self._ahead[job.job_id] = dict(zip(keys, job.block_ids, strict=True))
            self._ahead_job_of.update(dict.fromkeys(keys, job.job_id))

    def complete_job(self, job_id: int, ok: bool, digests: Sequence[bytes] | None = None) -> None:
        """End a store job; `ok` is False if its copy failed. The device may have made `digests`."""
        ticket = self._tickets.pop(job_id)
        for key in self._ahead.pop(job_id, ()):
            self._ahead_job_of.pop(key, None)
        void = self._void.pop(job_id, ())
        verdicts = [ok and key not in void for key in ticket.keys]
        self._hierarchy.end_store(ticket, verdicts, digests=digests)
        if ok:
            num_blocks = len(ticket.keys) - len(void)
            self._counters.count_store(num_blocks, num_blocks * self._hierarchy.block_bytes)
        else:
            self._counters.count_failure("store_copy")

    def _overtake(self, evicted: Sequence[EvictedBlock], meta: ConnectorMetadata) -> None:
        """Make the step wait for running copies of cold blocks that it overwrites."""
        if self._ahead:
            job_of = self._ahead_job_of
            jobs = [job_of.get(block.key + shard) for block in evicted for shard in self._shards]
            self.overtaken.update([job_id for job_id in jobs if job_id is not None])
            meta.overtaken = sorted(self.overtaken & self._ahead.keys())
        self.overtaken.clear()

    def _by_part(self, blocks: Sequence[EvictedBlock]) -> list[tuple[int, Sequence[EvictedBlock]]]:
        if not blocks:
            return []
        if self._parts.width == 1:
            return [(0, blocks)]
        found: dict[int, list[EvictedBlock]] = {}
        for block in blocks:
            group = group_of(block.key)
            # The job of the first group also copies the pieces of states.
            group = group if group < self._parts.num_groups else 0
            found.setdefault(group, []).append(block)
        parts = enumerate(self._parts.all)
        return [(index, found[part.group]) for index, part in parts if part.group in found]

    def _begin_store_job(self, blocks: Sequence[EvictedBlock], index: int) -> CopyJob | None:
        # A pool evicts the tail of a sequence first, but the tiers store the head first. Blocks
        # with the same key have the same bytes.
        part, shard = self._parts.all[index], self._parts.suffixes[index][GROUP_BYTES:]
        ids = {block.key + shard: block.block_id for block in reversed(blocks)}
        ticket = self._hierarchy.begin_store(list(ids))
        self._counters.allocation_failures += bool(ticket.num_refused)
        if not ticket.keys:
            return None
        job = CopyJob(next(self._job_ids), [ids[key] for key in ticket.keys], ticket.slots, part)
        self._tickets[job.job_id] = ticket
        return job
