# SPDX-License-Identifier: Apache-2.0
"""The running requests' part of a step; `waiting/admission.py` then adds waiting requests."""

from __future__ import annotations

from ..request.request import Request, RequestStatus
from .request_states import RequestStates
from .step import StepBuilder


class RunningRound:
    """Schedules the running requests of a step: gives each request tokens, and their blocks.

    In order of admission, each request gets the tokens that it has not computed yet, within the
    budget. If a request lacks blocks, the policy chooses a request to preempt, which is also
    removed from the step. `scheduler.py` explains why no request is blocked without end."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._policy = states.context.policy
        self._pressure = states.pressure
        self._chunk_limit = states.context.config.most_step_tokens

    def run(self, step: StepBuilder) -> None:
        """Preempt requests under memory pressure, then give tokens to the remaining requests."""
        self._relieve(step)
        self._go_on(step)

    def add_drafts(self, step: StepBuilder) -> None:
        """Add the drafts of decoding requests, within the token budget that all other requests
        leave. Drafts take no block that another request may soon need."""
        manager, keep = self._states.context.manager, self._pressure.num_kept_from_drafts
        for index, entry in enumerate(step.entries):
            request, drafts = entry.request, entry.request.draft_token_ids
            if not drafts:
                continue
            request.draft_token_ids = ()
            # A draft beyond the answer's last possible token is useless.
            room = request.max_num_tokens - request.num_tokens - 1
            if manager.states is not None and manager.states.interval:
                room = min(room, manager.states.most_drafts(entry.end))
            drafts = drafts[: max(0, min(step.budget, self._chunk_limit - 1, room))]
            is_at_end = entry.end == request.num_tokens and not entry.num_placeholders
            if not drafts or step.pressed or entry.num_tokens != 1 or not is_at_end:
                continue
            request.num_computed_tokens = entry.num_computed_tokens  # the start of its window
            added = manager.allocate_slots(request, 1 + len(drafts), keep_free_blocks=keep)
            request.num_computed_tokens = entry.end
            if added is not None:
                step.add_drafts(index, drafts, added)

    def add_room(self, step: StepBuilder) -> None:
        """Allocate blocks for the drafts that the worker will propose, or let it propose fewer
        drafts. The blocks are never taken from blocks that another request may soon need."""
        manager, wanted = self._states.context.manager, step.wanted_drafts
        keep, forked = self._pressure.num_kept_from_drafts, manager.shared_tails.families
        for index, entry in enumerate(step.entries if wanted else ()):
            request = entry.request
            most = wanted.get(request.request_id)
            if most is None:
                continue
            added = None
            # No request may write to a block that forked requests still share.
            if not step.pressed and request.request_id not in forked:
                request.num_computed_tokens = entry.num_computed_tokens
                num_slots = entry.num_tokens + most
                added = manager.allocate_slots(request, num_slots, keep_free_blocks=keep)
                request.num_computed_tokens = entry.end
            if added is not None:
                step.add_room(index, added)
                continue
            room = manager.num_slots(request.request_id) - entry.end
            if room > 0 and request.request_id not in forked:
                wanted[request.request_id] = min(most, room)
            else:
                del wanted[request.request_id]

    def _relieve(self, step: StepBuilder) -> None:
        """Preempt requests, chosen by the policy, while too much of the pool is held. The only
        running request is never preempted."""
        states = self._states
        while len(states.running) > 1 and self._pressure.demands_preemption:
            if self._pressure.counts_pins and states.release_pin(states.running[0]):
                continue
            step.pressed = True
            if not states.give_up_last_load(spare=states.running[0]):
                victim = self._policy.victim(states.running)
                states.preempt(victim)
                if victim.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                    return  # the blocks are released when a copy to them has ended

    def _go_on(self, step: StepBuilder) -> None:
        states, manager = self._states, self._states.context.manager
        most_tokens, allocate = states.loads.most_tokens, manager.allocate_slots
        any_overlapped = states.loads.num_overlapped > 0
        block_size = manager.block_size
        last_offset = block_size - 1
        has_states = manager.states is not None
        decodes: list[Request] = []
        preempted, held = states.preempted_ids, step.held
        for request in tuple(states.running):  # a copy, because requests may be preempted
            if step.budget <= len(decodes):
                break
            if preempted and request.status is not RequestStatus.RUNNING:
                continue
            if held and request.request_id in held:
                continue
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens - computed + request.num_placeholders
            if any_overlapped:
                num_tokens = most_tokens(request) + request.num_placeholders
            elif (
                num_tokens == 1
                and 0 < computed % block_size < last_offset
                and computed == request.num_told_tokens
            ):
                # A decode in the middle of a block has a slot, and does not fill the block.
                decodes.append(request)
                continue
            if num_tokens <= 0:  # the request waits for a copy or for tokens being sampled
                continue
            num_tokens = min(num_tokens, self._chunk_limit, step.budget - len(decodes))
            if has_states or request.pictures:
                num_tokens = step.most_tokens(request, computed, num_tokens)
                if num_tokens == 0:  # no room for the embeddings of its next picture
                    continue
            added = allocate(request, num_tokens)
            while added is None and self._make_room(request, step, decodes):
                added = allocate(request, num_tokens)
            if added is None:
                break
            step.go_on(request, num_tokens, added)
        step.decode(decodes)

    def _make_room(self, request: Request, step: StepBuilder, decodes: list[Request]) -> bool:
        """Release the blocks of a pin, of a finished load or of a request that the policy chooses.
        Return False if `request` still lacks room, because the policy chose `request`, no other
        request runs, or a copy still writes to the chosen request's blocks."""
        states = self._states
        if states.release_pin(request):
            return True
        step.pressed = True
        if states.give_up_last_load(spare=request):
            return True
        if states.running == [request]:
            return False
        victim = self._policy.victim(states.running)
        if victim in step:
            step.revoke(victim)
        elif victim in decodes:
            decodes.remove(victim)
        states.preempt(victim, request)
        is_written_to = victim.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        return victim is not request and not is_written_to
