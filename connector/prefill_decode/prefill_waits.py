# SPDX-License-Identifier: Apache-2.0
"""Requests that wait while another engine computes their prompts.

    await_prefill ──► (the scheduler looks it up, and blocks are missing) ──► waiting ──► ended

`wait_limit.py` decides when and how a wait ends. After the wait the request loads the blocks that
other engines have stored, and computes all other blocks. A waiting request holds no blocks of the
pool. The prompt of a waiting request is followed (`followed_prompts.py`): its blocks come into the
slab during the wait. A request waits at most once, and only after a call of
`PromptsElsewhere.await_prefill`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ...tiers.block import DIGEST_BYTES
from ..base import PromptsElsewhere, RequestView
from ..connector_context import ConnectorContext
from ..costs.economics import UNMEASURED_SECONDS, Choice
from ..messages import Elsewhere
from ..request_offload import Lookup, RequestOffload
from .followed_prompts import Follows
from .wait_limit import LOOK_UP_SECONDS, MOST_RATIO, End, PrefillWait, WaitLimit

MOST_WAITING = 64  # requests; all are checked when blocks come
# The least computing time of a prompt for which a request waits.
LEAST_SECONDS = 0.1
# The longest wait without a new block if a setting chooses all loads, whatever their cost.
ALWAYS_SECONDS = 5.0


class PrefillWaits(PromptsElsewhere):
    """The waits of one connector, and its followed prompts. Wakes the engine when a wait ends."""

    def __init__(self, context: ConnectorContext) -> None:
        self._hierarchy = hierarchy = context.hierarchy
        self.follows = Follows(hierarchy, context.alarm)
        self._economics = context.economics
        self._counters = context.counters
        self._alarm = context.alarm
        self._requests = context.requests
        self._parts = parts = context.parts
        self._block_size = parts.block_size
        self._num_parts = parts.width
        # The tier from which other engines' blocks are read.
        self._tier = next(
            (store.name for store in hierarchy.stores if store.is_shared or store.is_read_only),
            None,
        )
        self.waiting: dict[str, RequestOffload] = {}  # by request id; read only
        self._counters.prefill_waits = {end.value: 0 for end in End}

    def expect_prompts(self) -> None:
        self.follows.start_watching()

    def follow_blocks(self, block_hashes: Sequence[bytes]) -> bool:
        # The last block may be partly filled, at the prompt's end.
        least_tokens = (len(block_hashes) - 1) * self._block_size + 1
        return (
            self.follows.track_prompt(self._parts.hit_keys(block_hashes, least_tokens)) is not None
        )

    def await_prefill(self, request_id: str, elsewhere: Elsewhere) -> None:
        if self._tier is not None and elsewhere is not Elsewhere.NO:
            self.follows.start_watching()
            offload = self._requests.setdefault(request_id, RequestOffload(request_id))
            offload.elsewhere = elsewhere

    def begin_wait(self, offload: RequestOffload, request: RequestView, lookup: Lookup) -> bool:
        """Make a request wait if another engine may compute its prompt and the wait saves time.
        Return whether the request waits. Called once for each request, after a look-up."""
        is_told = offload.elsewhere is Elsewhere.TOLD
        offload.elsewhere = Elsewhere.NO
        if len(self.waiting) >= MOST_WAITING or not self._hierarchy.others_are_up:
            return False
        # A request waits only for full blocks. Later tokens are computed here, unless a tier has
        # them.
        num_full = (request.num_tokens - 1) // self._block_size
        num_full = min(num_full, len(request.block_hashes)) - lookup.first
        num_full = min(num_full, len(lookup.keys) // self._num_parts)
        num_there = len(lookup.prefix.tiers)
        width = self._num_parts
        # A request does not wait for blocks before a window, which the other engine may lack too.
        needed = self._parts.needed(lookup.first, num_full)
        places = [place for place in needed if place >= num_there * width]
        if not places:
            return False
        limit = self._limit(lookup, num_there, num_full - num_there, is_told=is_told)
        if limit is None:
            return False
        last = lookup.keys[num_full * width - 1][:DIGEST_BYTES]
        states = self._parts.state_keys(last)  # stored with the last position
        prompt = self.follows.track_prompt([lookup.keys[place] for place in places] + states)
        if prompt is None:
            return False
        places += [(num_full - 1) * width] * len(states)
        positions = [place // width - num_there for place in (*places, num_full * width)]
        offload.wait = PrefillWait(limit, prompt, positions, time.monotonic())
        self.waiting[offload.request_id] = offload
        return True

    def poll_waits(self) -> bool:
        """Read the blocks that other engines have stored. Return whether a wait has ended."""
        self.follows.read_arrived()
        if not self.waiting:
            return False
        now = time.monotonic()
        is_lost = not self._hierarchy.others_are_up
        ended = []
        for offload in self.waiting.values():
            wait = offload.wait
            assert wait is not None
            num_there = wait.num_there
            # An alarm may be left from before the last blocks came; then a later alarm follows.
            is_due = now >= min(wait.look_at, wait.alarm_at)
            if num_there == wait.limit.num_there and not is_due and not is_lost:
                continue
            wait.limit.record_arrivals(num_there, now)
            end = wait.limit.decide_end(now) or (End.LOST if is_lost else None)
            if end is not None:
                ended.append((offload, end))
            else:
                self._look_again(wait, now)
        for offload, end in ended:
            self.end_wait(offload, end)
        return bool(ended)

    def end_wait(self, offload: RequestOffload, end: End) -> None:
        offload.elsewhere = Elsewhere.NO
        wait, offload.wait = offload.wait, None
        if wait is not None:
            del self.waiting[offload.request_id]
            self.follows.remove_prompt(wait.prompt)
            self._counters.count_prefill_wait(end.value, time.monotonic() - wait.began)

    def clear(self) -> None:
        for offload in list(self.waiting.values()):
            self.end_wait(offload, End.LOST)

    def _limit(
        self, lookup: Lookup, num_there: int, num_missing: int, *, is_told: bool
    ) -> WaitLimit | None:
        """The limit of a wait; None if the wait is not worth it."""
        economics, size = self._economics, self._block_size
        first_token = (lookup.first + num_there) * size
        now = time.monotonic()

        def compute_seconds(start: int, end: int) -> float | None:
            return economics.prefill.estimate_prefill(
                first_token + start * size, first_token + end * size
            )

        if economics.choice is not Choice.AUTO:
            if not is_told:
                return None  # arrivals have no computing time to compare with
            return WaitLimit(num_missing, now, lambda _start, _end: None, ALWAYS_SECONDS)
        seconds = compute_seconds(0, num_missing)
        if seconds is not None:
            assert self._tier is not None
            plan = economics.plan_loads(first_token, [self._tier] * num_missing)
            if seconds < LEAST_SECONDS or plan.num_blocks < num_missing:
                return None
        if is_told:
            return WaitLimit(num_missing, now, compute_seconds, UNMEASURED_SECONDS)
        if seconds is None:
            return None  # a wait needs a known cost of computing
        there = lookup.keys[: num_there * self._num_parts]
        num_before, since, last = self.follows.newest(there)
        num_before //= self._num_parts
        as_many = compute_seconds(-num_before, 0) or 0.0
        # An answer's blocks come one by one; a prompt's come as fast as a prompt is computed.
        if num_before < 2 or last - since > MOST_RATIO * as_many:
            return None
        limit = WaitLimit(
            num_missing, now, compute_seconds, UNMEASURED_SECONDS, num_before=num_before, last=last
        )
        return limit if limit.decide_end(now) is None else None

    def _look_again(self, wait: PrefillWait, now: float) -> None:
        """Set the alarm for the next check of the wait. Look up missing blocks in the stores again,
        if the next look-up is due."""
        if now >= wait.look_up_at:
            wait.look_up_at = now + LOOK_UP_SECONDS
            self._hierarchy.prefetch_lookup(wait.prompt.missing)
        wait.look_at = min(wait.limit.ends_at(), wait.look_up_at)
        if wait.alarm_at <= now or wait.look_at < wait.alarm_at:
            wait.alarm_at = wait.look_at
            self._alarm.at(wait.look_at)
