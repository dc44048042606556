# SPDX-License-Identifier: Apache-2.0
"""The contract of a KVConnector, the engine's only access to the tiers.

A connector has two sides, which may run in two processes. The *scheduler side* decides, in the
engine's step loop, which blocks are copied, and handles no bytes; the *worker side* moves bytes
between the KV pool and the slab (the CPU tier's memory). The scheduler side sends its decisions as
`ConnectorMetadata`, and the worker side sends its results as `ConnectorWorkerOutput`. The two sides
share nothing else but a wake-up function, which the worker side calls.

One step, in order:
    scheduler: get_matched_tokens → (blocks allocated) → begin_load → build_meta
    worker:    start_step(meta)   begins the stores, then the loads, in stream order
               wait_before_forward()   waits until the blocks that this step overwrites are copied;
                                       stores of cold blocks may still run
               (forward pass)
               poll()             copies that have finished since the last poll
    scheduler: update_from_worker(output)

A request with a *blocking* load waits until a `LoadReport` names the request. A request with an
*overlapped* load computes its blocks from the front while the load brings blocks from the back.

A connector guarantees to the engine:
- three methods of the scheduler side may wait, for a bounded time: `build_calibration_meta`,
  `reset` and `shutdown`. No other method waits for a copy, a disk or a socket;
- a request that waits for its load gets exactly one `LoadReport`, of success or of failure;
- a load brings the blocks of all cache groups at a position, or no block at that position;
- after a failed load the connector never offers the same request more tokens;
- an error inside the connector affects the engine only as a failed load.
The engine guarantees to a connector:
- the blocks of a request that waits for a load are not reused before its `LoadReport`, even if the
  request was aborted;
- evicted blocks are passed to `build_meta` in the step that evicts them, before they are
  overwritten;
- `StoresAhead.names_dropped` is called for blocks that lose their keys without being evicted,
  because such blocks may be overwritten or invalid.
This module depends on no scheduler or model: a `RequestView` stands for an engine's request."""

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

# Time for copies to end at shutdown; a copy takes milliseconds unless it is stuck.
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
        """Digest of the last, partly filled block of a prompt that another engine computed, over
        the tokens which that engine computed. b"" if the last block is full; None unless another
        engine computed the prompt."""


class TierEstimates(ABC):
    """Estimates of the cost of loads, and the state of the tiers. An optional interface."""

    @abstractmethod
    def build_calibration_meta(self, block_ids: Sequence[int], seconds: float) -> ConnectorMetadata:
        """Return a trial load to the unused `block_ids`, by which the connector measures how long
        loads take. The engine calls this method before the first request, until the result is
        empty, and runs each result like a step without a forward pass. Waits `seconds` at most."""

    @abstractmethod
    def describe(self) -> str:
        """Return a line with estimates, and the prompt lengths from which loading beats
        computing."""

    @abstractmethod
    def tiers_down(self) -> list[str]:
        """The names of the tiers that cannot be reached at present."""

    @abstractmethod
    def cpu_blocks(self) -> tuple[int, int]:
        """Return the numbers of free slots and of all slots of the CPU tier, without I/O."""


class OverlappedLoads(ABC):
    """Loads that run while their requests compute, for a connector that returns OVERLAP."""

    @abstractmethod
    def load_state(self, request_id: str, num_computed_tokens: int) -> LoadState:
        """Return the limit up to which the request may compute. The engine calls this before each
        step of a request with an overlapped load. Afterwards no copy writes below the limit."""

    @abstractmethod
    def end_load(self, request_id: str) -> LoadReport | None:
        """End an overlapped load and return its report, which counts the load's last tokens. Return
        None while a copy writes to the load's blocks; the engine then keeps the blocks until
        `update_from_worker` reports a failed load (`is_cancelled` unless it failed before)."""


