# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier: what a caller may rely on, and what a tier must do.

There are two kinds of tier. The *slab* (`SlabTier`) is host memory that the GPU copies to and from.
A *store* (`StoreTier`) keeps blocks on an SSD or on servers, and each call to it takes many blocks.
A block that moves between the GPU and a store is copied through the slab.
`tiers/testing/memory_store.py` is the simplest store.

A caller may rely on these properties:
- `lookup` reads memory only, never waits and changes nothing.
- If `load` returns a `Proof` for a block, the buffer holds exactly the bytes stored under that key
  in that layout. For a block that is damaged, misplaced or late, `load` returns None (a miss), and
  `stats` counts the miss.
- A returned list has one entry for each key, in the order of the keys.
- Every future completes with a result or a TierError. Only `trial_read`, `wait_forgotten` and
  `close` wait for a disk or a socket.

A tier must obey these rules:
- store the tag (`tag.py`) that comes with a block, and return it when the block is loaded. A tier
  makes a tag only for a block that comes without a tag. The digest in a `Proof` from `load` is
  computed from the bytes in the buffer;
- read and write payloads in the caller's buffers, without copies. After the future has completed or
  the call has raised, the tier must not touch the buffer, because the caller reuses it;
- stay within its capacity in bytes at every moment;
- limit its queue: a call raises TierBusy if the queue is full;
- accept calls from any thread, one call at a time. Futures may complete on the tier's own threads.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, KeysView, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from .block import BlockLayout
from .holds import Hold
from .tag import Proof, Proofs

# Bucket bounds of latency histograms, in seconds: from a memory look-up to a very slow disk.
IO_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class Answer(Enum):
    """A tier's answer to the look-up of one key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # the block is being read or written; look again after a completion


class Stored(Enum):
    """The outcome of storing one block."""

    KEPT = "kept"  # stored now, or stored before
    REFUSED = "refused"
    DAMAGED = "damaged"  # the buffer does not match its proof; the block was not kept


class ReadSample(NamedTuple):
    """A timed read of blocks: the number of bytes, and the seconds taken."""

    num_bytes: int
    seconds: float


@dataclass(slots=True)
class TierStats:
    """The counters of one tier since its start, and gauges of its present state."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    capacity_blocks: int = 0
    blocks: int = 0
    hits: int = 0
    misses: int = 0
    stored_blocks: int = 0
    loaded_blocks: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    evicted_blocks: int = 0
    dropped_stores: int = 0
    store_seconds: float = 0.0
    load_seconds: float = 0.0
    rejected: dict[str, int] = field(default_factory=dict)  # Defect value -> refused records
    errors: dict[str, int] = field(default_factory=dict)  # kind of fault -> times
    # Only stores with a codec: bytes that encoding saved in writes and in reads.
    stored_bytes_saved: int = 0
    loaded_bytes_saved: int = 0
    # Only stores: records removed because they were damaged or could not be read.
    corrupt_records_dropped: int = 0
    # Gauges of slabs only: blocks being read, and slots being filled.
    pinned_blocks: int = 0
    reserved_blocks: int = 0

    def copy(self) -> TierStats:
        return replace(self, rejected=dict(self.rejected), errors=dict(self.errors))

    def add(self, more: TierStats) -> None:
        """Add each counter and gauge of `more` to this object."""
        for each in fields(TierStats):
            mine, theirs = getattr(self, each.name), getattr(more, each.name)
            if isinstance(mine, dict):
                for kind, count in theirs.items():
                    mine[kind] = mine.get(kind, 0) + count
            else:
                setattr(self, each.name, mine + theirs)


