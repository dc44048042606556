# SPDX-License-Identifier: Apache-2.0
"""Scheduling policies: which request is admitted first, and which is preempted to make room.

    fcfs       first come, first served; the request admitted last is preempted first
    priority   the lowest priority number first, then the earliest arrival; the last request in this
               order is preempted first, and kept blocks of the highest number are given up first
    continuum like fcfs, but jobs with pinned blocks come first and are preempted last

Other packages add a policy as an entry point of the group `stratakv.scheduling_policies`. The entry
point names a subclass of `SchedulingPolicy` whose constructor takes no arguments."""

from __future__ import annotations

import heapq
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ...tiers.errors import TierConfigError
from ...tiers.registry import find_entry
from ...tiers.settings.values import ConfigError
from ..request.request import Request

ENTRY_POINTS = "stratakv.scheduling_policies"


class RequestQueue(ABC):
    """Waiting requests in the order in which the scheduler considers them. A queue has no limit of
    its own: the scheduler refuses requests if too many wait."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in scheduling order; the first request must be found fast."""

    @abstractmethod
    def add(self, request: Request) -> None:
        """Add a new request."""

    @abstractmethod
    def prepend(self, request: Request) -> None:
        """Add a preempted request, which was admitted before all waiting requests."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Accept a subclass that has the method `remove`, the former name of `remove_request`."""
        super().__init_subclass__(**options)
        if "remove" in cls.__dict__ and "remove_request" not in cls.__dict__:
            cls.remove_request = cls.__dict__["remove"]  # type: ignore[method-assign]

    @abstractmethod
    def remove_request(self, request: Request) -> bool:
        """Remove a request from any position. Return whether the request was in the queue."""

    def insert_request(self, request: Request) -> None:
        """Add a request at its position by arrival. The request waited elsewhere before, for
        example for its grammar."""
        self.add(request)

    def add_all(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self.add(request)


class FCFSQueue(RequestQueue):
    """A first-come, first-served queue; `prepend` puts preempted requests in front."""

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def prepend(self, request: Request) -> None:
        self._requests.appendleft(request)

    def insert_request(self, request: Request) -> None:
        place = len(self._requests)
        for each in reversed(self._requests):  # most queued requests arrived before `request`
            if not _came_later(each, request):
                break
            place -= 1
        self._requests.insert(place, request)

    def remove_request(self, request: Request) -> bool:
        try:
            self._requests.remove(request)
        except ValueError:
            return False
        return True


Turn = tuple[Any, ...]


class SortedQueue(RequestQueue):
    """A heap in the order of `SchedulingPolicy.turn`; `prepend` has the same effect as `add`. A
    removed request stays in the heap until it reaches the top or the heap is rebuilt."""

    __slots__ = ("_alive", "_heap", "_numbers", "_policy")

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self._heap: list[tuple[Turn, int, Request]] = []
        self._alive: dict[Request, int] = {}  # request → number of its heap entry
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Request]:
        heap, alive = self._heap, self._alive
        while heap and alive.get(heap[0][2]) != heap[0][1]:
            heapq.heappop(heap)
        if heap:
            yield heap[0][2]
            rest = [entry for entry in heap[1:] if alive.get(entry[2]) == entry[1]]
            yield from [entry[2] for entry in sorted(rest)]

    def add(self, request: Request) -> None:
        number = self._alive[request] = next(self._numbers)
        heapq.heappush(self._heap, (self._policy.turn(request), number, request))

    def prepend(self, request: Request) -> None:
        self.add(request)

    def remove_request(self, request: Request) -> bool:
        if self._alive.pop(request, None) is None:
            return False
        if len(self._heap) > 2 * len(self._alive) + 16:
            self._heap = [
                entry for entry in self._heap if self._alive.get(entry[2]) == entry[1]
            ]  # fmt: skip
            heapq.heapify(self._heap)
        return True


class SchedulingPolicy(ABC):
    """A scheduling policy: an order of requests. The engine's step thread calls the methods, which
    must return quickly and must not change a request."""

    # Whether deferred requests come before all other requests, whatever `turn` returns.
    deferred_first = False
    # Whether requests may have a priority.
    takes_priority = False
    # Whether the blocks of an agent's turn are pinned until its next turn (`pins.py`).
    pins_turns = False
    # The jobs whose last turn's blocks are pinned now.
    warm_jobs: Mapping[bytes, object] = MappingProxyType({})

    @abstractmethod
    def turn(self, request: Request) -> Turn:
        """Return the sort key of a request; the request with the least key comes first. The key
        must never change, and must differ for any two requests."""

    def make_queue(self) -> RequestQueue:
        return SortedQueue(self)

    def first(self, queues: Sequence[RequestQueue], only_known: bool) -> _Found | None:
        """Return the request to consider next, and its queue; None if there is no request. With
        `only_known`, consider only requests that have run before."""
        found = [each for queue in queues if (each := _head(queue, only_known)) is not None]
        return min(found, key=lambda each: self.turn(each[1]), default=None)

    def victim(self, requests: Sequence[Request]) -> Request:
        """Choose the running request to preempt; `requests` is in admission order."""
        return max(requests, key=self.turn)

    def kept_victim(self, requests: Sequence[Request]) -> Request:
        """Choose an ended request whose kept blocks (`KeptBlocks`) are released; `requests` is in
        the order in which they ended."""
        return requests[0]


