# SPDX-License-Identifier: Apache-2.0
"""What the calls and transports of a cache server need of a place where blocks are.

    TenantStore    a tenant's own slab and disk, in this process
    PeerStore      the slab of an engine, in another one

Thread-safe. Nobody holds the store while bytes are read, moved or hashed.

    begin_load → wait_loaded → (bytes go out) → end_load   blocks stay where they are in between
    begin_store → (bytes come in, checked) → end_store     seen by the next look-up from anyone
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
    """Who wants to know of blocks that come and go, by the tenant's own keys. Called while the
    store is held, so it must return at once."""

    def stored(self, keys: Sequence[bytes]) -> None:
        """Blocks can be found from now on."""

    def removed(self, keys: Sequence[bytes]) -> None:
        """Blocks cannot be found any more."""

    def cleared(self) -> None:
        """No block can be found any more."""


class ServedStore(ABC):
    """Blocks of one layout, by the keys that clients use."""

    layout: BlockLayout
    num_slots: int
    is_read_only = False  # whether no block is stored or deleted by clients
    # Since the start: leases that ended by their time, writers of shared memory who were late, and
    # blocks whose sender broke off before they had come whole.
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
        """Hold the store if nobody else does; then no call of this thread waits until `let_go`."""

    @abstractmethod
    def let_go(self) -> None:
        """After a `try_hold` that said yes."""

    @abstractmethod
    def buffer(self, slot: int) -> memoryview:
        """The payload bytes of a slot that a read lease or a write lease names."""

    def buffers(self, slots: Sequence[int]) -> list[memoryview]:
        return [self.buffer(slot) for slot in slots]

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], *, asked: bool = False) -> list[State]:
        """HIT, MISS or PENDING for each key. `asked`: an engine wants to know it for a prompt."""

    @abstractmethod
    def begin_load(self, keys: Sequence[bytes]) -> ReadLease:
        """Pin what is in memory of these blocks and begin to read the rest. Waits for nothing."""

    @abstractmethod
    def wait_loaded(self, read_lease: ReadLease, deadline: float) -> None:
        """Wait until the blocks of a read lease are in their slots, until `deadline` (monotonic) at
        the most. Those that are not are misses."""

    @abstractmethod
    def end_load(self, read_lease: ReadLease) -> None:
        """Let go of the blocks. Idempotent."""

    def tags(self, read_lease: ReadLease) -> list[bytes]:
        """The tag that came with each block of a read lease; nothing but zeros for a miss."""
        return [NO_TAG if proof is None else proof.tag for proof in self.proofs(read_lease)]

    @abstractmethod
    def proofs(self, read_lease: ReadLease) -> list[Proof | None]:
        """What came with each block of a read lease; None for a miss."""

    @abstractmethod
    def begin_store(self, keys: Sequence[bytes]) -> WriteLease:
        """Slots for those blocks that are not here. PENDING: another is storing it now."""

    @abstractmethod
    def end_store(
        self, write_lease: WriteLease, proofs: Proofs, aborted: Collection[int] = ()
    ) -> list[State]:
        """End a write lease: `proofs[i]` came with the i-th block, whose bytes have its digest;
        None where they have another, or, for those at `aborted`, where the sender broke off before
        they had come. The state of each block: KEPT, NO_ROOM, CORRUPT, or MISS for one that did not
        come, that another did not store after all, or that was cleared meanwhile."""

    @abstractmethod
    def abandon_store(self, write_lease: WriteLease) -> list[int]:
        """End a write lease whose writer took too long and may still write: nothing is stored, and
        the slots are withheld until `restore_slots` is given them."""

    @abstractmethod
    def restore_slots(self, slots: Sequence[int]) -> None:
        """Whoever could write to withheld slots has ended."""

    @abstractmethod
    def check_digests(self, write_lease: WriteLease, proofs: Proofs) -> list[Proof | None]:
        """`proofs`, but None where the bytes in the slot have another digest. For bytes that came
        without being hashed on the way."""

    @abstractmethod
    def pin(
        self, keys: Sequence[bytes], seconds: float, deadline: float, owner: str = ""
    ) -> Lease[list[bytes]]:
        """Lease the leading blocks that are here to `owner`, after loading what is on the disk; a
        lease of none has ended. Raises InvalidBlock for a duration out of range, TierBusy where
        there are too many leases, TooMuch where the owner has too many, or where leases would hold
        more than their share of the memory."""

    @abstractmethod
    def unpin(self, number: int, owner: str = "") -> bool:
        """End a lease early; False if the owner has none of that number."""

    def count_expired_lease(self) -> None:  # noqa: B027 - who counts none has none
        """One that a transport holds, and not this store, has ended by its time."""

    @property
    @abstractmethod
    def num_leases(self) -> int:
        """Leases that run."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """The blocks, head first, are as good as used."""

    @abstractmethod
    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget blocks, except those that a lease holds; the number that was known. One that is
        just being read or written is forgotten too. Waits for the disk, so that they stay so."""

    @abstractmethod
    def clear(self) -> None:
        """Forget every block. Waits for the disk, so that they stay forgotten."""

    @abstractmethod
    def subscribe(self, listener: Listener) -> None:
        """Tell `listener` of what happens from now on. Does not wait for the store."""

    @abstractmethod
    def unsubscribe(self, listener: Listener) -> None:
        """Tell it no more. Does not wait for the store."""

    @abstractmethod
    def stats(self) -> dict[str, TierStats]:
        """By tier, the slab first."""

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Write down what the stores lack and close everything, within the time. False if a store
        still uses the memory, which then stays. Idempotent."""


class ServedStores(ABC):
    """The stores of a server by name. Thread-safe; nothing here waits but `close`."""

    @abstractmethod
    def start(self) -> None:
        """Make ready what can be."""

    @abstractmethod
    def attach(self, name: str, layout: BlockLayout) -> ServedStore:
        """The store, if it is for this layout. Raises NotReady while it is being made, WrongLayout,
        and what kept it from being made."""

    @abstractmethod
    def ready(self, name: str) -> ServedStore:
        """The store. Raises NotAttached, NotReady, or what kept it from being made."""

    @abstractmethod
    def layout(self, name: str) -> BlockLayout | None:
        """How the blocks of a store lie; None before anybody has said so."""

    @abstractmethod
    def open_tenant_stores(self) -> Mapping[str, ServedStore]:
        """The stores that are ready, by name."""

    def set_quotas(self, quotas: Mapping[str, Quota]) -> list[str]:
        """Have these stores from now on: others are closed, new ones made when they are asked for.
        Names of those that keep the size they have until they are made anew."""
        raise NotImplementedError(f"{type(self).__name__} has the same stores for ever")

    @abstractmethod
    def close(self, timeout_seconds: float) -> bool:
        """Close every store within the time. False if one of them could not be. Idempotent."""
