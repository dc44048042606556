# SPDX-License-Identifier: Apache-2.0
"""Requests that wait while another engine computes their prompts.

    expect ──► (the scheduler asks for it, and blocks are missing) ──► waiting ──► ended

A wait ends in one of these ways, and the request then loads what has come and computes the rest:

    whole     all full blocks of the prompt can be loaded
    slow      at the rate at which blocks come, computing the rest here is done sooner
    stalled   nothing has come for too long
    capped    MOST_SECONDS are over
    lost      the store that others share is away, or all tiers were told to forget
    gone      the request itself has ended

Such a request holds no blocks of the pool. Its prompt is followed (`followed_prompts.py`), so that
what comes is in the slab by then. A request waits once at most, and only where a node is known to
compute its prompt; see `PromptsElsewhere.await_prefill`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from enum import Enum

from ...tiers.hierarchy.hierarchy import Hierarchy
from ...tiers.mailbox import Alarm
from ..base import PromptsElsewhere, RequestView
from ..costs.economics import UNMEASURED_SECONDS, Choice, Economics
from ..counters import OffloadCounters
from ..lookups import Lookup
from ..messages import Elsewhere
from ..parts import Parts
from .followed_prompts import FOLLOW_SECONDS, FollowedPrompt, Follows

MOST_SECONDS = FOLLOW_SECONDS
MOST_WAITING = 64  # requests; each is looked at when anything comes
# Computing less than this here is not worth a wait.
LEAST_SECONDS = 0.1
# For blocks to get from where they were computed to the news of them: to the store, and its word.
GRACE_SECONDS = 0.1
# How many times as long as computing here a wait may be expected to take. Above 1: an engine like
# this one needs as long, and a wait costs those that run here nothing.
MOST_RATIO = 1.5
# Where loads are always chosen, whatever they cost: as long may nothing come.
ALWAYS_SECONDS = 5.0
# The store is asked again about what is missing, since news of it may have been lost.
LOOK_UP_SECONDS = 1.5


class End(Enum):
    """How a wait ended; the value is the label in metrics."""

    WHOLE = "whole"
    SLOW = "slow"
    STALLED = "stalled"
    CAPPED = "capped"
    LOST = "lost"
    GONE = "gone"


class WaitLimit:
    """How long to wait for `num_blocks` blocks, of which none is there at `began`.

    `compute_seconds(start, end)` is what computing the blocks from `start` to `end` takes here,
    None where that is not known or not to be looked at; `unknown_seconds` may then pass without a
    block. `num_before` blocks in front of these came shortly before, the last one at `last`: this
    is then all that is known of somebody who computes the others.
    """

    def __init__(
        self,
        num_blocks: int,
        began: float,
        compute_seconds: Callable[[int, int], float | None],
        unknown_seconds: float,
        *,
        num_before: int = 0,
        last: float | None = None,
    ) -> None:
        self.num_there = 0
        self._num_blocks = num_blocks
        self._cap = began + MOST_SECONDS
        self._compute_seconds = compute_seconds
        self._unknown_seconds = unknown_seconds
        self._num_before = num_before
        self._first: tuple[float, int] | None = None  # when any came, and how many
        self._last = began if last is None else last  # when some came
        self._longest = 0.0  # seconds between two of these moments

    def record_arrivals(self, num_there: int, now: float) -> None:
        """So many of the blocks, the leading ones, are there now."""
        if num_there <= self.num_there:
            return
        self._longest = max(self._longest, now - self._last)
        self.num_there, self._last = num_there, now
        if self._first is None:
            self._first = now, num_there

    def ends_at(self) -> float:
        """When the wait ends if nothing comes before."""
        return min(self._cap, self._last + self._next_seconds())

    def decide_end(self, now: float) -> End | None:
        """How the wait ends now, None if it does not."""
        if self.num_there >= self._num_blocks:
            return End.WHOLE
        if now >= self._cap:
            return End.CAPPED
        if now >= self.ends_at():
            return End.STALLED
        return End.SLOW if self._is_slow() else None

    def _next_seconds(self) -> float:
        """How long to wait for the next blocks. After the first ones twice as long as any took so
        far, or as long as computing so many here; never much longer than computing all that is
        missing."""
        rest = self._compute_seconds(self.num_there, self._num_blocks)
        if rest is None:
            return self._unknown_seconds
        most = MOST_RATIO * rest
        num_came = self.num_there + self._num_before
        if num_came:
            as_many = self._compute_seconds(-self._num_before, self.num_there) or 0.0
            most = min(most, max(2 * self._longest, as_many))
        return GRACE_SECONDS + most

    def _is_slow(self) -> bool:
        if self._first is None or self.num_there == self._first[1]:
            return False  # one moment is no rate
        rest = self._compute_seconds(self.num_there, self._num_blocks)
        if rest is None:
            return False
        since, num_first = self._first
        rate = (self._last - since) / (self.num_there - num_first)
        return rate * (self._num_blocks - self.num_there) > MOST_RATIO * rest


class _Wait:
    """One request's."""

    def __init__(
        self, limit: WaitLimit, prompt: FollowedPrompt, positions: list[int], began: float
    ) -> None:
        self.limit = limit
        self.prompt = prompt
        self._positions = positions  # that are there, by how many of the prompt's keys are
        self.began = began
        self.look_up_at = began + LOOK_UP_SECONDS
        self.look_at = began  # even if nothing comes
        self.alarm_at = math.inf  # the next one

    @property
    def num_there(self) -> int:
        """Leading positions that are there."""
        return self._positions[self.prompt.num_there]


