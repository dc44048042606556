# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier: its guarantees to the caller, then its duties.

Two kinds of tier keep blocks. The *slab* (`SlabTier`) is host memory that the device's copy engine
can reach. A *store* (`StoreTier`) lies below the slab, on an SSD or behind a network, and each call
to it is for many blocks. Every block on its way between the device and a store passes through the
slab. `tiers/testing/memory_store.py` is the simplest store.

A caller may rely on this:
- `lookup` reads memory only, never waits and changes nothing.
- Where `load` gives a proof, the buffer holds exactly the bytes stored under that key in that
  layout. A damaged, displaced or late block is a miss (None), and `stats` counts it.
- Answers come in the order of the keys.
- Every future ends, with a result or a TierError. Only `trial_read`, `wait_forgotten` and `close`
  wait for a disk or a socket.

A tier must do this:
- keep the tag (`tag.py`) stored with a block and return it with the block; make a tag only for a
  block stored without one. The digest in a proof from `load` is made from the bytes in the buffer;
- read and write payloads in the caller's buffers, without copies. The caller reuses a buffer when
  the future ends or the call raises; from then on the tier must not touch it;
- stay within its capacity in bytes at every moment;
- bound its queue: a call that finds the queue full raises TierBusy;
- accept calls from any thread, one at a time. Futures may complete on the tier's own threads.
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

