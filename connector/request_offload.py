# SPDX-License-Identifier: Apache-2.0
"""RequestOffload: the record of one request on the scheduler side of the connector.

    ready ──(begin_load)──► loading ──► ready        all came, some, or the engine ended the load
                               ├──────► failed       nothing more is offered
                               └──────► finished     the request has ended before its load

The first call that names a request creates its record. `request_finished` deletes the record,
unless a load still runs; then the end of that load deletes it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..tiers.base import NO_CONTEXT, RequestContext
from ..tiers.hierarchy.prefix_lookup import Prefix
from ..tiers.hierarchy.promotions import LoadTicket
from .base import RequestView
from .costs.economics import Plan
from .messages import Elsewhere, GroupBlockIds
from .prefill_decode.wait_limit import PrefillWait


class Stage(Enum):
    """The stage of a request in the connector."""

    READY = "ready"  # the request waits to run or computes, and may be looked up
    LOADING = "loading"
    FAILED = "failed"  # the load has failed
    FINISHED = "finished"  # a copy may still write to blocks of its load


@dataclass(slots=True, eq=False)
class RequestOffload:
    """The state of one request, from its look-up to the end of its load."""

    request_id: str
    context: RequestContext = NO_CONTEXT
    stage: Stage = Stage.READY
    is_observed: bool = False  # whether its prompt was announced to the tiers
    lookup: Lookup | None = None  # the last look-up; dropped if many requests have newer look-ups
    unanswered: RequestView | None = None  # the request, while remote stores look it up
    asked_states: set[bytes] = field(default_factory=set)  # digests of few positions
    read_ahead: LoadTicket | None = None  # blocks read while the request waits to run
    most_blocks: int | None = None  # limit of a hit, after a longer hit lacked a block
    elsewhere: Elsewhere = Elsewhere.NO  # NO once the wait is decided
    wait: PrefillWait | None = None  # for the prompt, which another engine computes
    load: Load | None = None


@dataclass(slots=True, eq=False)
class Lookup:
    """The answer of `Parts.find_longest_hit` for positions from `first` on. `keys` has all keys of
    these positions, in order; `prefix.tiers` has one entry for each position of the hit."""

    first: int
    keys: list[bytes]
    prefix: Prefix
    version: int
    is_counted: bool
    plan: Plan | None = None  # the plan for the hit
    is_decided: bool = False  # a plan was made before, perhaps for an older result
    num_queued_tokens: int = 0  # tokens computed before this request, at the time of the plan
    most_tokens: int | None = None  # see `Parts.needed`
    num_kept: int = 0  # positions whose parts the pool has; see `Parts.needed`


@dataclass(slots=True, eq=False)
class Load:
    """The load of one request's blocks."""

    offload: RequestOffload
    first_token: int
    keys: list[bytes]  # keys of the needed blocks
    block_ids: GroupBlockIds
    num_blocks: int  # positions
    started: float
    load_frontier: int  # positions from here on have been loaded
    next_end: int  # reads of positions from here on have begun
    num_short_tokens: int = 0  # tokens that the last position lacks to be full
    give_up_at: float | None = None  # on the monotonic clock
    reading: deque[Piece] = field(default_factory=deque)
    copying: deque[Piece] = field(default_factory=deque)
    is_over: bool = False  # the load only waits for copies under way
    is_spoilt: bool = False  # the load's blocks may be wrong
    failure: str | None = None
    fault: str | None = None  # see `LoadReport.failure`
    shorter_tokens: int = 0  # see `LoadReport.shorter_tokens`
    needed: Sequence[int] = ()  # indices of `keys` among the keys of all parts
    blocks_by_tier: Counter[str] = field(default_factory=Counter)
    # Only for an overlapped load:
    is_overlapped: bool = False
    piece_blocks: int = 0
    chunk_tokens: int = 0  # grows while no block comes, so that a slow store causes few steps
    compute_frontier: int = 0  # the request itself computes the positions below


@dataclass(slots=True, eq=False)
class Piece:
    """The positions from `start` to `end` of a load, which are read and copied together."""

    start: int
    end: int
    ticket: LoadTicket
    jobs: set[int] = field(default_factory=set)  # copies under way
    is_good: bool = True  # no block of the piece has failed
