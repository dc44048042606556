# SPDX-License-Identifier: Apache-2.0
"""StateSlots: the states of running requests on the device, copied to and from pages of the pool.

A request has one or more slots while it is in the batch. The current slot of a request has the
states after all of its computed tokens. A step does the following, in this order:

    pages ──► slot       for requests that start at a saved state (checkpoint); before anything else
    forward pass         reads and writes each request's slot, and writes spare slots
    slots ──► pages      checkpoints: states that the step must save
    slot ──► slot        from a request whose prompt has ended to its forks

In a step with draft tokens, the states after each row are written to a separate slot. The request
continues from the slot of the last accepted draft. The next step finds this slot by the number of
computed tokens.

    computed 7, drafts a b     row 0 ──► slot 1     row 1 (a) ──► slot 2     row 2 (b) ──► slot 3
    next step: computed 9      continues from slot 2

A saved slot fills its pages in order; the last page is padded with zeros."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from ...tiers.settings.sizes import rough_size
from ...tiers.settings.values import ConfigError
from ..batch.batch_update import IntArray
from ..cache.group_spec import NUM_SPARE_STATES, num_state_slots, states_of_request
from ..models.states.running_states import RunningStates
from ..models.states.state_plan import StatePlan, StateSequence, StateStep
from ..models.states.state_spec import StateSpec
from ..sampling.copies import to_device
from ..scheduler.output import NewRequestData, SchedulerOutput
from .input_batch import InputBatch


@dataclass(slots=True)
class _RequestSlots:
    """The slots of one request."""

    slots: list[int]
    current: int  # index in `slots`: the states after its computed tokens
    # For a step with drafts: the tokens computed before it, and the slot of each of its rows.
    drafted_from: int = 0
    drafted: list[int] | None = None

    def move_to(self, num_computed: int) -> None:
        """Select the slot after `num_computed` tokens, the last of which may be accepted drafts."""
        if self.drafted is not None:
            num_rows = num_computed - self.drafted_from
            if num_rows:  # 0: no row counts, and the present slot stays valid
                self.current = self.drafted[num_rows - 1]
            self.drafted = None


class StateSlots:
    """The slots of one batch. `pool` is `[pages, …]`; the memory of each page is contiguous."""

    def __init__(
        self, running: RunningStates, pool: Tensor, batch: InputBatch, *, most_drafts: int = 0
    ) -> None:
        """The last NUM_SPARE_STATES slots and the free slots take states in the middle of chunks.
        All other slots are for requests, `states_of_request(most_drafts)` slots for each."""
        self._running = running
        self._batch = batch
        self._pages = pool.view(torch.uint8).view(len(pool), -1)
        first_spare = len(running.raw) - NUM_SPARE_STATES
        self._spare = range(first_spare, len(running.raw))
        each = states_of_request(most_drafts)
        firsts = range(first_spare - each, -1, -each)
        self._free = [list(range(first, first + each)) for first in firsts]
        self._requests: dict[str, _RequestSlots] = {}
        self._saves: list[tuple[int, list[int]]] = []  # checkpoints of the step: slot, pages

    @classmethod
    def allocate(
        cls,
        spec: StateSpec,
        compute: torch.dtype,
        pool: Tensor,
        batch: InputBatch,
        *,
        num_requests: int,
        num_pages: int,
        most_drafts: int = 0,
    ) -> StateSlots:
        """Allocate the slots of `num_requests` requests. The saved states of a request take
        `num_pages` pages of the pool. Raises ConfigError if the device lacks the memory."""
        num_slots = num_state_slots(num_requests, most_drafts)
        page_bytes = pool[0].numel() * pool.element_size()
        slot_bytes = num_pages * page_bytes
        try:
            running = RunningStates(spec, num_slots, compute, pool.device, slot_bytes=slot_bytes)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"the states of {num_requests} requests ({rough_size(num_slots * slot_bytes)}) do "
                "not fit into memory; lower --max-num-seqs"
            ) from error
        return cls(running, pool, batch, most_drafts=most_drafts)

    def begin_step(self, output: SchedulerOutput) -> None:
        """Free the slots of leaving requests, and read the saved states of entering requests."""
        for request_id in (*output.finished_request_ids, *output.preempted_request_ids):
            self._release(request_id)
        for new in output.new_requests:
            self._enter(new.request_id, new.state_page_ids)
        cached = output.cached_requests
        for request_id in cached.resumed_request_ids:
            self._enter(request_id, cached.state_page_ids.get(request_id, []))

    def plan_step(
        self, output: SchedulerOutput, rows: IntArray, computed: IntArray, counts: IntArray
    ) -> StateStep:
        """Return the state slots that a step reads and writes. Each of `rows` of the batch has
        `computed` tokens already and computes `counts` tokens, in this order."""
        spare = chain(self._spare, chain.from_iterable(self._free))
        sequences: list[StateSequence] = []
        start = 0
        self._saves.clear()
        both = zip(rows.tolist(), computed.tolist(), counts.tolist(), strict=True)
        for row, num_computed, count in both:
            request = self._batch.requests[row]
            assert request is not None
            request_id, end = request.request_id, start + count
            own = self._requests[request_id]
            own.move_to(num_computed)
            source = own.current if num_computed else None
            behind: dict[int, int] = {}  # row → slot for the states before the row
            if request_id in output.draft_token_ids:
                others = [slot for slot in own.slots if slot != own.current]
                own.drafted_from, own.drafted = num_computed, others[:count]
                behind = dict(zip(range(start + 1, end + 1), own.drafted, strict=True))
            else:
                behind[end] = own.current
            for position, page_ids in output.state_saves.get(request_id, ()):
                at = start + position - num_computed
                if at not in behind:
                    behind[at] = next(spare)
                self._saves.append((behind[at], page_ids))
            saves = tuple(sorted(behind.items()))
            sequences.append(StateSequence(start, end, source, saves))
            start = end
        plan = StatePlan(sequences, start, self._running.raw.device)
        return StateStep(plan, self._running)

    def end_step(self, new_requests: list[NewRequestData]) -> None:
        """Save states to pages after the forward pass, and copy the slots of requests to their
        forks."""
        for slot, page_ids in self._saves:
            self._pages.index_copy_(0, self._ids(page_ids), self._pieces(slot))
        self._saves.clear()
        raw, requests = self._running.raw, self._requests
        for new in new_requests:
            if new.fork_of:
                raw[requests[new.request_id].current] = raw[requests[new.fork_of].current]

    def _enter(self, request_id: str, page_ids: list[int]) -> None:
        self._release(request_id)  # a failed step may have left slots
        slots = self._free.pop()
        self._requests[request_id] = _RequestSlots(slots, slots[0])
        if page_ids:
            torch.index_select(self._pages, 0, self._ids(page_ids), out=self._pieces(slots[0]))

    def _release(self, request_id: str) -> None:
        own = self._requests.pop(request_id, None)
        if own is not None:
            self._free.append(own.slots)

    def _pieces(self, slot: int) -> Tensor:
        """Return the bytes of a slot, uint8 `[pages, bytes of a page]`, as a view."""
        pieces: Tensor = self._running.raw[slot].view(-1, self._pages.shape[1])
        return pieces

    def _ids(self, page_ids: list[int]) -> Tensor:
        return to_device(np.array(page_ids, np.int64), self._pages.device)


def lone_step(
    spec: StateSpec, compute: torch.dtype, device: torch.device, num_rows: int
) -> StateStep:
    """Return the states of a step that computes the first `num_rows` tokens of a single request, in
    a slot made for it. Such a step serves to measure memory or to compile kernels."""
    running = RunningStates(spec, 1, compute, device)
    sequence = StateSequence(0, num_rows, None, ((num_rows, 0),))
    return StateStep(StatePlan([sequence], num_rows, device), running)
