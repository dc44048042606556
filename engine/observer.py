# SPDX-License-Identifier: Apache-2.0
"""Observers of an engine's decisions. Traces, KV events for routers and statistics are observers.

An engine without observers spends no time on reports. The engine's step thread calls the observers,
so their methods must return quickly. The engine stops calling an observer that raises an
exception."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .request.request import Request

logger = logging.getLogger(__name__)


class Decision(Enum):
    """A change in the life of a request."""

    QUEUED = "queued"
    WAITS = "waits"  # considered, but an `Obstacle` makes it wait; reported in each such step
    LOADING = "loading"  # its blocks are being loaded; the request waits, or computes meanwhile
    LOADED = "loaded"  # the load of a waiting request has ended, with blocks or without
    SCHEDULED = "scheduled"  # the request runs for the first time
    PREEMPTED = "preempted"  # the request lost its blocks and is queued again
    RESUMED = "resumed"  # the request runs again
    LOAD_GIVEN_UP = "load given up"  # the request's loaded blocks went to another request
    FINISHED = "finished"


class Obstacle(Enum):
    """The reason why the scheduler does not start a waiting request that it considers."""

    SEATS = "seats"  # the largest number of requests run already
    PICTURES = "pictures"  # no room for the embeddings of the request's next picture
    ADAPTERS = "adapters"  # the largest number of adapters is in use already
    BUDGET = "budget"  # the tokens of the step are used up
    PRESSURE = "pressure"  # too much of the pool is held for a request to start
    PROMPT_ROOM = "prompt room"  # the whole prompt would preempt another request
    RESERVATION = "reservation"  # no room for all tokens that --reserve counts
    ROOM = "room"  # no blocks to compute in
    LOAD_ROOM = "load room"  # no blocks to load into
    LOOKUP = "lookup"  # a tier has not answered yet
    WRITER = "writer"  # blocks that the request shares are being computed in this step
    PREFILL = "prefill"  # another engine computes the request's prompt
    GRAMMAR = "grammar"  # the request's grammar is being compiled; reported once
    MASK = "mask"  # the mask of the request's next token is being made


class Pinned(Protocol):
    """Read access to the pins of a scheduler: the KV blocks kept for agents' next requests
    (`pins.py`)."""

    @property
    def num_blocks(self) -> int: ...
    def job_ids(self) -> list[str]: ...


class StepSnapshot(NamedTuple):
    """The state of an engine just before it schedules a step."""

    step_id: int
    num_running: int
    num_waiting: int  # including requests with loads under way
    num_free_blocks: int  # free blocks of the pool, including cached blocks
    num_cached_blocks: int  # blocks of the pool with a key
    num_blocks: int  # of the pool
    pins: Pinned | None = None  # None: this engine pins no turns


class StepMade(NamedTuple):
    """A scheduled step. The object has the ids of the requests that are new to the worker, resumed
    and preempted, and the number of tokens that each request computes, by request id. An observer
    may keep this object but must not change it."""

    step_id: int
    new_ids: Sequence[str]
    resumed_ids: Collection[str]
    preempted_ids: Collection[str]
    num_tokens: dict[str, int]
    total_tokens: int  # summed over all requests


class Observer:
    """An observer that ignores all calls; a subclass overrides the methods it needs."""

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        """Report a decision about a request. For WAITS, `cause` is the value of an `Obstacle`; for
        PREEMPTED and LOAD_GIVEN_UP, the id of the request that took the blocks, or "" for memory
        pressure; for LOADED, the reason why blocks are missing; for FINISHED, the finish reason."""

    def hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        """Report how many tokens of a starting or resumed request are cached, by place: `pool` or a
        tier's name. An overlapped load that adds tokens causes a further call."""

    def named(self, request: Request, group: int, first: int, block_ids: Sequence[int]) -> None:
        """Report blocks that prefix lookups can find from now on. `block_ids[i]` is block `first +
        i` of the request in cache group `group`, and its digest is `request.block_hashes[first +
        i]`. The parent of a block is the previous hash; the tokens are in `request.all_token_ids`.
        If the step that computes the blocks fails, a call of `unnamed` follows."""

    def unnamed(self, keys: Sequence[bytes]) -> None:
        """Report keys that no block of the pool has any more. A key is the hash (32 bytes) and the
        cache group (u16, little-endian)."""

    def snapshot(self, snapshot: StepSnapshot) -> None:
        """Report the engine's state before a step is scheduled. All reports until the call of
        `step` belong to this step."""

    def step(self, made: StepMade) -> None:
        """Report a scheduled step, which may have no tokens."""


class GuardedObservers(Observer):
    """Calls other observers, and catches their exceptions, so that they cannot stop the engine.
    Most reports are frequent, so an observer is called only for the methods that it overrides."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._find_hearers()

    @property
    def hears_keys(self) -> bool:
        """Whether an observer overrides `named` or `unnamed`."""
        return bool(self._named or self._unnamed)

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        for observer in self._decision:
            try:
                observer.decision(request, decision, cause)
            except Exception as error:  # noqa: BLE001 - any exception is the observer's fault
                self._give_up(observer, error)

    def hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        for observer in self._hit:
            try:
                observer.hit(request, tokens)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(observer, error)

    def named(self, request: Request, group: int, first: int, block_ids: Sequence[int]) -> None:
        for observer in self._named:
            try:
                observer.named(request, group, first, block_ids)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(observer, error)

    def unnamed(self, keys: Sequence[bytes]) -> None:
        for observer in self._unnamed:
            try:
                observer.unnamed(keys)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(observer, error)

    def snapshot(self, snapshot: StepSnapshot) -> None:
        for observer in self._snapshot:
            try:
                observer.snapshot(snapshot)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(observer, error)

    def step(self, made: StepMade) -> None:
        for observer in self._step:
            try:
                observer.step(made)
            except Exception as error:  # noqa: BLE001 - as above
                self._give_up(observer, error)

    def _give_up(self, observer: Observer, error: Exception) -> None:
        logger.error("an observer failed, and hears nothing more", exc_info=error)
        self._observers.remove(observer)
        self._find_hearers()

    def _find_hearers(self) -> None:
        self._decision = self._hearers("decision")
        self._hit = self._hearers("hit")
        self._named = self._hearers("named")
        self._unnamed = self._hearers("unnamed")
        self._snapshot = self._hearers("snapshot")
        self._step = self._hearers("step")

    def _hearers(self, name: str) -> tuple[Observer, ...]:
        default = getattr(Observer, name)
        return tuple([o for o in self._observers if getattr(type(o), name) is not default])
