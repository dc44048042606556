# SPDX-License-Identifier: Apache-2.0
"""BlockReceiver: copies the pieces of one Store call to slots of the tenant store and hashes them.

    pieces of one block, in order ──► its slot ──► its digest ──► end of the store, in groups

The payload of a block that is already stored, or has no slot, is discarded."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from ...tag import Proof
from ...wire.frames import MAX_BLOCKS, State, WireError
from ...wire.limits import PIECE_BYTES
from ...wire.protobuf_messages import read_header
from ...wire.raw_messages import Piece
from ..leases import WriteLease
from ..served_store import ServedStore

GROUP_BYTES = 8 * 1024**2  # complete blocks are stored in groups of this size


@dataclass(slots=True, eq=False)
class _Block:
    """A block that is being received."""

    index: int
    write_lease: WriteLease
    proof: Proof  # the sender's proof
    target: memoryview | None  # the block's slot; None if the block is not wanted
    hasher: xxhash.xxh3_128
    received: int = 0
    is_good: bool = False


class BlockReceiver:
    """Receives the blocks of one call. The caller calls `begin_block` with the first piece of a
    block, `take_piece` with every piece, `store_whole` when `is_full`, `finish_store` at the end,
    and `close` in any case. All methods except `take_piece` call the tenant store."""

    def __init__(self, tenant_store: ServedStore) -> None:
        self._tenant_store = tenant_store
        self._layout_id = tenant_store.layout.layout_id()
        self._current: _Block | None = None
        self._whole: list[_Block] = []  # complete blocks that are not stored yet
        self._states: list[State] = []
        self._kept: list[bytes] = []
        self._groups = 0

    def take_piece(self, piece: Piece) -> None:
        """Copy the next piece to its slot. Raises WireError if an earlier piece is missing."""
        block = self._current
        if block is None or (piece.index, piece.offset) != (block.index, block.received):
            raise WireError(
                f"a piece of block {piece.index} at {piece.offset} does not follow on the one "
                "before; send the pieces of a block in order, one block after the other"
            )
        size = len(piece.payload)
        end = block.received + size
        if not 0 < size <= PIECE_BYTES or end > self._tenant_store.page_bytes:
            raise WireError(
                f"a piece has 1 to {PIECE_BYTES} bytes within its block of "
                f"{self._tenant_store.page_bytes}, not {size} at {piece.offset}"
            )
        if block.target is not None:
            block.target[block.received : end] = piece.payload
            # The slot is hashed and not the message, because clients will load the slot.
            block.hasher.update(block.target[block.received : end])
        block.received = end
        if end == self._tenant_store.page_bytes:
            block.is_good = block.target is not None and block.hasher.digest() == block.proof.digest
            self._end_current()

    def finish_store(self) -> list[State]:
        """Store the remaining blocks. Return the state of every block, in the order of arrival."""
        if self._current is not None:
            self._end_current()
        self.store_whole()
        if self._groups > 1:
            # Groups were stored in prompt order. Without a touch the prompt's first blocks would be
            # evicted first.
            self._tenant_store.touch(self._kept)
        return self._states

    def close(self) -> None:
        """Free the slots of blocks that were not stored. Idempotent."""
        blocks, self._whole, self._current = [*self._whole, self._current], [], None
        for block in blocks:
            if block is not None:
                block.target = None
                self._tenant_store.end_store(block.write_lease, [None], [0])

    @property
    def is_full(self) -> bool:
        return len(self._whole) * self._tenant_store.page_bytes >= GROUP_BYTES

    def begin_block(self, piece: Piece) -> None:
        """Reserve a slot for the block whose first piece is `piece`. Raises WireError."""
        if self._current is not None:
            self._end_current()  # the sender left the last block incomplete
        count = len(self._states) + len(self._whole)
        if piece.header is None:
            raise WireError("the first piece of a block carries its header")
        if count >= MAX_BLOCKS:
            raise WireError(f"one call stores up to {MAX_BLOCKS} blocks")
        key, *proof = read_header(piece.header, self._layout_id, self._tenant_store.page_bytes)
        write_lease = self._tenant_store.begin_store([key])
        (slot,) = write_lease.slots
        self._current = _Block(
            piece.index,
            write_lease,
            Proof(*proof),
            None if slot is None else self._tenant_store.buffer(slot),
            xxhash.xxh3_128(),
        )

    def _end_current(self) -> None:
        assert self._current is not None
        self._current.target = None
        self._whole.append(self._current)
        self._current = None

    def store_whole(self) -> None:
        """Store received blocks, the last first: a prompt's last blocks are to be evicted first."""
        stored: list[tuple[bytes, State]] = []
        while self._whole:
            block = self._whole.pop()
            proof = block.proof if block.is_good else None
            (state,) = self._tenant_store.end_store(block.write_lease, [proof])
            stored.append((block.write_lease.keys[0], state))
        stored.reverse()
        # A MISS was PENDING before: the block was sent twice, or another call, which may have
        # ended, was storing the block.
        unsure = [i for i, (_, state) in enumerate(stored) if state is State.MISS]
        found = self._tenant_store.lookup([stored[i][0] for i in unsure])
        for i, state in zip(unsure, found, strict=True):
            if state is State.HIT:
                stored[i] = stored[i][0], State.KEPT
        self._states += [state for _, state in stored]
        self._kept += [key for key, state in stored if state is State.KEPT]
        self._groups += bool(stored)
