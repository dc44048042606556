# SPDX-License-Identifier: Apache-2.0
"""The promise of a client's connection to a tenant store: blocks in and out of the caller's
buffers.

`DataConnection` moves them through a socket, `MemoryConnection` through memory that both ends map,
`StreamConnection` through gRPC. A caller may rely on this:
- a proof means that the buffer holds exactly the block that was stored under the key; whatever
  differs is a miss, counted in `corrupt_blocks` and named in `corrupt_keys`;
- buffers are touched until the call ends, and not after it;
- a call ends at its deadline (monotonic seconds), and then raises ConnectionLost.
A caller must do this:
- call from one thread at a time (`abort_call` from any), and close a connection that raised;
- give at most `wire.MAX_BLOCKS` blocks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...tag import Proof, Proofs
from ...wire.frames import State, Status
from ...wire.sockets import ConnectionLost


class Refused(ConnectionLost):
    """The server would not go on; `status` says why."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"the server refused: {status.name}")
        self.status = status


class BlockConnection(ABC):
    """The connection of one client to its tenant's store."""

    kind: str  # for people: how blocks move
    boot_id: bytes
    corrupt_blocks: int = 0
    corrupt_keys: list[bytes]  # of the last load
    is_fallback: bool = False  # the server offers a better one, which could not be opened

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[Proof | None]:
        """Fill `buffers[i]` with the block of `keys[i]`; the proof of each, None for a miss."""

    @abstractmethod
    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        deadline: float,
    ) -> list[State | None]:
        """Send the blocks that the server lacks; for each KEPT, or why not. None: its buffer does
        not hold what its proof says, and was not stored."""

    @abstractmethod
    def abort_call(self) -> None:
        """End the call under way with ConnectionLost. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""