class StoreTier(ABC):
    """A tier below the slab, such as an SSD or the cache servers."""

    name: str
    layout: BlockLayout
    # Whether other engines read the tier too. Blocks are written to a shared tier at once.
    is_shared: bool = False
    # Whether only other engines fill the tier: this engine never writes to it.
    is_read_only: bool = False

    @property
    def is_up(self) -> bool:
        """Whether the tier works at present, as far as is known. A tier that is down answers every
        look-up with a miss and refuses every block."""
        return True

    @property
    def learns(self) -> bool:
        """Whether `observe` has an effect at present. If not, `observe` need not be called."""
        return False

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Report to the eviction policy that a prompt at time `now` (monotonic seconds) has the
        blocks `chain`, in prompt order. The blocks may be in any tier. The policy can learn which
        blocks are reused. Does no I/O."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """Return HIT, MISS or PENDING for each 40-byte key. Does no I/O and changes nothing."""

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        """Read blocks into `buffers` (writable, of `layout.page_bytes` or more, aligned to
        `block.ALIGNMENT`). The future's result has the `Proof` of each verified block and None for
        each miss. If the method has a keyword `context`, callers pass a `RequestContext`."""

    @abstractmethod
    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        """Store blocks. The buffers must not change until the future completes. `proofs[i]` is the
        proof of the i-th buffer, or None. If the proof's digest differs from that of the bytes, the
        block's outcome is DAMAGED. Raises TierBusy if the queue is full."""

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - a hint, not a duty
        """Mark blocks, given in prompt order, as just used. The slab has just evicted these blocks,
        so this tier may have the last copies. Does no I/O and ignores unknown keys."""

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        """Prepare the look-up of a queued prompt whose blocks are `keys`, in prompt order. A tier
        on servers sends the servers a look-up now; until they reply, `lookup` returns PENDING. The
        future soon completes with None, when `lookup` has the answers. Return None if `lookup` has
        the answers already. As in `load`, the method may have a keyword `context`."""
        return None

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        """Follow blocks that other engines store in this tier: `lookup` soon finds such a block,
        and a thread calls `news` with the new keys. Return False if unsupported."""
        return False

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        """Protect blocks, given in prompt order, from eviction for `seconds`. The future soon
        completes with a bool for each block, whether the block is protected. Blocks after the first
        missing block need not be protected. Return None if the tier has no leases."""
        return None

    def trial_read(self, seconds: float) -> ReadSample | None:
        """Read some blocks and discard them, to measure the tier's speed before the first load. The
        call takes about `seconds` at most, changes no counter and marks no block as used. Return
        None if the tier has no estimate."""
        return None

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove blocks. Return how many of `keys` the tier had."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every block. A block that is being written may be removed when its write ends."""

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        """Wait until no block that `drop` or `clear` removed can return after a kill of the
        process. False on a timeout or a failure. A tier that uses only memory returns at once."""
        return True

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a copy of the counters."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """Finish queued work within `timeout_seconds`, then release all resources. Idempotent."""


class SlabTier(ABC):
    """Memory divided into fixed slots of one block each. Calls are made in pairs:

    reserve → (copy bytes in) → commit            a block is stored
    pin     → (copy bytes out) → unpin            a block is read; a pinned slot is never reused"""

    name: str
    layout: BlockLayout
    num_slots: int
    learns: bool = False  # whether `observe` has an effect
    is_served: bool = False  # whether other engines load blocks from this slab

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Report to the eviction policy that a prompt at time `now` (monotonic seconds) has the
        blocks `chain`, in prompt order. The policy can learn which blocks are reused."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """Return HIT for a committed block, PENDING for a reserved block, else MISS."""

    @abstractmethod
    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        optional: bool = False,
        spared: Callable[[bytes], bool] | None = None,
        evicted: list[bytes] | None = None,
    ) -> list[int | None]:
        """Reserve a slot for each key, given in prompt order; the eviction policy frees slots. The
        result has None for a key that the slab already has, or for which no slot could be freed.
        With `optional`, the policy may keep blocks that it values more than the new blocks. Blocks
        for which `spared` returns true are not evicted. The evicted keys are appended to `evicted`
        in the order of eviction."""

    @abstractmethod
    def commit(
        self, keys: Sequence[bytes], ok: Sequence[bool], proofs: Proofs | None = None
    ) -> list[bytes]:
        """End the reservations of `keys`. If `ok[i]` is true, publish the i-th block (`lookup` then
        finds it) with the proof `proofs[i]`; otherwise free its slot. A block that `forget` removed
        since `reserve` is not published. Return the published keys."""

    @abstractmethod
    def withhold(self, keys: Sequence[bytes]) -> list[int]:
        """End reservations without freeing the slots, because a client may still write to them.
        Return the slots. The slab does not use them until `restore`."""

    @abstractmethod
    def restore(self, slots: Sequence[int]) -> None:
        """Free slots that `withhold` returned. No write to these slots may still be under way."""

    @abstractmethod
    def proofs(self, keys: Sequence[bytes]) -> list[Proof | None]:
        """Return the proof of each block; None for a miss or for a block without a proof."""

    @abstractmethod
    def pin(self, keys: Sequence[bytes], *, touch: bool = True) -> list[int | None]:
        """Add one pin to each committed block; a pinned block is not evicted. Return each block's
        slot, None for a miss. With `touch` false the pin counts neither as a use nor as a hit."""

    @abstractmethod
    def unpin(self, keys: Sequence[bytes]) -> None:
        """Remove one pin from each block."""

    def keep(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Protect blocks from eviction for `seconds`, for other engines that read this slab. Return
        for each block whether the slab has it."""
        return [False] * len(keys)

    def hold(self, keys: Sequence[bytes], seconds: float) -> Hold:
        """Protect blocks, given in prompt order, from eviction for `seconds` or until `release`. A
        block that enters the slab in that time is protected too. A slab may limit the number of
        protected keys, even to 0."""
        return Hold((), 0.0, is_over=True)

    def release(self, hold: Hold) -> None:  # noqa: B027 - optional, as `hold`
        """End a hold before its time. Does nothing if the hold has ended."""

    @abstractmethod
    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot, `layout.slot_bytes` long, aligned to `block.ALIGNMENT`."""

    @abstractmethod
    def memory(self) -> memoryview:
        """The whole slab, `num_slots * layout.slot_bytes` writable bytes, slot after slot. The
        engine registers this memory with CUDA and copies runs of consecutive slots."""

    @abstractmethod
    def free_slots(self) -> int:
        """The number of slots that are free."""

    @abstractmethod
    def coldest(self, count: int) -> list[bytes]:
        """Return up to `count` keys that the policy would evict next, in the order of eviction."""

    def may_go_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether any of `keys` may be among the next `count` evicted blocks. The result False is
        certain. The result True may also mean that one of `keys` is evicted a little later."""
        return not keys.isdisjoint(self.coldest(count))

    @abstractmethod
    def keys(self) -> list[bytes]:
        """Return the committed keys in the order of eviction."""

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove blocks: a committed block becomes a miss. A pinned block's slot is freed with its
        last pin. A reserved block stays PENDING, and `commit` does not publish it."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every committed block, pinned blocks too. The time does not depend on the number
        of blocks: slots are freed later, when they are needed, by `sweep`, or with the last pin."""

    @abstractmethod
    def sweep(self, most: int) -> int:
        """Free up to `most` slots of blocks that `clear` removed. Return the number freed."""

    @abstractmethod
    def stats(self) -> TierStats:
        """Return a copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory, of which the caller must have released all views. Idempotent."""


@dataclass(slots=True)
class Histogram:
    """A histogram: counts of observed values by bucket. `counts[i]` counts values above `bounds[i -
    1]` and up to `bounds[i]`; the last count is for values above every bound. Not thread-safe."""

    bounds: tuple[float, ...]  # the upper bounds of the buckets, ascending
    counts: list[int] = field(init=False)
    total: float = 0.0  # the sum of the observed values

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe_value(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """The tenant, priority and hints of the request that a call serves. Every field is optional. No
    field changes which blocks are found, because a key alone identifies a block."""

    tenant: str | None = None
    session: str | None = None  # the conversation or job of the request
    priority: int = 0  # a lower number is served earlier
    pin: bool = False  # the request's blocks will be needed again
    adapter: str | None = None
    transfer: Mapping[str, object] | None = None  # parameters of a transfer between engines


NO_CONTEXT = RequestContext()


def load_for(
    store: StoreTier,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    context: RequestContext,
) -> Future[list[Proof | None]]:
    """Call `store.load`. Pass `context` if the method has a parameter of that name."""
    more = {"context": context} if _takes_context(store.load) else {}
    return store.load(keys, buffers, **more)


def prefetch_lookup_for(
    store: StoreTier, keys: Sequence[bytes], context: RequestContext
) -> Future[None] | None:
    """Call `store.prefetch_lookup`. Pass `context` if the method has a parameter of that name."""
    more = {"context": context} if _takes_context(store.prefetch_lookup) else {}
    return store.prefetch_lookup(keys, **more)


def _takes_context(method: Callable[..., object]) -> bool:
    return _names_context(getattr(method, "__func__", method))


@lru_cache(maxsize=256)
def _names_context(function: Callable[..., object]) -> bool:
    try:
        return "context" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # the function has no readable signature
        return False
