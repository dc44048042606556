# SPDX-License-Identifier: Apache-2.0
"""The running requests' part of a step; what joins them is admission's (`admission.py`)."""

from __future__ import annotations

from ..config.engine_config import SchedulerConfig
from ..request.request import Request
from .places import Places
from .pressure import MemoryPressure
from .step import StepBuilder


class RunningRound:
    """The running requests' part of a step: tokens for each, and room for them.

    Each gets the tokens it lacks, in order of admission, as far as the budget goes. Where one finds
    no room, the policy says who goes back, also one that has its tokens already: it is taken out of
    the step again. `scheduler.py` says why that blocks nobody for ever.
    """

    def __init__(self, config: SchedulerConfig, places: Places, pressure: MemoryPressure) -> None:
        self._places = places
        self._pressure = pressure
        self._chunk_limit = config.most_step_tokens

    def run(self, step: StepBuilder) -> None:
        """Send back whom memory has no room for, then let the others go on."""
        self._relieve(step)
        self._go_on(step)

    def _relieve(self, step: StepBuilder) -> None:
        """Send back whom the policy says while too much of the pool is held; never the only one."""
        places = self._places
        while len(places.running) > 1 and self._pressure.demands_preemption:
            if self._pressure.counts_pins and places.release_pin(places.running[0]):
                continue
            step.pressed = True
            if not places.give_up_last_load(spare=places.running[0]):
                victim = places.policy.victim(places.running)
                places.preempt(victim)
                step.preempted_ids.add(victim.request_id)
                if victim.request_id in places.loading:
                    return  # its blocks come back when a copy to them has ended

    def _go_on(self, step: StepBuilder) -> None:
        running = self._places.running
        loading, progress = self._places.loading, self._places.progress
        allocate = self._places.manager.allocate_slots
        any_overlapped = loading.num_overlapped > 0
        block_size = self._places.manager.block_size
        last_offset = block_size - 1
        decodes: list[Request] = []
        preempted, held = step.preempted_ids, step.held
        for request in tuple(running):  # of which those are taken that must make room
            if step.budget <= len(decodes):
                break
            if preempted and request.request_id in preempted:
                continue
            if held and request.request_id in held:
                continue
            computed = request.num_computed_tokens
            num_tokens = request.num_tokens - computed + request.num_placeholders
            if any_overlapped:
                limit = loading.most_tokens(request, progress[request.request_id])
                num_tokens = limit + request.num_placeholders
            elif (
                num_tokens == 1
                and 0 < computed % block_size < last_offset
                and computed == request.num_told_tokens
            ):
                # In the middle of a block: its slot is there, and the block is not full yet.
                decodes.append(request)
                continue
            if num_tokens == 0:  # it waits for a copy, or for its last token
                continue
            num_tokens = min(num_tokens, self._chunk_limit, step.budget - len(decodes))
            added = allocate(request, num_tokens)
            while added is None and self._make_room(request, step, decodes):
                added = allocate(request, num_tokens)
            if added is None:
                break
            step.go_on(request, num_tokens, added)
        step.decode(decodes)

    def _make_room(self, request: Request, step: StepBuilder, decodes: list[Request]) -> bool:
        """Take blocks from whoever the policy says. False: that is `request` itself, which has been
        preempted, or waits where it is if it is the only one. Or a copy still writes to the blocks
        of the victim, and `request` waits for those."""
        places = self._places
        if places.release_pin(request):
            return True
        step.pressed = True
        if places.give_up_last_load(spare=request):
            return True
        if places.running == [request]:
            return False
        victim = places.policy.victim(places.running)
        if victim.request_id in step.entries:
            step.revoke(victim)
        elif victim in decodes:
            decodes.remove(victim)
        places.preempt(victim, request)
        step.preempted_ids.add(victim.request_id)
        return victim is not request and victim.request_id not in places.loading
