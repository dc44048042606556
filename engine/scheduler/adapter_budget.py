# SPDX-License-Identifier: Apache-2.0
"""AdapterBudget: how many different adapters run at once, and who gets the next place.

A model has a slot for each adapter of a step, so the requests that run have at most so many. Any
number of requests may share one; requests without an adapter need none. A request whose adapter has
no place waits, and others may overtake it. The first such request is sure of its turn: only its
adapter gets the next free place, and after MOST_OVERTAKES requests no more of one adapter are
admitted, the one with the fewest running requests, until its place is free.
"""

from __future__ import annotations

from collections import Counter

from ..request.request import Request, RequestStatus
from .request_states import RequestStates

MOST_OVERTAKES = 32


class AdapterBudget:
    """The adapters of the running requests of one scheduler."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._most = states.context.config.max_adapters
        self._first: Request | None = None  # the first request without a place
        self._num_overtakes = 0  # of that request
        self._drained = b""  # the adapter that gets no more requests; b"": none

    def allows(self, request: Request) -> bool:
        """Whether a waiting request with an adapter may run, as far as the adapter goes. Call it
        once each time the request is considered, before it is admitted."""
        assert request.adapter is not None
        first = self._first
        if first is not None and not _waits(first):
            self._forget_first()
            first = None
        wanted, held = request.adapter.fingerprint, self._held()
        is_first = request is first
        if wanted in held:
            if is_first:
                self._forget_first()
                return True
            if first is None:
                return True
            if self._num_overtakes >= MOST_OVERTAKES and not self._drained:
                self._drained = min(held, key=held.__getitem__)
            if wanted == self._drained:
                return False
            self._num_overtakes += 1
            return True
        of_first = first is not None and first.adapter is not None
        is_due = first is None or (
            of_first and first.adapter.fingerprint == wanted  # type: ignore[union-attr]
        )
        if len(held) < self._most and is_due:
            if is_first:
                self._forget_first()
            return True
        if first is None:
            self._first, self._num_overtakes, self._drained = request, 0, b""
        return False

    def counts(self) -> dict[str, Counter[str]]:
        """Count the requests with an adapter, by state and by the adapter's name."""
        states = self._states
        running = Counter(each.adapter.name for each in states.running if each.adapter is not None)
        every = Counter(
            each.adapter.name for each in states.requests.values() if each.adapter is not None
        )
        return {"running": running, "waiting": every - running}

    def _held(self) -> Counter[bytes]:
        """Count the requests of each adapter that has a place: they run, load, or have loaded."""
        states = self._states
        return Counter(
            each.adapter.fingerprint
            for group in (states.running, states.loads.blocking, states.loaded)
            for each in group
            if each.adapter is not None
        )

    def _forget_first(self) -> None:
        self._first, self._num_overtakes, self._drained = None, 0, b""


def _waits(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
