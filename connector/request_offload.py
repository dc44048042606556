# SPDX-License-Identifier: Apache-2.0
"""RequestOffload: the record of one request on the scheduler side of the connector.

    ready ──(begin_load)──► loading ──► ready        all came, some, or the engine ended the load
                               ├──────► failed       nothing more is offered
                               └──────► finished     the request has ended before its load

A record begins with the first call that names its request and ends with `request_finished`. If the
load is still under way then, the request is finished, and its record ends with the load.
"""

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
    """The stage of a request on this side."""

    READY = "ready"  # it waits for its turn or computes, and may be asked about
    LOADING = "loading"
    FAILED = "failed"  # its load has failed
    FINISHED = "finished"  # blocks of its load may still be written to


@dataclass(slots=True, eq=False)
class RequestOffload:
    """The state of one request, from its look-up to the end of its load."""

    request_id: str
    context: RequestContext = NO_CONTEXT
    stage: Stage = Stage.READY
    is_observed: bool = False  # the tiers have learned of its prompt
    lookup: Lookup | None = None  # the last one; older ones of many requests are forgotten
    unanswered: RequestView | None = None  # the request, while remote stores are asked about it
    asked_states: set[bytes] = field(default_factory=set)  # digests of positions; few have any
    read_ahead: LoadTicket | None = None  # blocks read while it waits for its turn
    most_blocks: int | None = None  # of a hit, since a longer one was found to lack a block
    elsewhere: Elsewhere = Elsewhere.NO  # until it is decided whether it waits for that
    wait: PrefillWait | None = None  # for its prompt, which another engine computes
    load: Load | None = None


@dataclass(slots=True, eq=False)
class Lookup:
    """The answer of `Parts.find_longest_hit` for a request's positions from `first` on. `keys` has
    the keys of their parts side by side; `prefix.tiers` an entry for each position of the hit."""

    first: int
    keys: list[bytes]
    prefix: Prefix
    version: int
    is_counted: bool
    plan: Plan | None = None  # what is done about it
    is_decided: bool = False  # such a plan was made before, perhaps on an older answer
    num_queued_tokens: int = 0  # to be computed before this request, when the plan was made
    most_tokens: int | None = None  # after which the next token is computed; see `Parts.needed`
    num_kept: int = 0  # of these positions, whose parts the pool has, but for their states


@dataclass(slots=True, eq=False)
class Load:
    """The load of one request's blocks."""

    offload: RequestOffload
    first_token: int
    keys: list[bytes]  # of the blocks that are needed
    block_ids: GroupBlockIds
    num_blocks: int  # positions
    started: float
    load_frontier: int  # positions from here on have been loaded
    next_end: int  # positions from here on have been asked for
    num_short_tokens: int = 0  # that the last position has less than others
    give_up_at: float | None = None  # on the monotonic clock
    reading: deque[Piece] = field(default_factory=deque)
    copying: deque[Piece] = field(default_factory=deque)
    is_over: bool = False  # only the copies under way are waited for
    is_spoilt: bool = False  # what it brings may be wrong
    failure: str | None = None
    fault: str | None = None  # see `LoadReport.failure`
    shorter_tokens: int = 0  # see `LoadReport.shorter_tokens`
    needed: Sequence[int] = ()  # the place of each among the keys of all parts
    blocks_by_tier: Counter[str] = field(default_factory=Counter)
    # Of an overlapped load:
    is_overlapped: bool = False
    piece_blocks: int = 0
    chunk_tokens: int = 0  # grows while nothing comes, so that a late store costs few steps
    compute_frontier: int = 0  # positions below are computed by the request itself


@dataclass(slots=True, eq=False)
class Piece:
    """Positions `start` to `end` of a load."""

    start: int
    end: int
    ticket: LoadTicket
    jobs: set[int] = field(default_factory=set)  # copies under way
    is_good: bool = True  # so far
