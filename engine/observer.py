# SPDX-License-Identifier: Apache-2.0
"""Who wants to know what an engine decides: traces, events for routers, statistics.

An engine has no observer unless it is given one, and then pays nothing for it. Every call is made
by the engine's step thread and must return at once; an observer that raises hears nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .request.request import Request

logger = logging.getLogger(__name__)


class Decision(Enum):
    """What became of a request."""

    QUEUED = "queued"
    WAITS = "waits"  # it was its turn, and something was in the way; told in every such step
    LOADING = "loading"  # blocks are being loaded, and it waits for them or computes meanwhile
    LOADED = "loaded"  # the load it waited for has ended, with blocks or without
    SCHEDULED = "scheduled"  # it runs, for the first time
    PREEMPTED = "preempted"  # it was sent back
    RESUMED = "resumed"  # it runs again
    LOAD_GIVEN_UP = "load given up"  # its loaded blocks went to another request
    FINISHED = "finished"


class Obstacle(Enum):
    """What a request whose turn it was waits for."""

    SEATS = "seats"  # as many run as may
    BUDGET = "budget"  # the tokens of the step are used up
    PRESSURE = "pressure"  # too much of the pool is held for anybody to start
    PROMPT_ROOM = "prompt room"  # its whole prompt would drive somebody out
    RESERVATION = "reservation"  # room for all that --reserve says
    ROOM = "room"  # blocks to compute in
    LOAD_ROOM = "load room"  # blocks to load into
    LOOKUP = "lookup"  # a tier is still to answer
    WRITER = "writer"  # blocks that it shares are being computed in this step
    PREFILL = "prefill"  # another engine computes its prompt
    GRAMMAR = "grammar"  # its grammar is being compiled; told once
    MASK = "mask"  # which tokens its grammar allows next is being found out


class Pinned(Protocol):
    """The turns of jobs whose blocks are kept."""

    @property
    def num_blocks(self) -> int: ...
    def job_ids(self) -> list[str]: ...


class StepSnapshot(NamedTuple):
    """An engine right before a step is made."""

    step_id: int
    num_running: int
    num_waiting: int  # those whose blocks are being loaded among them
    num_free_blocks: int  # of the pool, those with a name included
    num_cached_blocks: int  # of the pool, with a name
    num_blocks: int  # of the pool
    pins: Pinned | None = None  # None: there are never any


class StepMade(NamedTuple):
    """A step: whom the worker sees first, who comes back, who was sent back, and how many tokens
    each request computes in it, by id. An observer may keep it, and changes nothing of it."""

    step_id: int
    new_ids: Sequence[str]
    resumed_ids: Collection[str]
    preempted_ids: Collection[str]
    num_tokens: dict[str, int]
    total_tokens: int  # of all of them


class Observer:
    """Hears everything and does nothing; a subclass overrides what it wants to hear."""

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        """The engine has decided this of a request. `cause`: of WAITS, the value of an `Obstacle`;
        of PREEMPTED and LOAD_GIVEN_UP, the id of the request that took the room, "" for memory
        pressure; of LOADED, what kept blocks from coming; of FINISHED, the finish reason."""

    def hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        """A request that starts or comes back need not compute so many tokens, by where they were:
        `pool`, or the name of a tier. Told again when an overlapped load brings more."""

    def named(self, request: Request, group: int, first: int, block_ids: Sequence[int]) -> None:
        """Blocks of the pool can be found from now on: `block_ids[i]` holds block `first + i` of
        the request in a cache group, under `request.block_hashes[first + i]`. Its parent is the
        hash before, and its tokens are those of `request.all_token_ids` there. The step that
        computes it may still fail, which `unnamed` tells."""

    def unnamed(self, keys: Sequence[bytes]) -> None:
        """No block of the pool has these names any more: hash (32 bytes), then the group (u16,
        little-endian)."""

    def snapshot(self, snapshot: StepSnapshot) -> None:
        """A step is about to be made; what is told until `step` belongs to it."""

    def step(self, made: StepMade) -> None:
        """The step was made, perhaps one without tokens."""


class GuardedObservers(Observer):
    """Other observers, whose mistakes cost the engine nothing; each is called only for what it
    overrides, since most of what is told is told often."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)
        self._find_hearers()

    @property
    def hears_names(self) -> bool:
        """Whether anybody wants to know which blocks have which names."""
        return bool(self._named or self._unnamed)

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        for observer in self._decision:
            try:
                observer.decision(request, decision, cause)
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the observer's
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
        nobody = getattr(Observer, name)
        return tuple([o for o in self._observers if getattr(type(o), name) is not nobody])
