# SPDX-License-Identifier: Apache-2.0
"""The promise of a KVConnector: the engine's only door to the tiers.

A connector has two sides. The *scheduler side* decides in the engine's step loop and touches
metadata only; the *worker side* moves bytes between the KV pool and the slab. What the first
decides travels to the second in `ConnectorMetadata`, what became of it comes back in
`ConnectorWorkerOutput`. The sides share nothing else but a wake-up that the worker side calls, and
may live in two processes.

One step, in order:
    scheduler: get_matched_tokens → (blocks allocated) → begin_load → build_meta
    worker:    start_step(meta)   stores begin, then loads, in stream order
               wait_before_forward()   blocks this step overwrites have left the pool; those that
                                       are stored ahead of need may still be on their way
               (forward pass)
               poll()             what has finished since the last poll
    scheduler: update_from_worker(output)

A load is *blocking*, and its request waits until it is reported; or *overlapped*, and its request
computes from the front while blocks come from the back, until the two frontiers meet.

The engine may rely on this:
- of the scheduler side only `build_calibration_meta`, `reset` and `shutdown` wait, for a bounded
  time; no other call waits for a copy, a disk or a socket;
- a request that waits for its load is reported exactly once, finished or failed, also when its load
  broke;
- a load brings a position in the blocks of every cache group or not at all;
- after a failed load the connector never offers the same request more tokens;
- nothing raised inside the connector reaches the engine as more than a failed load.
The engine must do this:
- not reuse the blocks of a waiting request before it was reported, even if it was aborted;
- hand over evicted blocks in the step that evicts them, before anything is written to them;
- say so when blocks lost their names in another way (`StoresAhead`): they may be overwritten
  without having been evicted, or be worth nothing.
Knows nothing of schedulers or models: requests and pools are seen through small protocols.
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
    """What a connector sees of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Digests (32 bytes) of the full blocks so far."""

    @property
    def tail_hash(self) -> bytes | None:
        """For a request whose prompt another engine has computed: the digest of the block behind
        the full ones as far as it was computed there, b"" where there is none. None for others."""


class TierEstimates(ABC):
    """What loading is taken to cost, and which tiers can be loaded from. An optional part."""

    @abstractmethod
    def build_calibration_meta(self, block_ids: Sequence[int], seconds: float) -> ConnectorMetadata:
        """Before the first request, as often as anything is returned: a load by which the
        connector learns what loads take, to `block_ids`, which are unused. Run it like the
        metadata of a step, without a forward pass. Waits `seconds` at most."""

    @abstractmethod
    def describe(self) -> str:
        """The estimates, and where loading pays: one line for a person."""

    @abstractmethod
    def tiers_down(self) -> list[str]:
        """The names of tiers that cannot be asked at present."""

    @abstractmethod
    def cpu_blocks(self) -> tuple[int, int]:
        """Blocks of the CPU tier: free places, and places. Memory only."""


class OverlappedLoads(ABC):
    """Loads whose requests compute beside them. For connectors that answer OVERLAP."""

    @abstractmethod
    def load_state(self, request_id: str, num_computed_tokens: int) -> LoadState:
        """Asked in each step before a request with an overlapped load gets tokens. Blocks below the
        limit are the request's own from now on: nothing will be copied to them."""

    @abstractmethod
    def end_load(self, request_id: str) -> LoadReport | None:
        """End an overlapped load. The report, whose tokens are the last ones and not the first;
        None while a copy still writes to its blocks. `update_from_worker` then reports it as a
        failed load (`is_cancelled` unless it had failed); keep the blocks until then."""


class StoresAhead(ABC):
    """Stores of cold blocks before they are evicted, beside a forward pass."""

    @abstractmethod
    def num_wanted_ahead(self) -> int:
        """The cold blocks, at most, to be given to the next `build_meta`."""

    @abstractmethod
    def names_dropped(self, blocks: Sequence[EvictedBlock]) -> None:
        """These blocks lost their names without being evicted, and may be overwritten from now on:
        no copy of them that is under way may be kept."""


class PromptsElsewhere(ABC):
    """Requests whose prompts another engine computes."""

    @abstractmethod
    def expect_prompts(self) -> None:
        """Requests will come whose prompts other engines compute: what those store is to be heard
        of from now on."""

    @abstractmethod
    def follow_blocks(self, block_hashes: Sequence[bytes]) -> bool:
        """Another engine computes a prompt with these blocks, and a request for it will come: what
        it stores is to be near by then. A hint; False where it is of no use."""

    @abstractmethod
    def await_prefill(self, request_id: str, elsewhere: Elsewhere) -> None:
        """Another engine may be computing the prompt of a request that was queued. When it is first
        asked about, it may be made to wait for blocks that are to come; bounded in time."""


class HandOver(ABC):
    """Prompts that this engine computes and another one goes on with."""

    @abstractmethod
    def hand_over(self, request_id: str, keys: Sequence[bytes]) -> None:
        """Other engines are about to load these blocks, named as by the pool, head first; those
        that were computed have been given to `build_meta`. They are written where others look,
        and kept there for a while. Only for connectors with `wants_all`."""

    @abstractmethod
    def take_handed_over(self) -> list[HandedOver]:
        """The requests whose blocks others can load by now, or never will: each is named once."""

    @abstractmethod
    def forget_hand_over(self, request_id: str) -> None:
        """The blocks of this request are no longer waited for."""


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
        """A turn of a job has ended, and the next one, which begins with these blocks, will come
        within `seconds`, probably in `due_seconds`: what the tiers have of them is to stay, and to
        be near by then. It takes the place of an earlier turn of the job."""

    @abstractmethod
    def turn_expected(self, job: bytes, due_seconds: float) -> None:
        """It is known now when the next turn of a job is due."""

    @abstractmethod
    def job_ended(self, job: bytes) -> None:
        """No other turn of a job will come."""


