# SPDX-License-Identifier: Apache-2.0
"""A bound on what is written to a disk in a day, around any admission filter.

A bucket of blocks that fills evenly over the day and holds an hour's worth: short bursts pass, and
no day sees more than the bound and one bucket. What it has no room for is not written. Knows
nothing of why a block was admitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..admission import AdmissionFilter
from ..errors import TierConfigError

SECONDS_PER_DAY = 86_400.0
BURST_SECONDS = 3_600.0


class WriteBudget(AdmissionFilter):
    """At most `blocks_per_day` of what `inner` admits."""

    def __init__(self, inner: AdmissionFilter, blocks_per_day: float) -> None:
        if not blocks_per_day >= 1:
            raise TierConfigError(
                f"a daily bound must let one block pass, not {blocks_per_day:g} of them; raise it"
            )
        self._inner = inner
        self.learns = inner.learns
        self._per_second = blocks_per_day / SECONDS_PER_DAY
        self._most = max(1.0, self._per_second * BURST_SECONDS)
        self._left = self._most
        self._filled_at: float | None = None

    def observe(self, chain: Sequence[bytes], now: float) -> None:
        self._inner.observe(chain, now)

    def promoted(self, count: int) -> None:
        self._inner.promoted(count)

    def admit(self, keys: Sequence[bytes], now: float) -> list[bool]:
        if self._filled_at is not None:
            gained = max(0.0, now - self._filled_at) * self._per_second
            self._left = min(self._most, self._left + gained)
        self._filled_at = now
        verdicts = self._inner.admit(keys, now)
        for index, admitted in enumerate(verdicts):
            if admitted and self._left < 1:
                verdicts[index] = False
            elif admitted:
                self._left -= 1
        return verdicts
