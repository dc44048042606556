# SPDX-License-Identifier: Apache-2.0
"""Memory pressure: when admission stops, and when a running request is preempted.

Two thresholds are fractions of the KV pool. If requests hold `admit_below` of the pool or more, no
request is admitted; above `preempt_above`, the last request in the policy's order is preempted. The
gap between the thresholds keeps a request from being admitted and preempted again and again. A
request is admitted only if its whole prompt, with the uncomputed rest of the running prompts, fits
below `preempt_above`. A threshold of 1 disables its check. Blocks that no request holds count as
free, even if prefix lookups can find them.

With `--reserve`, a request gets its first block only if there is room for its prompt (with `full`,
also for its longest answer) beside the blocks that earlier requests may still take:

    | held            | earlier ones may take | this one may take |  free  |
                                                            preempt_above

If every request reserves up to its longest answer, no running request ever lacks room."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ..cache.kv_block import GroupBlocks
from ..request.request import Request
from .context import SchedulerContext
from .request_loads import RequestLoads


class MemoryPressure:
    """Compares the held blocks of the pool with the thresholds; changes nothing."""

    def __init__(self, context: SchedulerContext) -> None:
        # Without tiers, pinned blocks count as held and keep new requests out. With tiers, pins are
        # given up only when no block is free, because an earlier release would help no request.
        self.counts_pins = not context.connector.has_tiers
        self._manager = manager = context.manager
        config = context.config
        self._usable = manager.pool.num_usable
        self._most_requests = config.max_num_seqs
        self._admit_blocks = config.admit_below * self._usable
        self._preempt_blocks = config.preempt_above * self._usable

    @property
    def forbids_admission(self) -> bool:
        """Whether so many blocks are held that no further request should start."""
        return self._num_held >= self._admit_blocks

    @property
    def demands_preemption(self) -> bool:
        """Whether so many blocks are held that a running request must be preempted."""
        return self._num_held > self._preempt_blocks

    @property
    def num_kept_from_drafts(self) -> int:
        """The number of free blocks that drafts must leave: the blocks above `preempt_above`, and
        at least one per cache group for every request of a full batch."""
        manager = self._manager
        limit = self._usable - int(self._preempt_blocks)
        return max(limit, manager.watermark_blocks, self._most_requests * manager.num_groups)

    def has_room_for(
        self, request: Request, hits: GroupBlocks | None, running: Iterable[Request]
    ) -> bool:
        """Whether `request` can compute its whole prompt without preempting another request."""
        if self._preempt_blocks >= self._usable:
            return True
        most = self._preempt_blocks - self._num_held
        missing = self._manager.num_missing_blocks(request, hits)
        for other in running:
            if other.num_tokens - other.num_computed_tokens > 1:  # in the middle of its prompt
                missing += self._manager.num_missing_blocks(other)
        return missing <= most

    @property
    def _num_held(self) -> int:
        pool = self._manager.pool
        return pool.num_held if self.counts_pins else pool.num_held - pool.num_reclaimable


class Holders(Protocol):
    """The requests that hold blocks, in the attributes of `RequestStates`."""

    context: SchedulerContext
    running: list[Request]
    loaded: list[Request]
    loads: RequestLoads


class Reservations:
    """Counts the blocks reserved for requests that hold blocks, and checks room for the next
    request. Each round of admission recomputes the reservations from the blocks that requests
    hold."""

    def __init__(self, states: Holders) -> None:
        self._states = states
        config, self._manager = states.context.config, states.context.manager
        self._is_full = config.reserve == "full"
        self._most_blocks = int(config.preempt_above * self._manager.pool.num_usable)
        self._spare: int | None = None  # blocks that are not reserved; None: not counted yet
        self._needed = 0  # blocks for the last request that was found to have room

    def recount(self) -> None:
        """Recompute the spare blocks at the next check: blocks were allocated or released."""
        self._spare = None

    def has_room_for(self, request: Request, hits: GroupBlocks | None, num_more: int = 0) -> bool:
        """Whether a waiting request may get blocks. `hits` are its cached blocks; `num_more`
        further blocks are for copies, or for the states of a load. Always True if the request holds
        blocks, which implies a reservation, or if no other request holds blocks."""
        states = self._states
        if request.num_computed_tokens > 0:
            return True
        if self._spare is None:
            self._spare = self._count_spare_blocks()
        needed = self._manager.num_to_reserve(self._tokens_of(request), hits)
        self._needed = needed + num_more
        if self._needed <= self._spare:
            return True
        return not (states.running or states.loaded or states.loads.blocking)

    def commit_reserved(self) -> bool:
        """Reserve the room that the last call of `has_room_for` found. Returns True."""
        if self._spare is not None:
            self._spare -= self._needed
        self._needed = 0
        return True

    def _tokens_of(self, request: Request) -> int:
        """Return the number of tokens to reserve room for. An answer's last token needs no slot."""
        return request.max_num_tokens - 1 if self._is_full else request.num_tokens

    def _count_spare_blocks(self) -> int:
        states, pool = self._states, self._manager.pool
        loading = [each for each in states.loads.blocking if not each.is_finished]
        holders = [*states.running, *states.loaded, *loading]
        if not self._is_full:
            holders = [each for each in holders if each.num_computed_tokens < each.num_tokens - 1]
        wanted = {each.request_id: self._tokens_of(each) for each in holders}
        return self._most_blocks - pool.num_held - self._manager.num_reserved(wanted)