class KVConnectorScheduler(ABC):
    """The side that decides. Called by the engine's step thread only, as its optional sides are;
    the engine asks for those once, at the start."""

    # None: nothing is estimated, overlapped, stored ahead, awaited, handed over, kept for jobs.
    estimates: TierEstimates | None = None
    overlapped_loads: OverlappedLoads | None = None
    stores_ahead: StoresAhead | None = None
    prompts_elsewhere: PromptsElsewhere | None = None
    handover: HandOver | None = None
    job_retention: JobRetention | None = None
    # Whether there is anything to load from; only counters look at it.
    has_tiers = True
    # Whether blocks are wanted as soon as they are computed, because others wait for them, and not
    # only when they are about to be evicted. The same from the start to the end.
    wants_all = False
    # Requests that wait now because of `PromptsElsewhere.await_prefill`, by id: they are not asked
    # about meanwhile. Not to be changed.
    awaiting_prefill: Collection[str] = ()

    def request_queued(  # noqa: B027 - a hint, not a duty
        self, request: RequestView, context: RequestContext = NO_CONTEXT
    ) -> None:
        """A request has come and will be asked about once there is room: reads may begin."""

    def request_finished(self, request_id: str) -> None:  # noqa: B027 - as above
        """A request has ended, in any way; it will not be asked about again."""

    @abstractmethod
    def get_matched_tokens(
        self,
        request: RequestView,
        num_computed_tokens: int,
        *,
        num_queued_tokens: int = 0,
        num_pool_tokens: int | None = None,
    ) -> Match:
        """Tokens the tiers hold right after the first `num_computed_tokens` (block aligned).
        `num_queued_tokens` have to be computed before any of this request's, which gives a load
        that much time. `num_pool_tokens`: of so many, which are more, the pool has K and V, and
        lacks the states behind them; those are not asked for, and count as tokens of a tier where
        the states behind them come from one."""

    @abstractmethod
    def begin_load(
        self,
        request: RequestView,
        block_ids: GroupBlockIds,
        num_tokens: int,
        *,
        overlapped: bool,
    ) -> None:
        """Blocks for `num_tokens` external tokens exist: `block_ids` are exactly those blocks, in
        order, for each cache group; those that the pool has (`num_pool_tokens`) are left alone.
        From here on the request waits until a LoadReport names it.
        `overlapped`, only after OVERLAP: it does not wait, but computes these tokens itself, from
        the first one on, as far as `OverlappedLoads.load_state` allows."""

    @abstractmethod
    def build_meta(
        self, evicted: Sequence[EvictedBlock], cold: Sequence[EvictedBlock] = ()
    ) -> ConnectorMetadata:
        """End of `schedule()`, also on empty steps: what the worker has to move. `cold`:
        blocks that keep their names, those evicted next in eviction order or (see `wants_all`)
        those just computed, the tail of a sequence before its head. Each is given once, and again
        only to be handed over; at most as many as `StoresAhead.num_wanted_ahead` has just said. At
        an orderly shutdown all computed, named blocks are evicted, in eviction order and without a
        forward pass, so that as many survive as tiers have room for; then `shutdown` follows."""

    @abstractmethod
    def update_from_worker(self, output: ConnectorWorkerOutput) -> list[LoadReport]:
        """Take in what finished; the waiting requests that may go on."""

    @abstractmethod
    def has_pending_work(self) -> bool:
        """True while a step, even an empty one, has something to move or to report now, or a
        request that was told RETRY should ask again. False while only waiting for a disk or a
        copy: the wake-up callback ends that wait."""

    @abstractmethod
    def set_wakeup(self, wakeup: Callable[[], None]) -> None:
        """`wakeup` is called from any thread when `has_pending_work` may have become True."""

    def invalidate_blocks(self, keys: Sequence[bytes], cause: str) -> None:  # noqa: B027 - see below
        """Have every tier forget the blocks of one chain (named as by the pool, head first), which
        may be wrong; what is on its way to a tier or to the pool is not kept either. `cause`, one
        word, is what they are counted under. Optional: by default they stay until evicted."""

    @abstractmethod
    def reset(self) -> None:
        """Forget what all tiers hold (a prefix-cache reset). Waits a while for disks, so that it
        stays forgotten."""

    @abstractmethod
    def stats(self) -> dict[str, object]:
        """Counters for metrics: plain numbers, per tier. Empty: there is nothing to count."""

    @abstractmethod
    def shutdown(self, timeout_seconds: float) -> None:
        """Write back what should survive, within the time; release everything. Idempotent."""


class NullConnector(KVConnectorScheduler):
    """The scheduler side without tiers: nothing is found, nothing is moved."""

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
    """The side that moves bytes. Called by the worker's thread only."""

    @abstractmethod
    def register_pool(self, pool: torch.Tensor) -> None:
        """The KV pool `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`,
        contiguous; once, before the first step."""

    @abstractmethod
    def start_step(self, meta: ConnectorMetadata) -> None:
        """Queue the step's copies: stores, then loads. On the CPU it makes small copies itself.
        Raises nothing: what could not begin is reported as failed."""

    @abstractmethod
    def wait_before_forward(self) -> None:
        """Return when the forward pass may overwrite what this step evicts: its stores, and those
        ahead that it overtakes, have read their blocks or will before the pass writes."""

    @abstractmethod
    def poll(self) -> ConnectorWorkerOutput | None:
        """What finished since the last call; None where nothing ever does. Never waits."""

    @abstractmethod
    def shutdown(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait for copies in flight, at most so long, and let go of the pool. Idempotent."""


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
