# SPDX-License-Identifier: Apache-2.0
"""Blocks through gRPC itself, for clients in any language: the streams of Load and Store.

    Load    part 1: wait │ send        Each part of about 8 MiB; while one is sent the disk already
            part 2:   wait │ send      reads the next.
    Store   pieces straight into slots, hashed as they come

How much is in flight is bounded, over all calls and for each tenant; a call waits in line until its
deadline, and one whose client stalls is ended, so that the line moves. Knows nothing of credentials
or of what comes before and after the blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager

from ..tag import Proof
from .block_receiver import GROUP_BYTES, BlockReceiver
from .byte_budget import ByteBudget
from .holdings import Loan
from .limits import PIECE_BYTES, Limits
from .messages import header_message
from .raw_messages import Piece
from .room import Room
from .wire import State

PART_BYTES = 8 * 1024**2
# Beyond the time after which the tiers give a read up themselves.
_READ_SECONDS = 6.0

_MOST_SHARES = 8

Write = Callable[[Piece], Awaitable[None]]


class Streams:
    """The streams of all calls. `executor` runs what waits for a disk."""

    def __init__(self, limits: Limits, executor: Executor, num_tenants: int) -> None:
        self._executor = executor
        self._stall_seconds = limits.stall_seconds
        self._total = ByteBudget(limits.max_bytes_in_flight)
        # So that one tenant leaves the others something.
        self._share = limits.max_bytes_in_flight // min(num_tenants, _MOST_SHARES)
        self._shares: dict[str, ByteBudget] = {}

    @property
    def bytes_in_flight(self) -> int:
        """Promised to calls that run."""
        return self._total.in_use

    async def load(self, tenant: str, room: Room, keys: list[bytes], write: Write) -> int:
        """Write the pieces of all blocks, in order; how many bytes of payload."""
        num = max(1, PART_BYTES // room.page_bytes)
        parts = [keys[start : start + num] for start in range(0, len(keys), num)]
        wish = min(len(keys), 2 * num) * room.page_bytes
        async with self._in_flight(tenant, wish):
            sent = await self._send(room, parts, self._timely(write))
        if len(parts) > 1:
            room.touch(keys)  # as a whole, or the head would be the first to be evicted
        return sent

    async def store(
        self, tenant: str, room: Room, pieces: AsyncIterator[Piece]
    ) -> tuple[list[State], int]:
        """Take blocks in: the state of each, and how many bytes of payload came."""
        receiver = BlockReceiver(room)
        num_bytes = 0
        async with self._in_flight(tenant, GROUP_BYTES + room.page_bytes):
            try:
                async for piece in self._arriving(pieces):
                    receiver.take(piece)
                    num_bytes += len(piece.payload)
                return receiver.finish(), num_bytes
            finally:
                receiver.close()

    async def _send(self, room: Room, parts: list[list[bytes]], write: Write) -> int:
        loans: list[Loan] = []
        first = num_bytes = 0
        layout_id = room.layout.layout_id()
        reading: Future[list[Proof | None]] | None = None
        try:
            for number, keys in enumerate(parts):
                # This one, and the next, so that the disk reads it while this one is sent.
                loans += [room.begin_load(part) for part in parts[len(loans) : number + 2]]
                loan = loans[number]
                reading = self._executor.submit(_arrived, room, loan)
                proofs = await asyncio.wrap_future(reading)
                for place, (key, slot) in enumerate(zip(keys, loan.slots, strict=True)):
                    proof = proofs[place]
                    if slot is None or proof is None:
                        await write(Piece(first + place, State.MISS))
                        continue
                    block = room.buffer(slot)
                    for piece in _pieces(first + place, block):
                        if not piece.offset:
                            piece.header = header_message(key, layout_id, block.nbytes, *proof)
                        await write(piece)
                    num_bytes += block.nbytes
                room.end_load(loan)
                first += len(keys)
        finally:
            if reading is not None:
                # A call may end before its thread does, which still looks at the blocks then.
                reading.add_done_callback(lambda _done: _end(room, loans))
        return num_bytes

    def _timely(self, write: Write) -> Write:
        async def timely(piece: Piece) -> None:
            async with asyncio.timeout(self._stall_seconds):
                await write(piece)

        return timely

    async def _arriving(self, pieces: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
        while True:
            try:
                async with asyncio.timeout(self._stall_seconds):
                    piece = await anext(pieces)
            except StopAsyncIteration:
                return
            yield piece

    @asynccontextmanager
    async def _in_flight(self, tenant: str, wish: int) -> AsyncIterator[None]:
        share = self._shares.setdefault(tenant, ByteBudget(self._share))
        taken = await share.take(wish)
        try:
            total = await self._total.take(taken)
            try:
                yield
            finally:
                self._total.give_back(total)
        finally:
            share.give_back(taken)


def _arrived(room: Room, loan: Loan) -> list[Proof | None]:
    """Wait for a loan; the proofs of its blocks."""
    room.wait(loan, time.monotonic() + _READ_SECONDS)
    return room.proofs(loan)


def _end(room: Room, loans: list[Loan]) -> None:
    for loan in loans:
        room.end_load(loan)


def _pieces(index: int, block: memoryview) -> Iterator[Piece]:
    for offset in range(0, block.nbytes, PIECE_BYTES):
        yield Piece(index, State.HIT, None, offset, block[offset : offset + PIECE_BYTES])
