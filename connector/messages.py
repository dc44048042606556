# SPDX-License-Identifier: Apache-2.0
"""Messages between the scheduler and the connector, and between the connector's two sides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class MatchKind(Enum):
    """The result of a look-up: what the scheduler does next with the request."""

    NONE = "none"  # no block to load: schedule the request
    LOAD = "load"  # allocate blocks, begin a blocking load
    OVERLAP = "overlap"  # allocate blocks, begin an overlapped load; LOAD is allowed too
    RETRY = "retry"  # blocks are being read: look up again after the next wake-up


class Match(NamedTuple):
    """The number of tokens that the tiers hold after the tokens in the pool: fewer than the request
    still needs, and without a `tail_hash` a multiple of the block size."""

    tokens: int
    kind: MatchKind
    # Leading tokens of the request whose K and V can be loaded, but not the states after them.
    junction: int = 0


# Nothing to load.
NO_MATCH = Match(0, MatchKind.NONE)


class EvictedBlock(NamedTuple):
    """A pool block and its key. An evicted block has lost the key in this step, and the step
    overwrites the block. Cold, just computed and resident blocks are EvictedBlocks too, but keep
    key and bytes. A block has a page in one cache group or in several consecutive groups
    (`page_keys.pages_of`)."""

    block_id: int  # of the block's first page; the next pages have the next ids
    key: bytes  # digest | group u16, the pool's key of the first page
    num_pages: int = 1


# One list of block ids for each cache group, all of the same length. If layers carry states,
# another list follows: the pages of a state checkpoint, one for each piece.
GroupBlockIds = Sequence[Sequence[int]]


class Part(NamedTuple):
    """The cache group and the tensor-parallel rank of one block of a position (`parts.py`)."""

    group: int = 0
    rank: int = 0


ONLY_PART = Part()


@dataclass(slots=True)
class CopyJob:
    """Blocks of one `Part` to copy between the pool and the slab: `block_ids[i]` ↔ `slots[i]`."""

    job_id: int
    block_ids: list[int]
    slots: list[int]
    part: Part = ONLY_PART


@dataclass(slots=True)
class ConnectorMetadata:
    """The copies of one step, from the scheduler side to the worker side."""

    stores: list[CopyJob] = field(default_factory=list)  # pool → slab, before the forward pass
    loads: list[CopyJob] = field(default_factory=list)  # slab → pool, after the stores
    # pool → slab, in parallel with the forward pass; this step does not write to these blocks.
    ahead: list[CopyJob] = field(default_factory=list)
    # Earlier jobs of `ahead` that still run and whose blocks this step overwrites.
    overtaken: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.stores or self.loads or self.ahead or self.overtaken)


# For steps without copies; never changed.
NOTHING_TO_MOVE = ConnectorMetadata()


@dataclass(slots=True)
class ConnectorWorkerOutput:
    """The ids of copy jobs (from ConnectorMetadata) that finished since the last poll."""

    finished_stores: list[int] = field(default_factory=list)
    failed_stores: list[int] = field(default_factory=list)
    finished_loads: list[int] = field(default_factory=list)
    failed_loads: list[int] = field(default_factory=list)
    # Digests of stored blocks by job id, if the device makes digests: one per block, in job order.
    store_digests: dict[int, list[bytes]] = field(default_factory=dict)
    # The number of jobs ended since the start, perhaps including jobs of the next poll.
    num_ended: int = field(default=0, compare=False)
    # Costs, for metrics only.
    store_copy_seconds: float = field(default=0.0, compare=False)  # of ended stores
    load_copy_seconds: float = field(default=0.0, compare=False)  # of ended loads
    store_wait_seconds: float = field(default=0.0, compare=False)  # of the step, for stores

    def __bool__(self) -> bool:
        return bool(
            self.finished_stores or self.failed_stores or self.finished_loads or self.failed_loads
        )


# For polls without finished jobs; never changed.
NOTHING_FINISHED = ConnectorWorkerOutput()


@dataclass(slots=True)
class LoadReport:
    """The result of one request's load, sent when the load has ended."""

    request_id: str
    # How many external tokens were loaded: the first tokens of a blocking load, the last tokens of
    # an overlapped load. 0 on failure.
    num_loaded_tokens: int
    tokens_by_tier: dict[str, int] = field(default_factory=dict)  # "cpu" | "ssd" → tokens
    seconds: float = 0.0
    is_whole: bool = field(default=True, compare=False)  # all blocks of the load came
    # Why blocks that a tier had did not come, in words. None without a fault, and for a load that
    # was given up because computing was quicker.
    failure: str | None = field(default=None, compare=False)
    # Whether the engine ended the load itself, without a fault.
    is_cancelled: bool = field(default=False, compare=False)
    # The most tokens of a hit for which the next look-up searches, if no block came because a
    # window lacks a block that longer hits need. 0: no shorter hit.
    shorter_tokens: int = field(default=0, compare=False)


class HandedOver(NamedTuple):
    """The result of one hand-over."""

    request_id: str
    missing: list[bytes]  # the pool's keys of blocks that other engines cannot load


class LoadState(NamedTuple):
    """The limit up to which a request with an overlapped load may compute."""

    limit: int  # tokens; at the limit the request waits for a copy or the load's end
    load_frontier: int  # all tokens of the load from this index on have been loaded
    is_copying: bool  # blocks before the load frontier are being written to
    failure: str | None = None  # see `LoadReport.failure`


class Elsewhere(Enum):
    """Whether another engine computes the prompt of a request at this moment."""

    NO = "no"
    PERHAPS = "perhaps"  # another engine computes the prompt if blocks of the prompt come
    TOLD = "told"  # the sender of the request states that another engine does
