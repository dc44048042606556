# SPDX-License-Identifier: Apache-2.0
"""Breaker: a circuit breaker. Stops calls to a failing store, and tries again after a pause."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from ..mailbox import Mailbox

FAILURES, LATE_ANSWERS = 5, 3
WINDOW_SECONDS = 1.0
# A pause and a lost probe take less than two seconds together, so that a store that works again is
# used again within this time.
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 0.75
PROBE_SECONDS = 1.0
# The most unanswered probes, after which no further probe is made.
MAX_PROBES = 8


class BreakerState(Enum):
    """The state of a circuit breaker. The value is the label in metrics."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"


class Breaker:
    """Stops calls to a store that fails, and detects when the store works again.

        closed ──(5 failures, or 3 late answers, within 1 s)───► open
        closed ──(3 late answers in a row, or a call that hangs)──► open
        open   ──(after a pause with jitter)──► probing: a probe is under way, and nothing else
        probing ──(it was answered)──► closed      probing ──(it failed)──► open, a longer pause

    Without a breaker every request to a hanging store would wait until its deadline. With a breaker
    only the first few requests wait, and no request waits for a probe. If a probe has not ended
    after a second, another probe is sent (up to `MAX_PROBES`), because the answer may be lost. The
    breaker has no thread: the caller's thread reports results to it and reads `allows` before each
    call. Times are monotonic seconds."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._clock = clock
        self._jitter = jitter  # returns 0 to 1, so that many engines do not probe at once
        self._failures: deque[float] = deque(maxlen=FAILURES)
        self._late: deque[float] = deque(maxlen=LATE_ANSWERS)
        self._late_in_row = 0
        self._pause = FIRST_PAUSE_SECONDS
        self.allows = True  # whether to call the store; read-only for callers
        self._probe_at = 0.0
        self._announced_at: float | None = None
        self._probes = 0  # probes under way
        self.times_opened = 0

    @property
    def state(self) -> BreakerState:
        """The present state. An open breaker is PROBING while a probe is under way."""
        if self.allows:
            return BreakerState.CLOSED
        return BreakerState.PROBING if self._probes else BreakerState.OPEN

    @property
    def probes_at(self) -> float | None:
        """The time of the next probe, on the monotonic clock; None if no probe will be made."""
        return self._probe_at if not self.allows and self._probes < MAX_PROBES else None

    @property
    def probe_due(self) -> bool:
        return self.probes_at is not None and self._clock() >= self._probe_at

    def announce_probe(self, mailbox: Mailbox) -> None:
        """Set a timer in `mailbox` for the next probe, unless this timer is set already."""
        moment = self.probes_at
        if moment is not None and moment != self._announced_at:
            self._announced_at = moment
            mailbox.wake_at(moment)

    def probe_began(self) -> None:
        """Record that a probe has begun. The caller must call `probe_ended` later."""
        self._probes += 1
        self._probe_at = self._clock() + PROBE_SECONDS

    def probe_ended(self, answered: bool) -> None:
        """Record the end of a probe. `answered`: whether the store answered, even if late."""
        self._probes -= 1
        if self.allows:
            return
        if answered:
            self.allows = True
            self._pause = FIRST_PAUSE_SECONDS
            self._late_in_row = 0
        else:
            self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
            self._schedule_probe(self._clock())

    def succeeded(self) -> None:
        self._late_in_row = 0

    def failed(self) -> None:
        """Record a failure: the store raised, or its answer was invalid."""
        self._record_fault(self._failures)

    def was_late(self) -> None:
        """Record that a call missed its deadline."""
        self._late_in_row += 1
        self._record_fault(self._late)
        if self._late_in_row >= LATE_ANSWERS:
            self.hung()

    def hung(self) -> None:
        """Open the breaker at once, because the store hangs."""
        if self.allows:
            self._open_circuit(self._clock())

    def answered_late(self) -> None:
        """Make a probe due at once: a late call has ended, so the store may work again."""
        if not self.allows:
            self._probe_at = self._clock()

    def _record_fault(self, times: deque[float]) -> None:
        if not self.allows:
            return  # the call began before the breaker opened
        now = self._clock()
        times.append(now)
        if len(times) == times.maxlen and now - times[0] <= WINDOW_SECONDS:
            self._open_circuit(now)

    def _open_circuit(self, now: float) -> None:
        self.times_opened += 1
        self.allows = False
        self._schedule_probe(now)
        self._failures.clear()
        self._late.clear()

    def _schedule_probe(self, now: float) -> None:
        self._probe_at = now + self._pause * (0.75 + 0.5 * self._jitter())
