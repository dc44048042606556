# SPDX-License-Identifier: Apache-2.0
"""FairQueue: a queue of several tenants' jobs for the same threads. The tenant that has used the
least time is served next, however many jobs other tenants have queued.

The queue has no length limit. Callers limit the length with `Shares`, which finds the tenant with
the most jobs."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from typing import Generic, TypeVar

Job = TypeVar("Job")
_MOST_SAVED_SECONDS = 1.0
_MOST_NAMES = 1024


class FairQueue(Generic[Job]):
    """A queue of jobs by tenant. Any thread may call the methods."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, deque[Job]] = OrderedDict()  # ordered by turns
        self._condition = threading.Condition()
        self._used: dict[str, float] = {}  # seconds by tenant, for comparisons only
        self._size = 0
        self._num_ends = 0

    def __len__(self) -> int:
        return self._size

    def put(self, tenant: str, job: Job, *, is_first: bool = False) -> None:
        """Add a job after the tenant's other jobs; with `is_first`, before them."""
        with self._condition:
            if self._jobs and tenant not in self._jobs:
                # A tenant that has used less time comes first; absence saves up one second at most.
                least = min(self._used.get(other, 0.0) for other in self._jobs)
                self._used[tenant] = max(self._used.get(tenant, 0.0), least - _MOST_SAVED_SECONDS)
            jobs = self._jobs.setdefault(tenant, deque())
            (jobs.appendleft if is_first else jobs.append)(job)
            self._size += 1
            self._condition.notify()

    def get(self) -> Job | None:
        """Wait for the next job, and return it. None means that the calling thread must end."""
        with self._condition:
            while not self._jobs and not self._num_ends:
                self._condition.wait()
            if self._num_ends:
                self._num_ends -= 1
                return None
            # Of tenants with equal times, the first.
            tenant = min(self._jobs, key=lambda name: self._used.get(name, 0.0))
            jobs = self._jobs[tenant]
            job = jobs.popleft()
            self._size -= 1
            if jobs:
                self._jobs.move_to_end(tenant)
            else:
                del self._jobs[tenant]
            return job

    def charge(self, tenant: str, seconds: float) -> None:
        """Add the seconds of a job to the time that its tenant has used."""
        with self._condition:
            self._used[tenant] = self._used.get(tenant, 0.0) + seconds
            if len(self._used) > _MOST_NAMES:
                self._used = {name: each for name, each in self._used.items() if name in self._jobs}

    def discard(self, tenant: str, job: Job) -> None:
        """Remove a job, if it is still queued."""
        with self._condition:
            jobs = self._jobs.get(tenant)
            if jobs is not None and job in jobs:
                jobs.remove(job)
                self._size -= 1
                if not jobs:
                    del self._jobs[tenant]

    def stop_threads(self, num_threads: int) -> None:
        """Make the next `num_threads` calls of `get` return None, before any queued jobs."""
        with self._condition:
            self._num_ends += num_threads
            self._condition.notify_all()


class Shares:
    """Counts of entries by tenant, with a common limit of `most`. A single tenant may use the whole
    limit while no other tenant needs a part. A later tenant displaces an entry of the tenant with
    the most entries. One thread makes all calls."""

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
        """Whether this tenant may add no entry: the limit is reached, and no tenant has more
        entries than `tenant`."""
        return self._are_full and self._counts[tenant] >= max(self._counts.values(), default=0)

    def who_gives_way(self) -> str | None:
        """Return the tenant whose last entry must be removed for a new entry; None if there is
        room."""
        if not self._are_full or not self._counts:
            return None
        return max(self._counts, key=lambda tenant: self._counts[tenant])

    @property
    def _are_full(self) -> bool:
        return self._counts.total() >= self._most