_Found = tuple[RequestQueue, Request]


class FCFSPolicy(SchedulingPolicy):
    """First come, first served. Requests of an earlier queue come before those of a later queue."""

    deferred_first = True

    def turn(self, request: Request) -> Turn:
        return (request.arrival_seconds, request.number)

    def make_queue(self) -> RequestQueue:
        return FCFSQueue()

    def first(self, queues: Sequence[RequestQueue], only_known: bool) -> _Found | None:
        for queue in queues:
            if (found := _head(queue, only_known)) is not None:
                return found
        return None

    def victim(self, requests: Sequence[Request]) -> Request:
        return requests[-1]


class PriorityPolicy(SchedulingPolicy):
    """An order by the request's priority, arrival, id and number, in this sequence."""

    takes_priority = True

    def turn(self, request: Request) -> Turn:
        return (request.priority, request.arrival_seconds, request.request_id, request.number)

    def kept_victim(self, requests: Sequence[Request]) -> Request:
        return max(requests, key=lambda request: request.priority)  # of equals, the first to end


class JobQueue(FCFSQueue):
    """A first-come, first-served queue with an index of requests by job."""

    __slots__ = ("_by_job",)

    def __init__(self) -> None:
        super().__init__()
        self._by_job: dict[bytes, list[Request]] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        self._index_by_job(request)

    def prepend(self, request: Request) -> None:
        super().prepend(request)
        self._index_by_job(request)

    def insert_request(self, request: Request) -> None:
        super().insert_request(request)
        self._index_by_job(request)

    def remove_request(self, request: Request) -> bool:
        if not super().remove_request(request):
            return False
        if request.job:
            others = self._by_job[request.job]
            others.remove(request)
            if not others:
                del self._by_job[request.job]
        return True

    def of_jobs(self, jobs: Mapping[bytes, object]) -> list[Request]:
        return [each for job in self._by_job.keys() & jobs.keys() for each in self._by_job[job]]

    def _index_by_job(self, request: Request) -> None:
        if request.job:
            self._by_job.setdefault(request.job, []).append(request)


class ContinuumPolicy(FCFSPolicy):
    """`FCFSPolicy` for agents. A job is an agent's sequence of requests. Requests of jobs with
    pinned blocks go ahead of all others. A request of a job without pinned blocks is preempted
    first."""

    pins_turns = True

    def make_queue(self) -> JobQueue:
        return JobQueue()

    def first(self, queues: Sequence[RequestQueue], only_known: bool) -> _Found | None:
        if self.warm_jobs:
            warm = [
                (queue, request)
                for queue in queues
                if isinstance(queue, JobQueue)
                for request in queue.of_jobs(self.warm_jobs)
                if not only_known or request.num_preemptions > 0
            ]
            if warm:
                return min(warm, key=lambda each: self.turn(each[1]))
        return super().first(queues, only_known)

    def victim(self, requests: Sequence[Request]) -> Request:
        warm = self.warm_jobs
        if warm:
            for request in reversed(requests):
                if request.job not in warm:
                    return request
        return requests[-1]


POLICIES: dict[str, type[SchedulingPolicy]] = {
    "fcfs": FCFSPolicy,
    "priority": PriorityPolicy,
    "continuum": ContinuumPolicy,
}


def open_policy(name: str) -> SchedulingPolicy:
    """Make the policy of this name. Raises ConfigError if it is unknown or cannot be made."""
    if name in POLICIES:
        return POLICIES[name]()
    try:
        point = find_entry(ENTRY_POINTS, "scheduling policy", name, tuple(POLICIES))
    except TierConfigError as error:
        raise ConfigError(f"--scheduling-policy: {error}") from error
    try:
        policy = point.load()()
    except Exception as error:  # foreign code: every error is reported with its name
        raise ConfigError(
            f"the scheduling policy {name} ({point.value}) could not be made: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(policy, SchedulingPolicy):
        raise ConfigError(
            f"the scheduling policy {name} ({point.value}) is {type(policy).__name__}; expected a "
            "SchedulingPolicy"
        )
    return policy


def _came_later(other: Request, request: Request) -> bool:
    """Whether the waiting request `other` arrived after `request` and was never admitted."""
    has_run = other.num_preemptions > 0 or other.continues is not None
    return not has_run and other.number > request.number


def _head(queue: RequestQueue, only_known: bool) -> _Found | None:
    for request in queue:
        has_run = request.num_preemptions > 0 or request.continues is not None
        if has_run or not only_known:
            return queue, request
    return None
