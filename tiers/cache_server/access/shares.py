# SPDX-License-Identifier: Apache-2.0
"""Shares: divides a limited number of places (calls, connections or watchers) among tenants.

    most    places in all; never fewer than one for each tenant
    kept    for each tenant: half an equal share, and at least one; no other tenant can take them
    cap     of one tenant: an equal share, and at least an eighth of all places

Places beyond the kept ones go to the first tenants that request them. A tenant at its cap leaves
the kept places of other tenants free. Thread-safe."""

from __future__ import annotations

import collections
import threading

_MOST_SHARES = 8


class Shares:
    """A division of `most` places among `num_tenants` tenants."""

    def __init__(self, most: int, num_tenants: int) -> None:
        self._wanted = most
        self._lock = threading.Lock()
        self._taken: collections.Counter[str] = collections.Counter()
        self._beyond = 0  # places that tenants have beyond their kept places
        self.set_tenants(num_tenants)

    def set_tenants(self, num_tenants: int) -> None:
        """Change the number of tenants. A tenant with more places than its new cap keeps them."""
        with self._lock:
            self.most = max(self._wanted, num_tenants)
            self.kept = max(1, self.most // (2 * num_tenants))
            self.cap = max(self.kept, self.most // min(num_tenants, _MOST_SHARES))
            self._for_all = self.most - self.kept * num_tenants  # for the first to request them
            self._beyond = sum(max(0, has - self.kept) for has in self._taken.values())

    def take_place(self, tenant: str) -> bool:
        """Take a place for a tenant. Return False if no place is free for it."""
        with self._lock:
            has = self._taken[tenant]
            if has >= self.kept:
                if has >= self.cap or self._beyond >= self._for_all:
                    return False
                self._beyond += 1
            self._taken[tenant] += 1
            return True

    def give_back_place(self, tenant: str) -> None:
        """Give back a place that `take_place` took."""
        with self._lock:
            self._taken[tenant] -= 1
            self._beyond -= self._taken[tenant] >= self.kept
            if not self._taken[tenant]:
                del self._taken[tenant]

    def places_of(self, tenant: str) -> int:
        with self._lock:
            return self._taken.get(tenant, 0)
