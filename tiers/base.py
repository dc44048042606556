# SPDX-License-Identifier: Apache-2.0
"""The contract of a tier: the guarantees to its caller, and the duties of a tier.

Two kinds of tier keep blocks. The *slab* (`SlabTier`) is memory the copy engine can reach; blocks
pass through it on their way up and down. A *store* (`StoreTier`) lies below it and is asked in
batches: the SSD, or the network. `tiers/testing/memory_store.py` is the simplest store.

A caller may rely on this:
- `lookup` reads memory only, never blocks and changes nothing.
- A proof from `load` means that the buffer holds exactly the bytes stored under that key in that
layout; a damaged, displaced or late block is a miss (None), counted in `stats`.
- Answers stand in the order of the keys asked for.
- Futures end, with a result or a TierError; only `trial_read`, `wait_forgotten` and `close` wait
  for a disk or a socket.

A tier must do this:
- keep the tag that a block came with (`tag.py`) and give it back with the block; make one only for
  a block that came without. The digest in a proof from `load` is that of the bytes in the buffer;
- use the caller's buffers (no copies of payloads), touch them only until the future ends, and not
  after a call that raised: its caller reuses them at once;
- stay within its capacity in bytes at every moment;
- bound its queue: refuse with TierBusy rather than grow;
- accept calls from any one thread at a time; futures may complete on the tier's own threads.
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
from typing import TYPE_CHECKING, NamedTuple

from .block import BlockLayout
from .holds import Hold
from .tag import Proof, Proofs

if TYPE_CHECKING:
    from .tag import Proof

# Bounds from a look-up in memory up to a disk that hardly answers.
IO_SECONDS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0)


class Answer(Enum):
    """The answer of a tier for one key."""

    HIT = "hit"
    MISS = "miss"
    PENDING = "pending"  # on its way in; ask again after a completion


class Stored(Enum):
    """The outcome of storing one block."""

    KEPT = "kept"  # now or before
    REFUSED = "refused"
    DAMAGED = "damaged"  # the buffer does not match its proof; the block was not kept


class ReadSample(NamedTuple):
    """The bytes of blocks that were read, and the seconds that it took."""

    num_bytes: int
    seconds: float


@dataclass(slots=True)
class TierStats:
    """Counters since start and present gauges of one tier; plain numbers, safe to copy."""

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
    # Of a store with a codec: bytes that its stored and loaded blocks did not have to move.
    stored_bytes_saved: int = 0
    loaded_bytes_saved: int = 0
    # Of a store: records forgotten because they were damaged or could not be read.
    corrupt_records_dropped: int = 0
    # Of a slab, now: blocks being read, and slots being filled.
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
    """A tier below the slab."""

    name: str
    layout: BlockLayout
    # Whether other engines read the tier too. Then blocks are written as soon as the slab has them.
    is_shared: bool = False
    # Whether only other engines fill the tier: this one writes nothing to it.
    is_read_only: bool = False

    @property
    def is_up(self) -> bool:
        """Whether the tier can be asked at present, as far as is known. While it cannot, its
        answers are misses and it keeps no block."""
        return True

    @property
    def learns(self) -> bool:
        """Whether `observe` does anything at present: listing a prompt's keys costs time."""
        return False

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt whose blocks are `chain`, head first, in whatever tier they are, at
        `now` monotonic seconds. For stores whose policy learns the reuse of blocks. Memory only."""

    @abstractmethod
    def lookup(self, keys: Sequence[bytes]) -> list[Answer]:
        """HIT, MISS or PENDING for each 40-byte key. Memory only; changes nothing."""

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview]
    ) -> Future[list[Proof | None]]:
        """Read blocks into `buffers` (writable, `layout.page_bytes` or more, aligned to
        `block.ALIGNMENT`). Return the proof of each verified block; None for a miss. A tier whose
        method has the keyword `context` gets the `RequestContext` of the request too."""

    @abstractmethod
    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs | None = None,
    ) -> Future[list[Stored]]:
        """Keep blocks. The buffers must not change until the future ends. `proofs[i]`, where it is
        not None, is the proof of the i-th buffer: the tier compares the digest, and a block that
        differs is DAMAGED. Raises TierBusy where the queue is full."""

    def touch(self, keys: Sequence[bytes]) -> None:  # noqa: B027 - a hint, not a duty
        """Count these blocks, given head first, as used: the tier above has just evicted them, so
        copies here are the only ones now. Memory only; unknown keys are ignored."""

    def prefetch_lookup(self, keys: Sequence[bytes]) -> Future[None] | None:
        """Prepare the look-up of a queued prompt whose blocks are `keys`, head first. A tier that
        has to ask elsewhere asks now, and `lookup` answers PENDING meanwhile. The future ends soon,
        with a result, when `lookup` knows the answers. None: it knows them already. `context` as in
        `load`."""
        return None

    def watch(self, news: Callable[[Sequence[bytes]], None]) -> bool:
        """Watch blocks that others store here: from now on `lookup` knows them soon, and any thread
        calls `news` with the new blocks after each change. Optional; False: unsupported."""
        return False

    def lease(self, keys: Sequence[bytes], seconds: float) -> Future[list[bool]] | None:
        """Keep these blocks, given head first, from eviction for `seconds`. The future ends soon:
        whether each is kept, up to the first that is not here. Optional; None: not supported."""
        return None

    def trial_read(self, seconds: float) -> ReadSample | None:
        """Read some blocks and discard them, to estimate the tier's speed before the first load.
        Waits for about `seconds` at most. Nothing is counted, and no block counts as used.
        Optional; None: not known."""
        return None

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget blocks. Return the number of them that were known."""

    @abstractmethod
    def clear(self) -> None:
        """Forget everything. Blocks under way may be forgotten when they arrive."""

    def wait_forgotten(self, timeout_seconds: float) -> bool:
        """Wait until the blocks forgotten by `drop` and `clear` stay forgotten even after a kill.
        False where that took longer or failed. A tier that is only in memory returns at once."""
        return True

    @abstractmethod
    def stats(self) -> TierStats:
        """A copy of the counters."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> None:
        """Finish queued work within the time, then release everything. Idempotent."""


class SlabTier(ABC):
    """Fixed slots of memory, one block each. Verbs come in pairs:

    reserve → (copy bytes in) → commit            a block comes in
    pin     → (copy bytes out) → unpin            a block is read; a pinned slot is never reused
    """

    name: str
    layout: BlockLayout
    num_slots: int
    learns: bool = False  # whether `observe` does anything
    is_served: bool = False  # to other engines, which load its blocks

    def observe(self, chain: Sequence[bytes], now: float) -> None:  # noqa: B027 - a hint, not a duty
        """Learn from a prompt whose blocks are `chain`, head first, at `now` monotonic seconds. For
        slabs whose policy learns which blocks are used again."""

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
        """Reserve a slot for each key, evicting by policy; None where the key is already known or
        no slot can be freed. `optional`: the policy may value held blocks more than these, given
        head first, and keep them. Blocks for which `spared` is true are not evicted. `evicted`
        gains the evicted blocks, the coldest first."""

    @abstractmethod
    def commit(
        self, keys: Sequence[bytes], ok: Sequence[bool], proofs: Proofs | None = None
    ) -> list[bytes]:
        """End reservations: publish (True) or give the slot back (False). `proofs[i]` came with the
        i-th block. Return the published keys, without those forgotten meanwhile."""

    @abstractmethod
    def withhold(self, keys: Sequence[bytes]) -> list[int]:
        """End reservations without giving the slots back, while a client may still write to them.
        Return the slots; they stay unused until `restore`."""

    @abstractmethod
    def restore(self, slots: Sequence[int]) -> None:
        """Give withheld slots back; no write to them is under way any more."""

    @abstractmethod
    def proofs(self, keys: Sequence[bytes]) -> list[Proof | None]:
        """The proof of each block; None for a miss, and for a block that came without one."""

    @abstractmethod
    def pin(self, keys: Sequence[bytes], *, touch: bool = True) -> list[int | None]:
        """Pin committed keys once more. Return their slots; None for a miss. With `touch` false
        neither the policy nor the hit counters note it: write-back is not a use."""

    @abstractmethod
    def unpin(self, keys: Sequence[bytes]) -> None:
        """Take one pin back from each block."""

    def keep(self, keys: Sequence[bytes], seconds: float) -> list[bool]:
        """Keep blocks from eviction for `seconds`, for engines that this slab is served to. Return
        whether each is here."""
        return [False] * len(keys)

    def hold(self, keys: Sequence[bytes], seconds: float) -> Hold:
        """Keep blocks, given head first, from eviction for `seconds`, those on their way in too, up
        to the slab's limit of holds; `release` ends it sooner. Optional."""
        return Hold((), 0.0, is_over=True)

    def release(self, hold: Hold) -> None:  # noqa: B027 - optional, as `hold`
        """End a hold before its time. It may have ended by itself."""

    @abstractmethod
    def buffer(self, slot: int) -> memoryview:
        """The writable bytes of a slot, `layout.slot_bytes` long, aligned to `block.ALIGNMENT`."""

    @abstractmethod
    def memory(self) -> memoryview:
        """The whole slab, `num_slots * layout.slot_bytes` writable bytes, slot after slot. A device
        registers it and copies runs of it."""

    @abstractmethod
    def free_slots(self) -> int:
        """The number of slots that hold nothing."""

    @abstractmethod
    def coldest(self, count: int) -> list[bytes]:
        """Up to `count` keys that the policy would evict next, the first one first."""

    def may_go_next(self, keys: KeysView[bytes], count: int) -> bool:
        """Whether one of these may be among the next `count` evicted blocks. True for any that
        would be; may be True for some behind them."""
        return not keys.isdisjoint(self.coldest(count))

    @abstractmethod
    def keys(self) -> list[bytes]:
        """The committed keys, the coldest first."""

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget blocks: from now on they are misses. A pinned one is freed with its last pin, and
        a reserved one will not be published."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every committed block, pinned ones too, in a time that does not depend on their
        number. Their slots are freed when they are needed, by `sweep`, or with the last pin."""

    @abstractmethod
    def sweep(self, most: int) -> int:
        """Free up to `most` slots of blocks that `clear` has forgotten; return how many."""

    @abstractmethod
    def stats(self) -> TierStats:
        """A copy of the counters."""

    @abstractmethod
    def close(self) -> None:
        """Release the memory. Views handed out must be gone. Idempotent."""


@dataclass(slots=True)
class Histogram:
    """Counts of observations by bucket: `counts[i]` are at most `bounds[i]` and above the bound
    before; the last count is of those above every bound. One thread at a time."""

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
    """The request behind a call: its tenant, priority and hints. Every field is optional, and none
    changes an answer: keys alone identify blocks."""

    tenant: str | None = None
    session: str | None = None  # requests of one conversation or job
    priority: int = 0  # the lower, the earlier
    pin: bool = False  # its blocks will be wanted again
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
    except (TypeError, ValueError):  # its signature is unknown
        return False
