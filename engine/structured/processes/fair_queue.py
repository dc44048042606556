# SPDX-License-Identifier: Apache-2.0
"""Jobs of several tenants for the same threads: each tenant has its turn, whatever others have
asked for before; the one that has used least has the first.

How much may wait is for others to say: `Shares` tells them who has more than the rest.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")
_MOST_SAVED_SECONDS = 1.0
_MOST_NAMES = 1024


class FairQueue(Generic[Job]):
    """Called by any thread."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()  # whose turn is next comes first
        self._condition = threading.Condition()
        self._used: dict[str, float] = {}  # seconds, which are only compared
        self._size = 0
        self._num_ends = 0

    def __len__(self) -> int:
        return self._size

    def put(self, tenant: str, job: Job, *, is_first: bool = False) -> None:
        """Behind the tenant's others, or before them."""
        with self._condition:
            if self._jobs and tenant not in self._jobs:
                # Who asks for little is before the others; who was away has saved up no more.
                least = min(self._used.get(other, 0.0) for other in self._jobs)
                self._used[tenant] = max(self._used.get(tenant, 0.0), least - _MOST_SAVED_SECONDS)
            jobs = self._jobs.setdefault(tenant, deque())
            (jobs.appendleft if is_first else jobs.append)(job)
            self._size += 1
            self._condition.notify()

    def get(self) -> Job | None:
        """Wait for the next one; None: the thread that asks is to end."""
        with self._condition:
            while not self._jobs and not self._num_ends:
                self._condition.wait()
            if self._num_ends:
                self._num_ends -= 1
                return None
            tenant = min(self._jobs, key=lambda name: self._used.get(name, 0.0))  # or the first
            jobs = self._jobs[tenant]
            job = jobs.popleft()
            self._size -= 1
            if jobs:
                self._jobs.move_to_end(tenant)
            else:
                del self._jobs[tenant]
            return job

    def charge(self, tenant: str, seconds: float) -> None:
        """A job of this tenant has taken so long."""
        with self._condition:
            self._used[tenant] = self._used.get(tenant, 0.0) + seconds
            if len(self._used) > _MOST_NAMES:
                self._used = {name: each for name, each in self._used.items() if name in self._jobs}

    def discard(self, tenant: str, job: Job) -> None:
        """Take out a job that is no longer wanted, if it is still there."""
        with self._condition:
            jobs = self._jobs.get(tenant)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                self._size -= 1
                if not jobs:
                    del self._jobs[tenant]

    def stop_threads(self, num_threads: int) -> None:
        """So many of those that ask are told to end, before the jobs that are left."""
        with self._condition:
            self._num_ends += num_threads
            self._condition.notify_all()


class Shares:
    """How many of something each tenant has, and `most` together. While no other wants any, one may
    have all of them; who comes then takes the place of the last of whoever has most. Called by one
    thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: Counter[str] = Counter()

    def count_of(self, tenant: str) -> int:
        return self._counts[tenant]

    def add(self, tenant: str) -> None:
        self._counts[tenant] += 1

    def remove_tenant(self, tenant: str) -> None:
        self._counts[tenant] -= 1
        if not self._counts[tenant]:
            del self._counts[tenant]

    def is_over(self, tenant: str) -> bool:
        """Whether another one of this tenant is more than it may have."""
        return self._are_full and self._counts[tenant] >= max(self._counts.values(), default=0)

    def who_gives_way(self) -> str | None:
        """Whose last one another tenant's takes the place of; None: there is room."""
        if not self._are_full or not self._counts:
            return None
        return max(self._counts, key=lambda tenant: self._counts[tenant])

    @property
    def _are_full(self) -> bool:
        return self._counts.total() >= self._most
