# SPDX-License-Identifier: Apache-2.0
"""A timer for one side of a comparison, in processor seconds of all threads and by the clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class Timer:
    """A timer whose values are `count` units per second or, if `count` is None, seconds."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self.by_clock: list[float] = []  # the wall-clock value of each call of `rate_of`

    def rate_of(self, work: Callable[[], object]) -> float:
        """Do the work once; return the rate, or the seconds, in processor time."""
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        cpu = time.process_time() - cpu
        self.by_clock.append(self._rate(time.perf_counter() - wall))
        return self._rate(cpu)

    def _rate(self, seconds: float) -> float:
        return seconds if self._count is None else self._count / seconds
