# SPDX-License-Identifier: Apache-2.0
"""The contract of a KVConnector, the engine's only access to the tiers.

A connector has two sides. The *scheduler side* decides in the engine's step loop and touches
metadata only; the *worker side* moves bytes between the KV pool and the slab. Decisions travel to
the worker side in `ConnectorMetadata`, results come back in `ConnectorWorkerOutput`. The sides
share nothing else but a wake-up that the worker side calls, and may live in two processes.

One step, in order:
    scheduler: get_matched_tokens → (blocks allocated) → begin_load → build_meta
    worker:    start_step(meta)   stores begin, then loads, in stream order
               wait_before_forward()   blocks this step overwrites have left the pool; those that
                                       are stored ahead of need may still be on their way
               (forward pass)
               poll()             copies that have finished since the last poll
    scheduler: update_from_worker(output)

The request of a *blocking* load waits until the load is reported. The request of an *overlapped*
load computes from the front while blocks come from the back, until the two frontiers meet.

The engine may rely on this:
- three calls of the scheduler side wait, for a bounded time: `build_calibration_meta`, `reset` and
  `shutdown`. No other call waits for a copy, a disk or a socket;
- a request that waits for its load is reported exactly once, as finished or as failed;
- a load brings a position's blocks of every cache group, or none of them;
- after a failed load the connector never offers the same request more tokens;
- an error raised inside the connector reaches the engine as a failed load at most.
The engine must do this:
- not reuse the blocks of a waiting request before it was reported, even if it was aborted;
- hand over evicted blocks in the step that evicts them, before anything is written to them;
- report a block that loses its name without being evicted (`StoresAhead.names_dropped`): it may be
  overwritten or invalid.
This module depends on no scheduler or model: it sees requests and pools through small protocols.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Protocol

from ..tiers.base import NO_CONTEXT, RequestContext

if TYPE_CHECKING:
    import torch
from .messages import (
    NO_MATCH,
    NOTHING_TO_MOVE,
    ConnectorMetadata,
    ConnectorWorkerOutput,
    Elsewhere,
    EvictedBlock,
    GroupBlockIds,
    HandedOver,
    LoadReport,
    LoadState,
    Match,
)

# Copies take milliseconds; one that has not ended by then is stuck.
CLOSE_SECONDS = 30.0


class RequestView(Protocol):
    """The connector's view of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Digests (32 bytes) of the full blocks so far."""

    @property
    def tail_hash(self) -> bytes | None:
        """Digest of the partly filled block behind the full ones, for a request whose prompt
        another engine computed: it covers the tokens that engine computed. b"" without such a
        block; None for other requests."""


class TierEstimates(ABC):
    """Estimated costs of loading, and the tiers that can be loaded from. An optional side."""

    @abstractmethod
    def build_calibration_meta(self, block_ids: Sequence[int], seconds: float) -> ConnectorMetadata:
        """Return the metadata of a load to the unused `block_ids`, by which the connector measures
        how long loads take. Call this before the first request, until it returns nothing. Run the
        result like the metadata of a step, without a forward pass. Waits `seconds` at most."""

    @abstractmethod
    def describe(self) -> str:
        """The estimates, and the prompt lengths from which loading pays, as one line of text."""

    @abstractmethod
    def tiers_down(self) -> list[str]:
        """The names of tiers that do not answer at present."""

    @abstractmethod
    def cpu_blocks(self) -> tuple[int, int]:
        """Free slots and all slots of the CPU tier, in blocks. Asks no store."""


class OverlappedLoads(ABC):
    """Loads that run while their requests compute; needed by a connector that returns OVERLAP."""

    @abstractmethod
    def load_state(self, request_id: str, num_computed_tokens: int) -> LoadState:
        """Return how far the request may compute. The engine asks before each step of a request
        with an overlapped load. No copy writes to blocks below the limit from now on."""

    @abstractmethod
    def end_load(self, request_id: str) -> LoadReport | None:
        """End an overlapped load and return its report, which counts the last tokens, not the
        first. Return None while a copy writes to the load's blocks: keep them until
        `update_from_worker` reports a failed load (`is_cancelled` unless it had failed)."""


