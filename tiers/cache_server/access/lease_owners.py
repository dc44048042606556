# SPDX-License-Identifier: Apache-2.0
"""Whose lease is whose: where tenants share a room, nobody may end another's lease.

For one event loop. Knows nothing of what a lease holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ...wire.status import TooMuch


class Pins:
    """The leases that calls were given, at most `most` of one tenant."""

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._ends: dict[str, dict[int, float]] = {}

    def check_room_for(self, tenant: str) -> None:
        """Raises TooMuch where the tenant has all the leases it may have."""
        now = self._clock()
        running = {lease: end for lease, end in self._of(tenant).items() if end > now}
        self._ends[tenant] = running
        if len(running) >= self._most:
            raise TooMuch(f"{self._most} leases of {tenant} run already; end some or wait")

    def add(self, tenant: str, lease: int, end: float) -> None:
        """The tenant was given a lease until `end` (monotonic)."""
        self._ends.setdefault(tenant, {})[lease] = end

    def remove(self, tenant: str, lease: int) -> bool:
        """The tenant gives a lease back; False if it has none of that number."""
        return self._of(tenant).pop(lease, 0.0) > self._clock()

    def _of(self, tenant: str) -> dict[int, float]:
        return self._ends.get(tenant, {})
