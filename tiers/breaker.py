# SPDX-License-Identifier: Apache-2.0
"""A breaker: stops asking a store that fails, and finds out when it works again.

    closed ──(5 failures, or 3 late answers, within 1 s)──► open
    open   ──(after a pause with jitter)──► probing: one call passes
    probing ──(an answer)──► closed        probing ──(a failure)──► open, a longer pause

A store that hangs costs every request its deadline; behind a breaker only the first few pay. Time
is monotonic. Knows nothing of stores, and has no thread: it is told what happened and asked whether
to go on. Called by one thread.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

FAILURES, LATE_ANSWERS = 5, 3
WINDOW_SECONDS = 1.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 1.0
# A probe that has not ended by then is taken for lost, and another call may pass.
PROBE_SECONDS = 5.0


class BreakerState(Enum):
    """The value is the label in metrics."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Of one store."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._jitter = jitter  # from 0 to 1, so that many engines do not probe at once
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._late: deque[float] = deque(maxlen=LATE_ANSWERS)
        self._pause = FIRST_PAUSE_SECONDS
        self._open_until = 0.0
        self._state = BreakerState.CLOSED
        self._probe_until = 0.0  # the one call that passed may end until then
        self.times_opened = 0

    @property
    def state(self) -> BreakerState:
        """Now."""
        if self._state is BreakerState.OPEN and self._clock() >= self._open_until:
            self._state = BreakerState.PROBING
            self._probe_until = 0.0
        return self._state

    @property
    def allows(self) -> bool:
        """Whether to ask the store."""
        if self._state is BreakerState.CLOSED:
            return True
        return self.state is BreakerState.PROBING and self._clock() >= self._probe_until

    @property
    def probes_at(self) -> float | None:
        """When an open breaker lets a call pass again, on the monotonic clock."""
        return self._open_until if self.state is BreakerState.OPEN else None

    def began(self) -> None:
        """The store was asked for something that will end as one of the three below."""
        if self._state is BreakerState.PROBING:
            self._probe_until = self._clock() + PROBE_SECONDS

    def succeeded(self) -> None:
        """The store answered in time."""
        if self.state is BreakerState.PROBING:
            self._state = BreakerState.CLOSED
            self._pause = FIRST_PAUSE_SECONDS

    def failed(self) -> None:
        """The store raised, or what it answered made no sense."""
        self._count(self._failures)

    def was_late(self) -> None:
        """The store missed a deadline."""
        self._count(self._late)

    def _count(self, times: deque[float]) -> None:
        now = self._clock()
        times.append(now)
        if self.state is BreakerState.PROBING or (
            len(times) == times.maxlen and now - times[0] <= WINDOW_SECONDS
        ):
            self._open(now)

    def _open(self, now: float) -> None:
        if self._state is BreakerState.PROBING:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if self._state is not BreakerState.OPEN:
            self.times_opened += 1
        self._state = BreakerState.OPEN
        self._open_until = now + self._pause * (0.75 + 0.5 * self._jitter())
        self._failures.clear()
        self._late.clear()
