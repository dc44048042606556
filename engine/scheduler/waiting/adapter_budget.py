# SPDX-License-Identifier: Apache-2.0
"""AdapterBudget: how many different adapters run at once, and who gets the next place.

A model has a slot for each adapter of a step, so the requests that run have at most so many. Any
number of requests may share one; requests without an adapter need none. A request whose adapter has
no place waits, and others may overtake it. The first such request is sure of its turn: only its
adapter gets the next free place, and once MOST_OVERTAKES requests have overtaken it, no more of one
adapter are admitted, the one with the fewest requests, until its place is free. The place is kept
until the request runs or loads, whatever else it waits for.
"""

from __future__ import annotations

from collections import Counter

from ...request.request import Request, RequestStatus
from ..request_states import RequestStates

MOST_OVERTAKES = 32
# So many of a round count as refused and not as deferred. A refusal is cheap, and those behind the
# refused ones may run.
MOST_REFUSED = 256


class AdapterBudget:
    """The adapters of the running requests of one scheduler."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._most = states.context.config.max_adapters
        self._first: Request | None = None  # the first request without a place
        self._num_overtakes = 0  # of that request
        self._drained = b""  # the adapter that gets no more requests; b"": none
        self.is_asked = False  # whether a request with an adapter may run, since the last round
        # Of this round of admission:
        self.num_refused = 0
        self._held: Counter[bytes] | None = None  # None: not counted yet

    def begin_round(self) -> None:
        """Forget what the last round of admission counted."""
        self.is_asked, self.num_refused, self._held = False, 0, None

    def allows(self, request: Request, only_known: bool = False) -> bool:
        """Whether a waiting request with an adapter may run, as far as the adapter goes. With
        `only_known` no new request starts, so none is waited for."""
        self.is_asked = True
        may_run = self._may_run(request, only_known)
        self.num_refused += not may_run and self.num_refused < MOST_REFUSED
        return may_run

    def _may_run(self, request: Request, only_known: bool) -> bool:
        assert request.adapter is not None
        if request.num_computed_tokens > 0:
            return True  # it holds loaded blocks, and its place with them
        first = self._first
        if first is not None and not _waits(first):
            self._forget_first()
            first = None
        wanted, held = request.adapter.fingerprint, self._count_held()
        has_place = wanted in held or len(held) < self._most
        if only_known and first is not None and not _has_run(first):
            return has_place
        if first is None or request is first or wanted == _fingerprint(first):
            if not has_place and first is None:
                self._first = request
            return has_place
        if wanted not in held:
            return False
        if self._num_overtakes >= MOST_OVERTAKES and not self._drained and len(held) >= self._most:
            self._drained = min(held, key=held.__getitem__)
        return wanted != self._drained

    def note_admitted(self, request: Request) -> None:
        """Count a request with an adapter that `allows` let pass, and that runs or loads now."""
        self._held = None
        first = self._first
        if first is not None and _waits(first) and _fingerprint(first) != _fingerprint(request):
            self._num_overtakes += 1

    def counts(self) -> dict[str, Counter[str]]:
        """Count the requests with an adapter, by state and by the adapter's name."""
        states = self._states
        running = Counter(each.adapter.name for each in states.running if each.adapter is not None)
        every = Counter(
            each.adapter.name for each in states.requests.values() if each.adapter is not None
        )
        return {"running": running, "waiting": every - running}

    def _count_held(self) -> Counter[bytes]:
        """Count the requests of each adapter that has a place: they run, load, or have loaded."""
        if self._held is None:
            states = self._states
            self._held = Counter(
                _fingerprint(each)
                for group in (states.running, states.loads.blocking, states.loaded)
                for each in group
                if each.adapter is not None
            )
        return self._held

    def _forget_first(self) -> None:
        self._first, self._num_overtakes, self._drained = None, 0, b""


def _fingerprint(request: Request) -> bytes:
    return b"" if request.adapter is None else request.adapter.fingerprint


def _has_run(request: Request) -> bool:
    return request.num_preemptions > 0 or request.continues is not None


def _waits(request: Request) -> bool:
    return request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
