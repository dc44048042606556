# SPDX-License-Identifier: Apache-2.0
"""AdapterBudget decides which LoRA adapters the running requests may use at once.

The worker's model has `max_adapters` slots, so the running requests may use at most that many
different adapters. Any number of requests may share a slot; requests without an adapter need no
slot. A request whose adapter has no slot waits, and other requests may overtake it. Only the
adapter of the first waiting request gets the next free slot. Once MOST_OVERTAKES requests have
overtaken that request, no more requests of the adapter with the fewest requests are admitted, until
a slot is free. The slot stays reserved until the waiting request runs or loads.
"""

from __future__ import annotations

from collections import Counter

from ...request.request import Request, RequestStatus
from ..request_states import RequestStates

MOST_OVERTAKES = 32
# The most refused requests of a round that do not count as deferred. A refusal is cheap, and
# requests after the refused ones may run.
MOST_REFUSED = 256


class AdapterBudget:
    """The adapters of the running requests of one scheduler."""

    def __init__(self, states: RequestStates) -> None:
        self._states = states
        self._most = states.context.config.max_adapters
        self._first: Request | None = None  # the first request whose adapter has no slot
        self._num_overtakes = 0  # requests admitted before `_first`
        self._drained = b""  # the adapter of which no more requests are admitted; b"": none
        self.is_asked = False  # whether a request with an adapter may run, since the last round
        # The counts of this round of admission:
        self.num_refused = 0
        self._held: Counter[bytes] | None = None  # None: not counted yet

    def begin_round(self) -> None:
        """Forget the counts of the last round of admission."""
        self.is_asked, self.num_refused, self._held = False, 0, None

    def allows(self, request: Request, only_known: bool = False) -> bool:
        """Whether the adapter of a waiting request has a slot or may get one. With `only_known`, no
        slot is reserved for a new request, because no new request starts."""
        self.is_asked = True
        may_run = self._may_run(request, only_known)
        self.num_refused += not may_run and self.num_refused < MOST_REFUSED
        return may_run

    def _may_run(self, request: Request, only_known: bool) -> bool:
        assert request.adapter is not None
        if request.num_computed_tokens > 0:
            return True  # the request holds loaded blocks, and a slot for its adapter
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
        """Count a request with an adapter that now runs or loads."""
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
        """Count, by adapter, the requests with an adapter that run, load, or have loaded."""
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
