# SPDX-License-Identifier: Apache-2.0
"""WaitLimit: decides when and how a request's wait for another engine's prefill ends.

whole     all full blocks of the prompt can be loaded
slow      this engine computes the missing blocks quicker than the other engine stores them
stalled   no new block can be loaded for too long
capped    MOST_SECONDS have passed
lost      the store that engines share is down, or all tiers were cleared
gone      the request itself has ended"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from .followed_prompts import FOLLOW_SECONDS, FollowedPrompt

MOST_SECONDS = FOLLOW_SECONDS
# The time in which a computed block is written to the store and reported by the store.
GRACE_SECONDS = 0.1
# The longest wait, as a multiple of the time in which this engine computes the blocks. The ratio is
# above 1, because an equal engine needs as long, and a wait delays no other request.
MOST_RATIO = 1.5
# The time between look-ups of missing blocks in the store, whose reports may have been lost.
LOOK_UP_SECONDS = 1.5


@dataclass(slots=True, eq=False)
class WaitLimit:
    """The limit of a wait for `num_blocks` blocks, none of which a tier has at the time `began`.

    `compute_seconds(start, end)` is the time in which this engine computes the blocks from `start`
    to `end`. If the time is None (unknown or ignored), the wait ends after `unknown_seconds`
    without a new block. Other engines stored the `num_before` preceding blocks shortly before the
    wait, the last block at `last`; these blocks show the speed of the other engine."""

    num_blocks: int
    began: float  # monotonic, like all times here
    compute_seconds: Callable[[int, int], float | None]
    unknown_seconds: float
    num_before: int = 0
    last: float | None = None
    num_there: int = field(default=0, init=False)
    _last: float = field(init=False)  # time of the last arrival, or `began`
    _first: tuple[float, int] | None = field(default=None, init=False)  # first arrival
    _longest: float = field(default=0.0, init=False)  # longest time between arrivals

    def __post_init__(self) -> None:
        self._last = self.began if self.last is None else self.last

    def record_arrivals(self, num_there: int, now: float) -> None:
        """Record that the first `num_there` of the blocks can be loaded now."""
        if num_there <= self.num_there:
            return
        self._longest = max(self._longest, now - self._last)
        self.num_there, self._last = num_there, now
        if self._first is None:
            self._first = now, num_there

    def ends_at(self) -> float:
        """The time at which the wait ends if no further block is stored."""
        return min(self.began + MOST_SECONDS, self._last + self._next_seconds())

    def decide_end(self, now: float) -> End | None:
        """Return the reason for which the wait ends now; None if the wait goes on."""
        if self.num_there >= self.num_blocks:
            return End.WHOLE
        if now >= self.began + MOST_SECONDS:
            return End.CAPPED
        if now >= self.ends_at():
            return End.STALLED
        return End.SLOW if self._is_slow() else None

    def _next_seconds(self) -> float:
        """The seconds to wait for the next blocks: GRACE_SECONDS, and at most MOST_RATIO times the
        time in which this engine computes all missing blocks. After the first arrival also at most
        twice the longest gap so far, or the time to compute the arrived blocks if longer."""
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
            return False  # one arrival shows no rate
        rest = self.compute_seconds(self.num_there, self.num_blocks)
        if rest is None:
            return False
        since, num_first = self._first
        rate = (self._last - since) / (self.num_there - num_first)
        return rate * (self.num_blocks - self.num_there) > MOST_RATIO * rest


class End(Enum):
    """The reason for which a wait ended. The value is the label in metrics."""

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
    positions: list[int]  # `num_there` of the followed prompt → number of leading positions
    began: float
    look_up_at: float = field(init=False)
    look_at: float = field(init=False)  # next look-up, even if no block comes
    alarm_at: float = field(default=math.inf, init=False)  # the next alarm

    def __post_init__(self) -> None:
        self.look_up_at = self.began + LOOK_UP_SECONDS
        self.look_at = self.began

    @property
    def num_there(self) -> int:
        """The number of leading positions whose needed blocks can be loaded now."""
        return self.positions[self.prompt.num_there]