class StoresAhead(ABC):
    """Stores of cold blocks before they are evicted, beside a forward pass."""

    @abstractmethod
    def num_wanted_ahead(self) -> int:
        """The most cold blocks to give to the next `build_meta`."""

    @abstractmethod
    def names_dropped(self, blocks: Sequence[EvictedBlock]) -> None:
        """Void pending copies of these blocks. They lost their names without being evicted, and may
        be overwritten from now on."""


class PromptsElsewhere(ABC):
    """Requests whose prompts another engine computes."""

    @abstractmethod
    def expect_prompts(self) -> None:
        """Watch the stores from now on for prompts that other engines compute for requests here."""

    @abstractmethod
    def follow_blocks(self, block_hashes: Sequence[bytes]) -> bool:
        """Read the blocks of a prompt as another engine stores them, because a request for the
        prompt will come here. A hint; return False if this connector cannot use it."""

    @abstractmethod
    def await_prefill(self, request_id: str, elsewhere: Elsewhere) -> None:
        """Note that another engine may be computing the prompt of a queued request. The first
        look-up may then make the request wait for that engine's blocks, for a bounded time."""


class HandOver(ABC):
    """Prompts that this engine computes for requests that continue on another engine."""

    @abstractmethod
    def hand_over(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Write these blocks, head first, to the stores that other engines read, and keep them
        there for a while: those engines are about to load them. `keys` are names of the pool. The
        engine has given the computed blocks to `build_meta`. Requires `wants_all`."""

    @abstractmethod
    def take_handed_over(self) -> list[HandedOver]:
        """The hand-overs that have ended since the last call: other engines can load the blocks
        now, or some blocks failed (`HandedOver.missing`)."""

    @abstractmethod
    def forget_hand_over(self, request_id: str) -> None:
        """Stop waiting for the blocks of this request."""


class JobRetention(ABC):
    """Turns of jobs that are kept in the tiers until the next one comes."""

    @abstractmethod
    def turn_ended(
        self,
        job: bytes,
        block_hashes: Sequence[bytes],
        seconds: float,
        due_seconds: float | None,
    ) -> None:
        """Keep these blocks in the tiers for `seconds`: the job's next turn begins with them. That
        turn probably comes in `due_seconds`; the fastest tier has the blocks by then. Replaces an
        earlier turn of the job."""

    @abstractmethod
    def turn_expected(self, job: bytes, due_seconds: float) -> None:
        """Set the seconds from now in which the next turn of a job is due."""

    @abstractmethod
    def job_ended(self, job: bytes) -> None:
        """Stop keeping blocks for a job: no other turn of it will come."""


class KVConnectorScheduler(ABC):
    """The side that decides. Only the engine's step thread calls it and its optional sides. The
    engine reads the optional sides once, at the start."""

    # Optional sides. Without one, the engine does not use its feature.
    estimates: TierEstimates | None = None
    overlapped_loads: OverlappedLoads | None = None
    stores_ahead: StoresAhead | None = None
    prompts_elsewhere: PromptsElsewhere | None = None
    handover: HandOver | None = None
    job_retention: JobRetention | None = None
    # Whether there are tiers to load from; only counters read it.
    has_tiers = True
    # Whether blocks are stored as soon as they are computed, because other engines wait for them.
    # Otherwise they are stored when they are about to be evicted. Constant after the start.
    wants_all = False
    # Ids of the requests that wait now because of `PromptsElsewhere.await_prefill`. The engine does
    # not look them up meanwhile, and does not change the collection.
    awaiting_prefill: Collection[str] = ()

    def request_queued(  # noqa: B027 - a hint, not a duty
        self, request: RequestView, context: RequestContext = NO_CONTEXT
    ) -> None:
        """Note a request that the engine will look up once it has room. Reads may begin."""

    def request_finished(self, request_id: str) -> None:  # noqa: B027 - as above
        """Drop a request that has ended, in any way; the engine will not look it up again."""

    @abstractmethod
    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        """Tokens the tiers hold right after the first `num_computed_tokens` (block aligned). The
        engine computes `num_queued_tokens` of other requests first, and a load has that time.
        `num_pool_tokens`, more than `num_computed_tokens`: the pool has K and V of this many
        leading tokens, but not the states behind them. The tiers are asked only for these states,
        and the tokens count as a tier's if the states come from one."""

    @abstractmethod
    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        """Load `num_tokens` external tokens to `block_ids`, which has exactly their blocks, in
        order, for each cache group. Blocks that the pool has (`num_pool_tokens`) are not written.
        The request now waits until a LoadReport names it. With `overlapped`, allowed only after
        OVERLAP, the request does not wait: it computes these tokens itself, from the first one on,
        as far as `OverlappedLoads.load_state` allows."""

    @abstractmethod
    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        """Return the worker's copies at the end of `schedule()`, also on empty steps. The `cold`
        blocks keep their names: they are the next ones to be evicted, in eviction order, or (see
        `wants_all`) just computed, the tail of a sequence before its head. The engine gives a block
        once, and again only for a hand-over, and at most `StoresAhead.num_wanted_ahead` blocks at a
        time. An orderly shutdown evicts all computed, named blocks, in eviction order and without a
        forward pass, so that as many survive as tiers have room for; then `shutdown` follows."""

    @abstractmethod
    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        """Take in finished copies. Return reports of the waiting requests that may go on."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """True while a step, even an empty one, has something to move or to report now, or a
        request that got RETRY should be looked up again. False while the connector only waits for a
        disk or a copy: it calls the wake-up function at the end."""

    @abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the function that any thread calls when `has_pending_work` may have become True."""

    def invalidate_blocks(self, keys: Sequence[bytes], cause: str) -> None:  # noqa: B027 - see below
        """Drop the blocks of one chain from every tier, because they may be wrong; drop their
        copies under way, to a tier or the pool, too. `keys` are the pool's, head first. `cause`,
        one word, labels them in the counters. Optional: by default the blocks stay until they are
        evicted."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all blocks of all tiers (prefix-cache reset). Waits a while for disks to forget."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Counters for metrics: plain numbers, per tier. Empty if there is nothing to count."""

    @abstractmethod
    def shutdown(self, timeout_seconds: float) -> None:
        """Write the blocks that should survive to the stores, in time; release all. Idempotent."""


class NullConnector(KVConnectorScheduler):
    """A scheduler side without tiers: it finds nothing and moves nothing."""

    has_tiers = False

    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        return NO_MATCH

    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        raise RuntimeError("there are no tiers to load from")

    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        return NOTHING_TO_MOVE

    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        return []

    def has_pending_work(self) -> bool:
        return False

    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        pass

    def reset(self) -> None:
        pass

    def stats(self) -> dict[str, object]:
        return {}

    def shutdown(self, timeout_seconds: float) -> None:
        pass


class KVConnectorWorker(ABC):
    """The side that moves bytes. Only the worker's thread calls it."""

    @abstractmethod
    def register_pool(self, pool: torch.Tensor) -> None:
        """Register the KV pool `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`,
        contiguous; called once, before the first step."""

    @abstractmethod
    def start_step(self, meta: ConnectorMetadata) -> None:
        """Queue the step's copies: stores, then loads. On the CPU this call makes small copies
        itself. Raises nothing: copies that could not begin are reported as failed."""

    @abstractmethod
    def wait_before_forward(self) -> None:
        """Return when the forward pass may overwrite the blocks that this step evicts: the step's
        stores and the overtaken earlier ones have read them, or will before the pass writes."""

    @abstractmethod
    def poll(self) -> ConnectorWorkerOutput | None:
        """Return the copies finished since the last call. None if this side never makes copies.
        Never waits."""

    @abstractmethod
    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait for copies, `timeout_seconds` at most, and release the pool. Idempotent."""


class NullConnectorWorker(KVConnectorWorker):
    """The worker side without tiers."""

    def register_pool(self, pool: torch.Tensor) -> None:
        pass

    def start_step(self, meta: ConnectorMetadata) -> None:
        pass

    def wait_before_forward(self) -> None:
        pass

    def poll(self) -> None:
        return None

    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        pass