class PrefillWaits(PromptsElsewhere):
    """The waits of one connector, and the prompts that it follows. `alarm` wakes the engine where
    one is to end. True while there is any."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        economics: Economics,
        counters: OffloadCounters,
        alarm: Alarm,
        parts: Parts,
    ) -> None:
        self._hierarchy = hierarchy
        self.follows = Follows(hierarchy, alarm)
        self._economics = economics
        self._counters = counters
        self._alarm = alarm
        self._block_size = parts.block_size
        self._parts = parts
        self._num_parts = parts.width
        # Where others' blocks come to.
        self._tier = next(
            (store.name for store in hierarchy.stores if store.is_shared or store.is_read_only),
            None,
        )
        self._expected: dict[str, bool] = {}  # by request id: whether this one was told
        self._waits: dict[str, _Wait] = {}
        counters.prefill_waits = {end.value: 0 for end in End}

    @property
    def request_ids(self) -> Collection[str]:
        """The requests that wait, at any time."""
        return self._waits.keys()

    @property
    def expects_any(self) -> bool:
        """Whether `begin_wait` could do anything for some request."""
        return bool(self._expected)

    def __bool__(self) -> bool:
        return bool(self._waits or self.follows)

    def expect_prompts(self) -> None:
        self.follows.start_watching()

    def follow_blocks(self, block_hashes: Sequence[bytes]) -> bool:
        # The last block may be the prompt's end, which fills a part of it.
        least_tokens = (len(block_hashes) - 1) * self._block_size + 1
        return (
            self.follows.track_prompt(self._parts.hit_keys(block_hashes, least_tokens)) is not None
        )

    def await_prefill(self, request_id: str, elsewhere: Elsewhere) -> None:
        if self._tier is not None and elsewhere is not Elsewhere.NO:
            self.follows.start_watching()
            self._expected[request_id] = elsewhere is Elsewhere.TOLD

    def begin_wait(self, request: RequestView, lookup: Lookup) -> bool:
        """Have the request wait, if it is to and that is worth it; asked once for each. `lookup` is
        what the tiers have of it now."""
        is_told = self._expected.pop(request.request_id, None)
        if is_told is None or len(self._waits) >= MOST_WAITING or not self._hierarchy.others_are_up:
            return False
        # What follows the full blocks is computed here, unless it happens to be there too.
        num_full = (request.num_tokens - 1) // self._block_size
        num_full = min(num_full, len(request.block_hashes)) - lookup.first
        num_full = min(num_full, len(lookup.keys) // self._num_parts)
        num_there = len(lookup.prefix.tiers)
        width = self._num_parts
        # Blocks that a window has left behind may never come: whoever computes may lack them too.
        needed = self._parts.needed(lookup.first, num_full)
        places = [place for place in needed if place >= num_there * width]
        if not places:
            return False
        limit = self._limit(lookup, num_there, num_full - num_there, is_told=is_told)
        if limit is None:
            return False
        prompt = self.follows.track_prompt([lookup.keys[place] for place in places])
        if prompt is None:
            return False
        positions = [place // width - num_there for place in (*places, num_full * width)]
        self._waits[request.request_id] = _Wait(limit, prompt, positions, time.monotonic())
        return True

    def poll_waits(self) -> bool:
        """Take in what has come; whether a wait has ended."""
        self.follows.read_arrived()
        if not self._waits:
            return False
        now = time.monotonic()
        is_lost = not self._hierarchy.others_are_up
        ended = []
        for request_id, wait in self._waits.items():
            num_there = wait.num_there
            # An alarm may have come for what was due before more was there; the next one follows.
            is_due = now >= min(wait.look_at, wait.alarm_at)
            if num_there == wait.limit.num_there and not is_due and not is_lost:
                continue
            wait.limit.record_arrivals(num_there, now)
            end = wait.limit.decide_end(now) or (End.LOST if is_lost else None)
            if end is not None:
                ended.append((request_id, end))
            else:
                self._look_again(wait, now)
        for request_id, end in ended:
            self._finish_wait(request_id, end, now)
        return bool(ended)

    def cancel_wait(self, request_id: str) -> None:
        """The request is gone."""
        self._expected.pop(request_id, None)
        if request_id in self._waits:
            self._finish_wait(request_id, End.GONE, time.monotonic())

    def clear(self) -> None:
        """Nobody waits any longer."""
        for request_id in list(self._waits):
            self._finish_wait(request_id, End.LOST, time.monotonic())

    def _limit(
        self, lookup: Lookup, num_there: int, num_missing: int, *, is_told: bool
    ) -> WaitLimit | None:
        """None where a wait is not worth it."""
        economics, size = self._economics, self._block_size
        first_token = (lookup.first + num_there) * size
        now = time.monotonic()

        def compute_seconds(start: int, end: int) -> float | None:
            return economics.prefill.estimate_prefill(
                first_token + start * size, first_token + end * size
            )

        if economics.choice is not Choice.AUTO:
            if not is_told:
                return None  # there is nothing that a rate could be compared to
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
            return None  # as above
        there = lookup.keys[: num_there * self._num_parts]
        num_before, since, last = self.follows.newest(there)
        num_before //= self._num_parts
        as_many = compute_seconds(-num_before, 0) or 0.0
        # Blocks of an answer come one by one; a prompt's come as quickly as prompts are computed.
        if num_before < 2 or last - since > MOST_RATIO * as_many:
            return None
        limit = WaitLimit(
            num_missing, now, compute_seconds, UNMEASURED_SECONDS, num_before=num_before, last=last
        )
        return limit if limit.decide_end(now) is None else None

    def _look_again(self, wait: _Wait, now: float) -> None:
        """See to it that the wait is looked at when something is due."""
        if now >= wait.look_up_at:
            wait.look_up_at = now + LOOK_UP_SECONDS
            self._hierarchy.prefetch_lookup(wait.prompt.missing)
        wait.look_at = min(wait.limit.ends_at(), wait.look_up_at)
        if wait.alarm_at <= now or wait.look_at < wait.alarm_at:
            wait.alarm_at = wait.look_at
            self._alarm.at(wait.look_at)

    def _finish_wait(self, request_id: str, end: End, now: float) -> None:
        wait = self._waits.pop(request_id)
        self.follows.remove_prompt(wait.prompt)
        self._counters.count_prefill_wait(end.value, now - wait.began)
