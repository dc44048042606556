# SPDX-License-Identifier: Apache-2.0
"""Who wants to know what an engine decides: traces, events for routers, statistics.

An engine has no observer unless it is given one, and then pays nothing for it. Every call is made
by the engine's step thread and must return at once; an observer that raises hears nothing more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from .request import Request

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
    """Other observers, whose mistakes cost the engine nothing."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self._observers = list(observers)

    def decision(self, request: Request, decision: Decision, cause: str = "") -> None:
        self._tell(lambda observer: observer.decision(request, decision, cause))

    def hit(self, request: Request, tokens: Mapping[str, int]) -> None:
        self._tell(lambda observer: observer.hit(request, tokens))

    def named(self, request: Request, group: int, first: int, block_ids: Sequence[int]) -> None:
        self._tell(lambda observer: observer.named(request, group, first, block_ids))

    def unnamed(self, keys: Sequence[bytes]) -> None:
        self._tell(lambda observer: observer.unnamed(keys))

    def snapshot(self, snapshot: StepSnapshot) -> None:
        self._tell(lambda observer: observer.snapshot(snapshot))

    def step(self, made: StepMade) -> None:
        self._tell(lambda observer: observer.step(made))

    def _tell(self, tell: Callable[[Observer], None]) -> None:
        for observer in tuple(self._observers):
            try:
                tell(observer)
            except Exception:
                logger.exception("an observer failed, and hears nothing more")
                self._observers.remove(observer)
