# SPDX-License-Identifier: Apache-2.0
"""ServedStore: the interface of a store to the gRPC calls and transports of a cache server.

    TenantStore    a tenant's own slab and disk, in this process
    PeerStore      the slab of an engine, in another process

Thread-safe. The store does not hold its lock while bytes are read, copied or hashed.

    begin_load → wait_loaded → (bytes go out) → end_load   blocks keep their slots in between
    begin_store → (bytes come in, checked) → end_store     every later look-up finds them"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from ..base import TierStats
from ..block import BlockLayout
from ..tag import NO_TAG, Proof, Proofs
from ..wire.frames import State
from .access.tenants import Quota
from .leases import Lease, ReadLease, WriteLease


class Listener(Protocol):
    """Receives the keys of stored and removed blocks, in the form that the tenant's clients use.
    The store holds its lock while it calls the listener, so each method must return at once."""

    def stored(self, keys: Sequence[bytes]) -> None:
        """Receive the keys of blocks that can be found from now on."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Receive the keys of blocks that cannot be found any more."""

    def cleared(self) -> None:
        """Receive the event that no earlier block can be found any more."""


class ServedStore(ABC):
    """A store for blocks of one layout. Its methods take the keys that clients use."""

    layout: BlockLayout
    num_slots: int
    is_read_only = False  # whether clients can neither store nor delete blocks
    # Counts since the start: leases that reached their deadline, late writers of shared memory, and
    # blocks that the sender left incomplete.
    expired_leases = 0
    late_writers = 0
    aborted_blocks = 0

    @property
    def page_bytes(self) -> int:
        return self.layout.page_bytes

    @property
    def capacity_bytes(self) -> int:
        return sum(stats.capacity_bytes for stats in self.stats().values())

    @property
    @abstractmethod
    def corrupt_blocks(self) -> int:
        """The number of blocks that were refused since the start because their digests differed."""

    @property
    @abstractmethod
    def memory_fd(self) -> int:
        """The descriptor of the memfd with all slots, which clients on this host may map."""

    @abstractmethod
    def try_hold(self) -> bool:
        """Take the store's lock if it is free, so that later calls of this thread need not wait."""

    @abstractmethod
    def let_go(self) -> None:
        """Release the lock that `try_hold` took."""

    @abstractmethod
    def buffer(self, slot: int) -> memoryview:
        """Return the payload bytes of a slot of a read lease or a write lease."""

    def buffers(self, slots: Sequence[int]) -> list[memoryview]:
        return [self.buffer(slot) for slot in slots]

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], *, asked: bool = False) -> list[State]:
        """Return HIT, MISS or PENDING for each key. `asked`: an engine looks up a prompt."""

    @abstractmethod
    def begin_load(self, keys: Sequence[bytes]) -> ReadLease:
        """Pin the blocks in memory, and begin to read other blocks from disk. Does not wait."""

    @abstractmethod
    def wait_loaded(self, read_lease: ReadLease, deadline: float) -> None:
        """Wait until the blocks of a read lease are in their slots, or until `deadline` (monotonic
        seconds). Blocks that are not in their slots at the deadline are misses."""

    @abstractmethod
    def end_load(self, read_lease: ReadLease) -> None:
        """Unpin the blocks of a read lease. Idempotent."""

    def tags(self, read_lease: ReadLease) -> list[bytes]:
        """Return the tag stored with each block of a read lease; zeros for a miss."""
        return [NO_TAG if proof is None else proof.tag for proof in self.proofs(read_lease)]

    @abstractmethod
    def proofs(self, read_lease: ReadLease) -> list[Proof | None]:
        """Return the proof stored with each block of a read lease; None for a miss."""

    @abstractmethod
    def begin_store(self, keys: Sequence[bytes]) -> WriteLease:
        """Reserve slots for missing blocks. A block that another client is storing is PENDING."""

    @abstractmethod
    def end_store(
        self, write_lease: WriteLease, proofs: Proofs, aborted: Collection[int] = ()
    ) -> list[State]:
        """End a write lease. `proofs[i]` is the proof of the i-th block if the block's bytes have
        the proof's digest. `proofs[i]` is None if the digests differ, or if the sender left the
        block incomplete (i is then in `aborted`). Return the state of each block: KEPT, NO_ROOM,
        CORRUPT, or MISS for a block that did not arrive, that another client failed to store, or
        that was cleared."""

    @abstractmethod
    def abandon_store(self, write_lease: WriteLease) -> list[int]:
        """End a write lease after its deadline, although its client may still write to the slots.
        No block is stored. Return the slots, which stay unused until `restore_slots`."""

    @abstractmethod
    def restore_slots(self, slots: Sequence[int]) -> None:
        """Free slots from `abandon_store`, to which no client can write any more."""

    @abstractmethod
    def check_digests(self, write_lease: WriteLease, proofs: Proofs) -> list[Proof | None]:
        """Return `proofs`, with None for a slot whose bytes have another digest. The check is
        needed for bytes that a client wrote to shared memory."""

    @abstractmethod
    def pin(
        self, keys: Sequence[bytes], seconds: float, deadline: float, owner: str = ""
    ) -> Lease[list[bytes]]:
        """Load the blocks that are on the disk. Then lease to `owner` the leading blocks, up to the
        first block that is not in memory. A lease without blocks ends at once. Raises InvalidBlock
        for a duration out of range, and TierBusy if there are too many leases. Raises TooMuch if
        the owner has too many leases, or if leases would hold more than their share of the
        memory."""

    @abstractmethod
    def unpin(self, number: int, owner: str = "") -> bool:
        """End a lease early. Return False if the owner has no lease of that number."""

    def count_expired_lease(self) -> None:  # noqa: B027 - not every store counts them
        """Count an expired lease in the table of a session."""

    @property
    @abstractmethod
    def num_leases(self) -> int:
        """The number of running leases."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark the blocks, given in prompt order, as just used."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> int:
        """Remove blocks, even those being read or written, except blocks that `pin` leased. Return
        how many were known. Waits for the disk, so that no block returns after a restart."""

    @abstractmethod
    def clear(self) -> None:
        """Remove every block. Waits for the disk, so that no block returns after a restart."""

    @abstractmethod
    def subscribe(self, listener: Listener) -> None:
        """Call `listener` for later changes. Does not wait for the store."""

    @abstractmethod
    def unsubscribe(self, listener: Listener) -> None:
        """Stop calling `listener`. Does not wait for the store."""

    @abstractmethod
    def stats(self) -> dict[str, TierStats]:
        """Return the statistics of each tier, the slab first."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Write the blocks that lower tiers lack and close all tiers, within `timeout_seconds`.
        Return False if a store still uses the memory, which then stays open. Idempotent."""


class ServedStores(ABC):
    """The stores of a server by name. Thread-safe. Only `close` waits."""

    @abstractmethod
    def start(self) -> None:
        """Begin to open the stores whose layout is known."""

    @abstractmethod
    def attach(self, name: str, layout: BlockLayout) -> ServedStore:
        """Return the store `name`. Raises WrongLayout if the store has another layout, NotReady
        while it is being opened, or the error of its opening."""

    @abstractmethod
    def ready(self, name: str) -> ServedStore:
        """Return the store `name`. Raises NotAttached, NotReady, or the error of its opening."""

    @abstractmethod
    def layout(self, name: str) -> BlockLayout | None:
        """Return the layout of a store's blocks, or None while the layout is unknown."""

    @abstractmethod
    def open_tenant_stores(self) -> Mapping[str, ServedStore]:
        """Return the stores that are ready, by name."""

    def set_quotas(self, quotas: Mapping[str, Quota]) -> list[str]:
        """Change the set of stores: close stores that are not in `quotas`, open new stores when
        needed. Return the names of stores whose size changes at the next start."""
        raise NotImplementedError(f"{type(self).__name__} has the same stores for ever")

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Close every store within `timeout_seconds`. False if one is not closed. Idempotent."""
