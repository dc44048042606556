# SPDX-License-Identifier: Apache-2.0
"""WaitLimit: how long a request waits for another engine's prompt, and how the wait ends.

whole     all full blocks of the prompt can be loaded
slow      at the rate at which blocks come, computing the rest here ends sooner
stalled   no block has come for too long
capped    MOST_SECONDS are over
lost      the store that engines share is down, or all tiers were cleared
gone      the request itself has ended
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .followed_prompts import FOLLOW_SECONDS, FollowedPrompt

MOST_SECONDS = FOLLOW_SECONDS
# Time for blocks to get from the engine that computed them to the store, and for its news of them.
GRACE_SECONDS = 0.1
# The longest wait to expect, as a multiple of computing here. Above 1: an engine like this one
# needs as long, and a wait costs requests that run here nothing.
MOST_RATIO = 1.5
# The store is asked again about missing blocks, since its news of them may have been lost.
LOOK_UP_SECONDS = 1.5


@dataclass(slots=True, eq=False)
class WaitLimit:
    """The limit of a wait for `num_blocks` blocks, of which none is there at `began`.

    `compute_seconds(start, end)` is the time to compute the blocks from `start` to `end` here, None
    if it is unknown or not to be looked at; `unknown_seconds` may then pass without a block.
    `num_before` blocks in front of these came shortly before, the last one at `last`; they are then
    all that is known of the engine that computes the others.
    """

    num_blocks: int
    began: float  # monotonic, as all moments here
    compute_seconds: Callable[[int, int], float | None]
    unknown_seconds: float
    num_before: int = 0
    last: float | None = None
    num_there: int = field(default=0, init=False)
    _last: float = field(init=False)  # when some came, or the wait began
    _first: tuple[float, int] | None = field(default=None, init=False)  # when any came, how many
    _longest: float = field(default=0.0, init=False)  # seconds between two of these moments

    def __post_init__(self) -> None:
        self._last = self.began if self.last is None else self.last

    def record_arrivals(self, num_there: int, now: float) -> None:
        """Record that so many of the blocks, the leading ones, are there now."""
        if num_there <= self.num_there:
            return
        self._longest = max(self._longest, now - self._last)
        self.num_there, self._last = num_there, now
        if self._first is None:
            self._first = now, num_there

    def ends_at(self) -> float:
        """The moment at which the wait ends if no block comes before."""
        return min(self.began + MOST_SECONDS, self._last + self._next_seconds())

    def decide_end(self, now: float) -> End | None:
        """The way in which the wait ends now, None if it does not."""
        if self.num_there >= self.num_blocks:
            return End.WHOLE
        if now >= self.began + MOST_SECONDS:
            return End.CAPPED
        if now >= self.ends_at():
            return End.STALLED
        return End.SLOW if self._is_slow() else None

    def _next_seconds(self) -> float:
        """Seconds to wait for the next blocks. After the first ones, the larger of twice the
        longest gap so far and the time to compute as many here; never much longer than computing
        all that is missing."""
        rest = self.compute_seconds(self.num_there, self.num_blocks)
        if rest is None:
            return self.unknown_seconds
        most = MOST_RATIO * rest
        num_came = self.num_there + self.num_before
        if num_came:
            as_many = self.compute_seconds(-self.num_before, self.num_there) or 0.0
            most = min(most, max(2 * self._longest, as_many))
        return GRACE_SECONDS + most

    def _is_slow(self) -> bool:
        if self._first is None or self.num_there == self._first[1]:
            return False  # one moment is no rate
        rest = self.compute_seconds(self.num_there, self.num_blocks)
        if rest is None:
            return False
        since, num_first = self._first
        rate = (self._last - since) / (self.num_there - num_first)
        return rate * (self.num_blocks - self.num_there) > MOST_RATIO * rest


class End(Enum):
    """The way in which a wait ended; the value is the label in metrics."""

    WHOLE = "whole"
    SLOW = "slow"
    STALLED = "stalled"
    CAPPED = "capped"
    LOST = "lost"
    GONE = "gone"


@dataclass(slots=True, eq=False)
class PrefillWait:
    """The wait of one request."""

    limit: WaitLimit
    prompt: FollowedPrompt
    positions: list[int]  # that are there, by the number of the prompt's keys that are
    began: float
    look_up_at: float = field(init=False)
    look_at: float = field(init=False)  # even if nothing comes
    alarm_at: float = field(default=math.inf, init=False)  # the next one

    def __post_init__(self) -> None:
        self.look_up_at = self.began + LOOK_UP_SECONDS
        self.look_at = self.began

    @property
    def num_there(self) -> int:
        """Leading positions that are there."""
        return self.positions[self.prompt.num_there]
