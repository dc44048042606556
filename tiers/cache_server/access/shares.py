# SPDX-License-Identifier: Apache-2.0
"""Places that tenants take: some are kept for each tenant, the rest is shared in order of arrival.

    most    places in all; never fewer than one for each tenant
    kept    for each tenant: half an equal share, and at least one; no other tenant can take them
    cap     of one tenant: an equal share, and at least an eighth of all places

A tenant that takes all it can leaves the kept places of other tenants free. Thread-safe.
"""

from __future__ import annotations

import collections
import threading

_MOST_SHARES = 8


class Shares:
    """`most` places for `num_tenants`."""

    def __init__(self, most: int, num_tenants: int) -> None:
        self._wanted = most
        self._lock = threading.Lock()
        self._taken: collections.Counter[str] = collections.Counter()
        self._beyond = 0  # places that tenants have beyond their kept ones
        self.set_tenants(num_tenants)

    def set_tenants(self, num_tenants: int) -> None:
        """Change the number of tenants. A tenant that has more than its new share keeps it."""
        with self._lock:
            self.most = max(self._wanted, num_tenants)
            self.kept = max(1, self.most // (2 * num_tenants))
            self.cap = max(self.kept, self.most // min(num_tenants, _MOST_SHARES))
            self._for_all = self.most - self.kept * num_tenants  # in order of arrival
            self._beyond = sum(max(0, has - self.kept) for has in self._taken.values())

    def take_place(self, tenant: str) -> bool:
        """Take a place, if there is one for this tenant."""
        with self._lock:
            has = self._taken[tenant]
            if has >= self.kept:
                if has >= self.cap or self._beyond >= self._for_all:
                    return False
                self._beyond += 1
            self._taken[tenant] += 1
            return True

    def give_back_place(self, tenant: str) -> None:
        """Return a place that was taken."""
        with self._lock:
            self._taken[tenant] -= 1
            self._beyond -= self._taken[tenant] >= self.kept
            if not self._taken[tenant]:
                del self._taken[tenant]

    def places_of(self, tenant: str) -> int:
        with self._lock:
            return self._taken.get(tenant, 0)