# Bounds of histograms in seconds: from a look-up in memory up to a disk that hardly answers.
IO_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class Answer(Enum):
    """A tier's answer to the look-up of one key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # the block is on its way in; ask again after a completion


class Stored(Enum):
    """The outcome of storing one block."""

    KEPT = "kept"  # stored now, or already there
    REFUSED = "refused"
    DAMAGED = "damaged"  # the buffer does not match its proof; the block was not kept


class ReadSample(NamedTuple):
    """A timed read of blocks: the number of bytes, and the seconds taken."""

    num_bytes: int
    seconds: float


@dataclass(slots=True)
class TierStats:
    """Counters of one tier since the start, and its present gauges. Plain numbers, safe to copy."""

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
    rejected: dict[str, int] = field(default_factory=dict)  # Defect value -> records refused
    errors: dict[str, int] = field(default_factory=dict)  # kind of fault -> times
    # Only stores with a codec: bytes not written and not read, because blocks were encoded.
    stored_bytes_saved: int = 0
    loaded_bytes_saved: int = 0
    # Only stores: records forgotten because they were damaged or could not be read.
    corrupt_records_dropped: int = 0
    # Only slabs, gauges: blocks being read, and slots being filled.
    pinned_blocks: int = 0
    reserved_blocks: int = 0

    def copy(self) -> TierStats:
        return replace(self, rejected=dict(self.rejected), errors=dict(self.errors))

    def add(self, more: TierStats) -> None:
        """Add every number of `more`."""
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
    # Whether other engines read the tier too. If so, it gets blocks as soon as the slab has them.
    is_shared: bool = False
    # Whether only other engines fill the tier: this engine never writes to it.
    is_read_only: bool = False

    @property
    def is_up(self) -> bool:
        """Whether the tier works at present, as far as is known. A tier that does not work answers
        every look-up with a miss and refuses every block."""
        return True

    @property
    def learns(self) -> bool:
        """Whether `observe` has an effect at present. If not, a caller need not list keys."""
        return False

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Note that a prompt has the blocks `chain`, head first, at `now` monotonic seconds. They
        may be in any tier. A policy can learn from this which blocks are reused. Memory only."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """HIT, MISS or PENDING for each 40-byte key. Memory only; changes nothing."""

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        """Read blocks into `buffers` (writable, `layout.page_bytes` or more, aligned to
        `block.ALIGNMENT`). The result has the proof of each verified block, and None for a miss. If
        the method takes a keyword `context`, callers pass the request's `RequestContext`."""

    @abstractmethod
    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        """Store blocks. The buffers must not change until the future ends. `proofs[i]` is the proof
        of the i-th buffer, or None. The tier compares a proof's digest with the bytes; a block that
        differs is DAMAGED. Raises TierBusy if the queue is full."""

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - a hint, not a duty
        """Count these blocks, given head first, as used. The tier above has just evicted them, so
        this tier may have the last copies. Memory only; unknown keys are ignored."""

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        """Prepare the look-up of a queued prompt whose blocks are `keys`, head first. A tier that
        depends on servers asks them now; until they reply, `lookup` answers PENDING. The future
        ends soon, with a result, when `lookup` knows the answers. Return None if `lookup` knows
        them already. For the keyword `context` see `load`."""
        return None

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        """Follow blocks that other engines store here: `lookup` soon knows such a block, and after
        each change some thread calls `news` with the new keys. Optional; False if unsupported."""
        return False

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        """Keep these blocks, given head first, from eviction for `seconds`. The future ends soon
        and says for each block whether it is kept. Blocks behind the first missing one need not be
        kept. Optional; return None if unsupported."""
        return None

    def trial_read(self, seconds: float) -> ReadSample | None:
        """Read some blocks and discard them, to estimate the tier's speed before the first load.
        Waits for about `seconds` at most, changes no counter and counts no block as used. Optional;
        None if there is no estimate."""
        return None

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget blocks. Return the number of them that were known."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block. A block still being stored may be forgotten when it arrives."""

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        """Wait until the blocks forgotten by `drop` and `clear` stay forgotten even after a kill.
        Return False on a timeout or a failure. A tier that is only in memory returns at once."""
        return True

    @abstractmethod
    def stats(self) -> TierStats:
        """A copy of the counters."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """Finish queued work within the time, then release everything. Idempotent."""


class SlabTier(ABC):
    """Fixed slots of memory, one block each. Calls come in pairs:

    reserve → (copy bytes in) → commit            a block comes in
    pin     → (copy bytes out) → unpin            a block is read; a pinned slot is never reused
    """

    name: str
    layout: BlockLayout
    num_slots: int
    learns: bool = False  # whether `observe` has an effect
    is_served: bool = False  # whether other engines load blocks from this slab

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Note that a prompt has the blocks `chain`, head first, at `now` monotonic seconds. A
        policy can learn from this which blocks are reused."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """HIT: committed. PENDING: reserved, not yet committed."""

    @abstractmethod
    def reserve(
        self,
        keys: Sequence[bytes],
        *,
        optional: bool = False,
        spared: Callable[[bytes], bool] | None = None,
        evicted: list[bytes] | None = None,
    ) -> list[int | None]:
        """Reserve a slot for each key, given head first; the policy evicts blocks for them. None
        where the key is already known or no slot can be freed. With `optional`, the policy may keep
        its blocks if it values them more than the new ones. Blocks for which `spared` returns true
        are not evicted. `evicted` gains the keys of the evicted blocks, the coldest first."""

    @abstractmethod
    def commit(
        self, keys: Sequence[bytes], ok: Sequence[bool], proofs: Proofs | None = None
    ) -> list[bytes]:
        """End reservations. Where `ok[i]` is true, publish the i-th block, which came with
        `proofs[i]`; else free its slot. A block forgotten meanwhile is not published. Return the
        published keys."""

    @abstractmethod
    def withhold(self, keys: Sequence[bytes]) -> list[int]:
        """End reservations without freeing the slots, because a client may still write to them.
        Return the slots; they stay unused until `restore`."""

    @abstractmethod
    def restore(self, slots: Sequence[int]) -> None:
        """Free withheld slots. No write to them may be under way any more."""

    @abstractmethod
    def proofs(self, keys: Sequence[bytes]) -> list[Proof | None]:
        """The proof of each block; None for a miss, and for a block stored without a proof."""

    @abstractmethod
    def pin(self, keys: Sequence[bytes], *, touch: bool = True) -> list[int | None]:
        """Add one pin to each committed block. Return the slots; None for a miss. With `touch`
        false the pin counts neither as a use nor as a hit; write-back pins blocks in this way."""

    @abstractmethod
    def unpin(self, keys: Sequence[bytes]) -> None:
        """Remove one pin from each block."""

    def keep(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Keep blocks from eviction for `seconds`, for other engines that read this slab. Return
        for each block whether the slab has it."""
        return [False] * len(keys)

    def hold(self, keys: Sequence[bytes], seconds: float) -> Hold:
        """Keep blocks, given head first, from eviction for `seconds` or until `release`. A block on
        its way in is kept when it arrives. A slab may limit the number of held keys. Optional."""
        return Hold((), 0.0, is_over=True)

    def release(self, hold: Hold) -> None:  # noqa: B027 - optional, as `hold`
        """End a hold before its time. A hold that has already ended is ignored."""

    @abstractmethod
    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot, `layout.slot_bytes` long, aligned to `block.ALIGNMENT`."""

    @abstractmethod
    def memory(self) -> memoryview:
        """The whole slab, `num_slots * layout.slot_bytes` writable bytes, slot after slot. A device
        registers this memory and copies runs of slots."""

    @abstractmethod
    def free_slots(self) -> int:
        """The number of slots that hold nothing."""

    @abstractmethod
    def coldest(self, count: int) -> list[bytes]:
        """Up to `count` keys that the policy would evict next, in the order of eviction."""

    def may_go_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether any of `keys` may be among the next `count` evicted blocks. False is certain;
        True may also mean a block that would be evicted a little later."""
        return not keys.isdisjoint(self.coldest(count))

    @abstractmethod
    def keys(self) -> list[bytes]:
        """The committed keys, the coldest first."""

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget blocks: from now on they are misses. The slot of a pinned block is freed with its
        last pin, and a reserved block will not be published."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every committed block, pinned ones too. The time does not depend on the number of
        blocks: slots are freed later, when they are needed, by `sweep`, or with the last pin."""

    @abstractmethod
    def sweep(self, most: int) -> int:
        """Free up to `most` slots of blocks that `clear` has forgotten; return the number."""

    @abstractmethod
    def stats(self) -> TierStats:
        """A copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory. The caller must have released all views of it. Idempotent."""


@dataclass(slots=True)
class Histogram:
    """Counts of observed values by bucket. `counts[i]` counts values up to `bounds[i]` and above
    the bound before it; the last count is for values above every bound. One thread at a time."""

    bounds: tuple[float, ...]  # ascending
    counts: list[int] = field(init=False)
    total: float = 0.0  # the sum of the observations

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe_value(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestContext:
    """Tenant, priority and hints of the request behind a call. Every field is optional. No field
    changes an answer, because keys alone identify blocks."""

    tenant: str | None = None
    session: str | None = None  # requests of one conversation or job
    priority: int = 0  # the lower, the earlier
    pin: bool = False  # its blocks will be needed again
    adapter: str | None = None
    transfer: Mapping[str, object] | None = None  # parameters of a transfer between engines


NO_CONTEXT = RequestContext()


def load_for(
    store: StoreTier,
    keys: Sequence[bytes],
    buffers: Sequence[memoryview],
    context: RequestContext,
) -> Future[list[Proof | None]]:
    """Call `StoreTier.load`, with `context` if the store's method takes one."""
    more = {"context": context} if _takes_context(store.load) else {}
    return store.load(keys, buffers, **more)


def prefetch_lookup_for(
    store: StoreTier, keys: Sequence[bytes], context: RequestContext
) -> Future[None] | None:
    """Call `StoreTier.prefetch_lookup`, with `context` if the store's method takes one."""
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
