# SPDX-License-Identifier: Apache-2.0
"""The contract of connections that move blocks between a tenant store and a client's buffers.

`DataConnection` moves blocks through a socket, `MemoryConnection` through memory that both ends
map, `StreamConnection` through gRPC. A caller may rely on these properties:
- if `load` returns a proof, the buffer holds exactly the block that was stored under the key; a
  block with other bytes is a miss, counted in `corrupt_blocks` and listed in `corrupt_keys`;
- a call uses the buffers only until it returns or raises;
- a call raises ConnectionLost at its deadline (monotonic seconds) if it has not ended.
A caller must obey these rules:
- make one call at a time (except `abort_call`), and close a connection that raised;
- pass at most `frames.MAX_BLOCKS` blocks to a call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...tag import Proof, Proofs
from ...wire.frames import State, Status
from ...wire.sockets import ConnectionLost


class Refused(ConnectionLost):
    """The server refused a request. `status` has the reason."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"the server refused: {status.name}")
        self.status = status


class BlockConnection(ABC):
    """The connection of one client to its tenant's store."""

    kind: str  # the transport, for logs
    boot_id: bytes
    corrupt_blocks: int = 0
    corrupt_keys: list[bytes]  # corrupt blocks of the last load
    is_fallback: bool = False  # whether a better transport could not be opened

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], buffers: Sequence[memoryview], deadline: float
    ) -> list[Proof | None]:
        """Fill `buffers[i]` with the block of `keys[i]`. Return proofs, None for a miss."""

    @abstractmethod
    def store(
        self,
        keys: Sequence[bytes],
        buffers: Sequence[memoryview],
        proofs: Proofs,
        deadline: float,
    ) -> list[State | None]:
        """Send the blocks that the server lacks. Return each block's state: KEPT, or the reason why
        the block was not kept, or None if the buffer does not match its proof."""

    @abstractmethod
    def abort_call(self) -> None:
        """End the call under way with ConnectionLost. Any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection. Idempotent."""
