# SPDX-License-Identifier: Apache-2.0
"""The interface between stores and the calls and transports of a cache server.

    TenantStore    a tenant's own slab and disk, in this process
    PeerStore      the slab of an engine, in another process

Thread-safe. The store's lock is free while bytes are read, moved or hashed.

    begin_load → wait_loaded → (bytes go out) → end_load   blocks keep their slots in between
    begin_store → (bytes come in, checked) → end_store     every later look-up finds them
"""

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
    """A listener to stored and removed blocks, by the tenant's own keys. The store holds its lock
    while it calls the listener, so each method must return at once."""

    def stored(self, keys: Sequence[bytes]) -> None:
        """Note blocks that can be found from now on."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Note blocks that cannot be found any more."""

    def cleared(self) -> None:
        """Note that no block can be found any more."""


class ServedStore(ABC):
    """A store of blocks of one layout, by the keys that clients use."""

    layout: BlockLayout
    num_slots: int
    is_read_only = False  # whether clients can neither store nor delete blocks
    # Counts since the start: leases that reached their deadline, writers of shared memory that were
    # late, and blocks that their sender left incomplete.
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
        """Blocks refused since the start because their bytes did not match their tag."""

    @property
    @abstractmethod
    def memory_fd(self) -> int:
        """The memfd whose slots the tenant's processes on this host may map."""

    @abstractmethod
    def try_hold(self) -> bool:
        """Take the store's lock if it is free: calls of this thread do not wait until `let_go`."""

    @abstractmethod
    def let_go(self) -> None:
        """Release the lock that `try_hold` took."""

    @abstractmethod
    def buffer(self, slot: int) -> memoryview:
        """The payload bytes of a slot of a read lease or a write lease."""

    def buffers(self, slots: Sequence[int]) -> list[memoryview]:
        return [self.buffer(slot) for slot in slots]

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], *, asked: bool = False) -> list[State]:
        """HIT, MISS or PENDING for each key. `asked`: an engine asks about a prompt."""

    @abstractmethod
    def begin_load(self, keys: Sequence[bytes]) -> ReadLease:
        """Pin the blocks that are in memory, and begin to read the others. Does not wait."""

    @abstractmethod
    def wait_loaded(self, read_lease: ReadLease, deadline: float) -> None:
        """Wait until the blocks of a read lease are in their slots, or until `deadline`
        (monotonic). Blocks that are not there by then are misses."""

    @abstractmethod
    def end_load(self, read_lease: ReadLease) -> None:
        """Unpin the blocks. Idempotent."""

    def tags(self, read_lease: ReadLease) -> list[bytes]:
        """The tag that came with each block of a read lease; zeros for a miss."""
        return [NO_TAG if proof is None else proof.tag for proof in self.proofs(read_lease)]

    @abstractmethod
    def proofs(self, read_lease: ReadLease) -> list[Proof | None]:
        """The proof that came with each block of a read lease; None for a miss."""

    @abstractmethod
    def begin_store(self, keys: Sequence[bytes]) -> WriteLease:
        """Reserve slots for the missing blocks. PENDING: another client is storing the block."""

    @abstractmethod
    def end_store(
        self, write_lease: WriteLease, proofs: Proofs, aborted: Collection[int] = ()
    ) -> list[State]:
        """End a write lease. `proofs[i]` came with the i-th block, and the block's bytes have its
        digest. `proofs[i]` is None if the digests differ, or if the sender left the block
        incomplete (then i is in `aborted`). Returns the state of each block: KEPT, NO_ROOM,
        CORRUPT, or MISS for a block that did not arrive, that another client failed to store, or
        that was cleared."""

    @abstractmethod
    def abandon_store(self, write_lease: WriteLease) -> list[int]:
        """End a write lease whose deadline has passed and whose writer may still write. Stores no
        block. Returns the slots, which are withheld until `restore_slots`."""

    @abstractmethod
    def restore_slots(self, slots: Sequence[int]) -> None:
        """Free withheld slots, to which no client can write any more."""

    @abstractmethod
    def check_digests(self, write_lease: WriteLease, proofs: Proofs) -> list[Proof | None]:
        """Return `proofs`, with None for a slot whose bytes have another digest. Call it for bytes
        that were not hashed on arrival."""

    @abstractmethod
    def pin(
        self, keys: Sequence[bytes], seconds: float, deadline: float, owner: str = ""
    ) -> Lease[list[bytes]]:
        """Load the blocks that are on the disk, then lease the leading run of blocks in memory to
        `owner`. A lease without blocks ends at once. Raises InvalidBlock for a duration out of
        range, TierBusy if there are too many leases, TooMuch if the owner has too many leases, or
        if leases would hold more than their share of the memory."""

    @abstractmethod
    def unpin(self, number: int, owner: str = "") -> bool:
        """End a lease early; False if the owner has no lease of that number."""

    def count_expired_lease(self) -> None:  # noqa: B027 - not every store counts them
        """Count an expired lease of a transport's own table, which the store does not see."""

    @property
    @abstractmethod
    def num_leases(self) -> int:
        """The number of running leases."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Count the blocks, given head first, as just used."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget blocks, even blocks being read or written, except blocks that a lease holds;
        return how many were known. Waits for the disk, so that no block returns after a restart."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block. Waits for the disk, so that no block returns after a restart."""

    @abstractmethod
    def subscribe(self, listener: Listener) -> None:
        """Report changes to `listener` from now on. Does not wait for the store."""

    @abstractmethod
    def unsubscribe(self, listener: Listener) -> None:
        """Stop reporting to `listener`. Does not wait for the store."""

    @abstractmethod
    def stats(self) -> dict[str, TierStats]:
        """The statistics of each tier, the slab first."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Write the blocks that lower tiers lack and close everything, within the time. False if a
        store still uses the memory; the memory then stays. Idempotent."""


class ServedStores(ABC):
    """The stores of a server by name. Thread-safe; only `close` waits."""

    @abstractmethod
    def start(self) -> None:
        """Make the stores ready whose layout is known."""

    @abstractmethod
    def attach(self, name: str, layout: BlockLayout) -> ServedStore:
        """The store, if it has this layout. Raises NotReady while it is being made, WrongLayout, or
        the error that stopped its making."""

    @abstractmethod
    def ready(self, name: str) -> ServedStore:
        """The store. Raises NotAttached, NotReady, or the error that stopped its making."""

    @abstractmethod
    def layout(self, name: str) -> BlockLayout | None:
        """The layout of a store's blocks; None while it is unknown."""

    @abstractmethod
    def open_tenant_stores(self) -> Mapping[str, ServedStore]:
        """The stores that are ready, by name."""

    def set_quotas(self, quotas: Mapping[str, Quota]) -> list[str]:
        """Change the set of stores: stores not in `quotas` are closed, new ones made when they are
        needed. Returns the names of stores whose size changes only at the next start."""
        raise NotImplementedError(f"{type(self).__name__} has the same stores for ever")

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Close every store within the time. False if a store could not be closed. Idempotent."""