class StoresAhead(ABC):
    """Stores of cold blocks before their eviction, in parallel with a forward pass."""

    @abstractmethod
    def num_wanted_ahead(self) -> int:
        """The largest number of cold blocks that the engine may pass to the next `build_meta`."""

    @abstractmethod
    def names_dropped(self, blocks: Sequence[EvictedBlock]) -> None:
        """Discard running copies of `blocks`, which lost their keys without being evicted, and may
        be overwritten after this call."""


class PromptsElsewhere(ABC):
    """Requests whose prompts another engine computes."""

    @abstractmethod
    def expect_prompts(self) -> None:
        """Begin to watch the stores for prompts that other engines compute for this engine."""

    @abstractmethod
    def follow_blocks(self, block_hashes: Sequence[bytes]) -> bool:
        """Read the blocks of a prompt while another engine stores the blocks, because this engine
        will get a request with that prompt. Return False if the connector ignores this hint."""

    @abstractmethod
    def await_prefill(self, request_id: str, elsewhere: Elsewhere) -> None:
        """Note that another engine may be computing the prompt of a queued request. The first
        look-up may then make the request wait for that engine's blocks, for a bounded time."""


class HandOver(ABC):
    """Prompts that this engine computes for requests that continue on another engine."""

    @abstractmethod
    def hand_over(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Write the blocks with `keys`, in the order of the prompt, to the stores that other
        engines read, and keep the blocks there for a while, because another engine is about to load
        them. `build_meta` got the blocks before, under the same pool keys. Requires `wants_all`."""

    @abstractmethod
    def take_handed_over(self) -> list[HandedOver]:
        """Return the hand-overs that have ended since the last call. Other engines can now load the
        handed-over blocks, except for the blocks in `HandedOver.missing`."""

    @abstractmethod
    def forget_hand_over(self, request_id: str) -> None:
        """End the hand-over of this request without a result."""


class JobRetention(ABC):
    """Blocks of agents' jobs that the tiers keep between two turns (requests) of a job."""

    @abstractmethod
    def turn_ended(
        self,
        job: bytes,
        block_hashes: Sequence[bytes],
        seconds: float,
        due_seconds: float | None,
    ) -> None:
        """Keep the blocks with `block_hashes`, with which the prompt of the job's next turn begins,
        in the tiers for `seconds`. After `due_seconds`, when that turn is expected (None: unknown),
        read the blocks into the fastest tier. Blocks of the job's previous turn are released."""

    @abstractmethod
    def turn_expected(self, job: bytes, due_seconds: float) -> None:
        """Set the number of seconds from now after which the next turn of the job is due."""

    @abstractmethod
    def job_ended(self, job: bytes) -> None:
        """Stop keeping blocks for a job that will have no further turn."""


class KVConnectorScheduler(ABC):
    """The scheduler side, which decides what is stored and loaded. Only the engine's step thread
    calls this side and its optional interfaces. The engine reads their attributes once, at the
    start."""

    # Optional interfaces. The engine does not use the feature of an interface that is None.
    estimates: TierEstimates | None = None
    overlapped_loads: OverlappedLoads | None = None
    stores_ahead: StoresAhead | None = None
    prompts_elsewhere: PromptsElsewhere | None = None
    handover: HandOver | None = None
    job_retention: JobRetention | None = None
    # Whether there are tiers to load from.
    has_tiers = True
    # Whether blocks are stored as soon as they are computed, because other engines wait for them.
    # Otherwise blocks are stored when their eviction is near. Constant after the start.
    wants_all = False
    # Ids of the requests that wait now because of `PromptsElsewhere.await_prefill`. The engine does
    # not look up these requests, and does not change the collection.
    awaiting_prefill: Collection[str] = ()

    def request_queued(  # noqa: B027 - an implementation may ignore the call
        self, request: RequestView, context: RequestContext = NO_CONTEXT
    ) -> None:
        """Note a request that the engine will look up once the engine has room for it. The
        connector may begin to read the request's blocks."""

    def request_finished(self, request_id: str) -> None:  # noqa: B027 - may be ignored
        """Drop a request that has finished or was aborted, and will not be looked up again."""

    @abstractmethod
    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        """Return the number of tokens that the tiers hold right after the first
        `num_computed_tokens` (block aligned), and the next action. The engine first computes
        `num_queued_tokens` of other requests; meanwhile a load delays no request. If
        `num_pool_tokens` is larger than `num_computed_tokens`, the pool has K and V of this many
        leading tokens, but not the layer states after them. The tiers are then searched only for
        these states, and the tokens count as loaded from a tier."""

    @abstractmethod
    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        """Load `num_tokens` external tokens into the pool blocks `block_ids`: for each cache group
        exactly the blocks of these tokens, in order. Blocks that the pool has already
        (`num_pool_tokens`) are not written. The request waits until a `LoadReport` names the
        request. With `overlapped`, which is allowed only after `MatchKind.OVERLAP`, the request
        does not wait but computes the external tokens from the first one on, up to the limit that
        `OverlappedLoads.load_state` returns."""

    @abstractmethod
    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        """Return the copies of this step for the worker side. The engine calls this method at the
        end of `schedule()`, also on empty steps. `cold` blocks keep their keys: they are the next
        blocks to be evicted, in eviction order, or (see `wants_all`) blocks just computed, the tail
        of a sequence before its head. The engine passes at most `StoresAhead.num_wanted_ahead` cold
        blocks at a time, and a block again only for a hand-over. At an orderly shutdown the engine
        passes all computed, cached blocks as evicted, in eviction order, so that the tiers keep as
        many blocks as fit; then the engine calls `shutdown`."""

    @abstractmethod
    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        """Process finished copies. Return the reports of ended loads."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """Whether the engine should run a step, even an empty step: a copy or a report is due, or a
        request that got RETRY should be looked up again. The result is False while the connector
        only waits for a disk or a copy, whose end calls the wake-up function."""

    @abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """Set the wake-up function. The connector calls it, from any thread, when
        `has_pending_work` may have become True."""

    def invalidate_blocks(self, keys: Sequence[bytes], cause: str) -> None:  # noqa: B027 - optional
        """Drop blocks of one sequence from every tier, because the blocks' contents may be wrong,
        and discard running copies of the blocks, to a tier or to the pool. `keys` are the pool's
        keys, in the order of the sequence. `cause` is one word, by which the counters label the
        blocks. By default the blocks stay in the tiers until they are evicted."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all blocks of all tiers (prefix-cache reset). Waits briefly for disk writes."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Return counters for metrics: plain numbers, by tier. Empty without tiers."""

    @abstractmethod
    def shutdown(self, timeout_seconds: float) -> None:
        """Write the blocks that should survive a restart to the stores, within `timeout_seconds`,
        and release all resources. Idempotent."""


class NullConnector(KVConnectorScheduler):
    """A scheduler side without tiers, which finds and moves no blocks."""

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
    """The worker side, which moves bytes. Only the worker's thread calls its methods."""

    @abstractmethod
    def register_pool(self, pool: torch.Tensor) -> None:
        """Register the KV pool `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`,
        contiguous; called once, before the first step."""

    @abstractmethod
    def start_step(self, meta: ConnectorMetadata) -> None:
        """Queue the step's copies: stores, then loads. On the CPU this call makes small copies
        itself. The call never raises; copies that could not begin are reported as failed."""

    @abstractmethod
    def wait_before_forward(self) -> None:
        """Wait until the forward pass may overwrite the blocks that this step evicts. On return the
        step's stores, and the earlier stores in `ConnectorMetadata.overtaken`, have read the
        blocks, or the device delays the forward pass until the stores have read them."""

    @abstractmethod
    def poll(self) -> ConnectorWorkerOutput | None:
        """Return, without waiting, the copies finished since the last call; None if there are never
        any."""

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
