# SPDX-License-Identifier: Apache-2.0
"""Streams: the gRPC calls Load and Store, which move blocks for clients in any language.

    Load    part 1: wait │ send        Each part has about 8 MiB. While one part is sent, the disk
            part 2:   wait │ send      reads the next part.
    Store   Each piece is copied to its slot and hashed there as soon as it is received.

Bytes in flight are limited, in total and for each tenant. With several tenants, each has a reserve
that no other tenant can use, for one call at a time; all other calls wait in a queue for the shared
bytes. The server ends a call whose client stalls, so that waiting calls can start."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from ...tag import Proof
from ...wire.frames import State
from ...wire.limits import PIECE_BYTES, Limits
from ...wire.protobuf_messages import header_message
from ...wire.raw_messages import Piece
from ..leases import ReadLease
from ..served_store import ServedStore
from ..tenant_store_calls import TenantStoreCalls
from .block_receiver import GROUP_BYTES, BlockReceiver
from .byte_budget import ByteBudget

PART_BYTES = 8 * 1024**2
# Longer than the deadline of a tier's read.
_READ_SECONDS = 6.0

_MOST_SHARES = 8


Write = Callable[[Piece], Awaitable[None]]
_Result = TypeVar("_Result")


class Streams:
    """The Load and Store streams of a server. `calls` runs work on tenant stores."""

    def __init__(self, limits: Limits, calls: TenantStoreCalls, num_tenants: int) -> None:
        self._calls = calls
        self._stall_seconds = limits.stall_seconds
        self._most = limits.max_bytes_in_flight
        self._for_all = ByteBudget(0)
        self._shares: dict[str, ByteBudget] = {}
        self._has_kept: dict[str, int] = {}
        self.set_tenants(num_tenants)

    def set_tenants(self, num_tenants: int) -> None:
        """Change the number of tenants, and compute the tenants' shares again."""
        # A tenant keeps `_kept` bytes for one call at a time; all calls share other bytes in order.
        self._kept = self._most // (2 * num_tenants) if num_tenants > 1 else 0
        self._share = self._most // min(num_tenants, _MOST_SHARES)
        self._for_all.resize(self._most - self._kept * num_tenants)
        for share in self._shares.values():
            share.resize(self._share)

    @property
    def bytes_in_flight(self) -> int:
        return self._for_all.in_use + sum(self._has_kept.values())

    async def load(
        self, tenant: str, tenant_store: ServedStore, keys: list[bytes], write: Write
    ) -> int:
        """Write the pieces of all blocks, in order. Return the number of payload bytes."""
        num = max(1, PART_BYTES // tenant_store.page_bytes)
        parts = [keys[start : start + num] for start in range(0, len(keys), num)]
        wish = min(len(keys), 2 * num) * tenant_store.page_bytes
        async with self._in_flight(tenant, wish):
            sent = await self._send_parts(tenant, tenant_store, parts, self._timely(write))
        if len(parts) > 1:
            # Parts were read in prompt order. Without a touch the prompt's first blocks would be
            # evicted first.
            await self._calls.run_quick(tenant, tenant_store, lambda: tenant_store.touch(keys))
        return sent

    async def store(
        self, tenant: str, tenant_store: ServedStore, pieces: AsyncIterator[Piece]
    ) -> tuple[list[State], int]:
        """Receive blocks. Return the state of each block, and the number of payload bytes."""
        receiver = BlockReceiver(tenant_store)
        turn = _Turn(self._calls, tenant, tenant_store)
        num_bytes = 0
        async with self._in_flight(tenant, GROUP_BYTES + tenant_store.page_bytes):
            try:
                async for piece in self._arriving(pieces):
                    if not piece.offset:
                        await turn.run_quick(partial(receiver.begin_block, piece))
                    receiver.take_piece(piece)
                    num_bytes += len(piece.payload)
                    if receiver.is_full:
                        await turn.run_quick(receiver.store_whole)
                return await turn.run_quick(receiver.finish_store), num_bytes
            finally:
                turn.end_turn(receiver.close)

    async def _send_parts(
        self, tenant: str, tenant_store: ServedStore, parts: list[list[bytes]], write: Write
    ) -> int:
        turn = _Turn(self._calls, tenant, tenant_store)
        read_leases: list[ReadLease] = []
        first = num_bytes = 0
        layout_id = tenant_store.layout.layout_id()
        try:
            for number, keys in enumerate(parts):
                # Begin this part and the next, which the disk reads while this part is sent.
                for part in parts[len(read_leases) : number + 2]:
                    await turn.run_quick(partial(_begin_part, tenant_store, part, read_leases))
                read_lease = read_leases[number]
                proofs = await turn.run(partial(_wait_part, tenant_store, read_lease))
                for place, (key, slot) in enumerate(zip(keys, read_lease.slots, strict=True)):
                    proof = proofs[place]
                    if slot is None or proof is None:
                        await write(Piece(first + place, State.MISS))
                        continue
                    block = tenant_store.buffer(slot)
                    for piece in _pieces(first + place, block):
                        if not piece.offset:
                            piece.header = header_message(key, layout_id, block.nbytes, *proof)
                        await write(piece)
                    num_bytes += block.nbytes
                await turn.run_quick(partial(tenant_store.end_load, read_lease))
                first += len(keys)
        finally:
            turn.end_turn(partial(_end_parts, tenant_store, read_leases))
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
        if self._kept and tenant not in self._has_kept:
            self._has_kept[tenant] = min(wish, self._kept)
            try:
                yield
            finally:
                del self._has_kept[tenant]
            return
        share = self._shares.setdefault(tenant, ByteBudget(self._share))
        taken = await share.take_bytes(wish)
        try:
            total = await self._for_all.take_bytes(taken)
            try:
                yield
            finally:
                self._for_all.give_back_bytes(total)
        finally:
            share.give_back_bytes(taken)


class _Turn:
    """The calls of one stream to its tenant store, made one after the other."""

    def __init__(self, calls: TenantStoreCalls, tenant: str, tenant_store: ServedStore) -> None:
        self._calls = calls
        self._tenant = tenant
        self._tenant_store = tenant_store
        self._last: Future[Any] | None = None

    async def run_quick(self, work: Callable[[], _Result]) -> _Result:
        """Do `work` on the event loop if the tenant store's lock is free, else on a thread."""
        if not self._tenant_store.try_hold():
            return await self.run(work)
        try:
            return work()
        finally:
            self._tenant_store.let_go()

    async def run(self, work: Callable[[], _Result]) -> _Result:
        """Do `work` on a thread. The thread continues even if the stream is cancelled."""
        future = await self._calls.submit(self._tenant, work)
        self._last = future
        return await asyncio.wrap_future(future)

    def end_turn(self, work: Callable[[], object]) -> None:
        """Queue `work`, to run after the last call of `run` has ended. Does not wait."""
        self._calls.run_later(self._tenant_store, work, self._last)


def _begin_part(tenant_store: ServedStore, keys: list[bytes], read_leases: list[ReadLease]) -> None:
    """Begin a load and append its read lease, even if the stream has been cancelled."""
    read_leases.append(tenant_store.begin_load(keys))


def _wait_part(tenant_store: ServedStore, read_lease: ReadLease) -> list[Proof | None]:
    tenant_store.wait_loaded(read_lease, time.monotonic() + _READ_SECONDS)
    return tenant_store.proofs(read_lease)


def _end_parts(tenant_store: ServedStore, read_leases: list[ReadLease]) -> None:
    for read_lease in read_leases:
        tenant_store.end_load(read_lease)


def _pieces(index: int, block: memoryview) -> Iterator[Piece]:
    for offset in range(0, block.nbytes, PIECE_BYTES):
        yield Piece(index, State.HIT, None, offset, block[offset : offset + PIECE_BYTES])
