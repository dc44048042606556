# SPDX-License-Identifier: Apache-2.0
"""The gRPC calls of the cache service; proto/v1/cache_service.proto describes each call.

The event loop never waits for a tenant store (`tenant_store_calls.py`). `access/call_guard.py`
turns an error that a call raises into a gRPC status."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar

from ... import __version__
from ...proto.v1 import cache_service_pb2 as messages
from ..wire.frames import MAX_BLOCKS, MAX_KEYS, MAX_LEASE_SECONDS, State, WireError, unpack_keys
from ..wire.limits import PIECE_BYTES, Limits
from ..wire.protobuf_messages import layout_message, read_layout
from .access.auth import current_caller, current_tenant
from .access.tickets import Tickets
from .served_store import ServedStore, ServedStores
from .server_metrics import ServerMetrics
from .tenant_store_calls import TenantStoreCalls
from .transports.streams import Streams
from .watch import Watches

_READ_SECONDS = 6.0  # longer than the deadline of a tier's read
# Limits of the keys of one look-up. On the event loop, 128 keys take 0.03 ms and 1,024 keys 0.3 ms;
# a whole call takes 0.4 ms.
_QUICK_KEYS, _ALONE_KEYS = 128, 1024
_HIT = bytes((State.HIT,))
_Result = TypeVar("_Result")


class DataPlane(NamedTuple):
    """The addresses where clients move blocks without gRPC; port 0 and path "" mean none."""

    port: int = 0
    unix_path: str = ""


class CacheService:
    """The servicer for `rpc.generic_handler`, with a coroutine for each call."""

    def __init__(
        self,
        boot_id: bytes,
        tenant_stores: ServedStores,
        num_tenants: int,
        limits: Limits,
        tickets: Tickets,
        data_plane: DataPlane,
        metrics: ServerMetrics,
    ) -> None:
        self._boot_id = boot_id
        self._tenant_stores = tenant_stores
        self._limits = limits
        self._tickets = tickets
        self._data_plane = data_plane
        self._metrics = metrics
        self._calls = TenantStoreCalls(num_tenants)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.streams = Streams(limits, self._calls, num_tenants)
        self.watches = Watches(limits, num_tenants)

    def set_tenants(self, num_tenants: int, ended: Collection[str]) -> None:
        """Change the number of tenants. End the watches of the tenants in `ended`, which have lost
        a credential and may begin new watches."""
        self.streams.set_tenants(num_tenants)
        self.watches.set_tenants(num_tenants)
        self.watches.end_of(ended)

    def close(self) -> None:
        """Stop beginning calls of tenant stores. Does not wait for running calls. Idempotent."""
        self._calls.close()

    async def describe(self, _request: Any, _context: Any) -> Any:
        """Describe the server: its version, its limits, and the caller's tenant and layout."""
        tenant = current_tenant()
        layout = self._tenant_stores.layout(tenant.tenant_store)
        tenant_store = self._tenant_stores.open_tenant_stores().get(tenant.tenant_store)
        return messages.DescribeResponse(
            boot_id=self._boot_id,
            server_version=__version__,
            layout=None if layout is None else layout_message(layout),
            max_keys=MAX_KEYS,
            max_blocks=MAX_BLOCKS,
            max_piece_bytes=PIECE_BYTES,
            capacity_bytes=0 if tenant_store is None else await self._capacity_bytes(tenant_store),
            tenant=tenant.name,
            max_lease_ms=int(MAX_LEASE_SECONDS * 1000),
        )

    async def attach(self, request: Any, _context: Any) -> Any:
        """Open the caller's tenant store, with the caller's layout if the store is new."""
        if not request.HasField("layout"):
            raise WireError("Attach needs the layout of the caller's blocks")
        tenant_store = self._tenant_stores.attach(
            current_tenant().tenant_store, read_layout(request.layout)
        )
        capacity_bytes = await self._capacity_bytes(tenant_store)
        return messages.AttachResponse(
            boot_id=self._boot_id,
            capacity_bytes=capacity_bytes,
            is_read_only=tenant_store.is_read_only,
        )

    async def lookup(self, request: Any, _context: Any) -> Any:
        """Look blocks up, which does not count as a use of the blocks."""
        tenant_store, keys = self._tenant_store(), unpack_keys(request.keys)
        states = bytes(await self._looked_up(tenant_store, keys))
        prefix = len(states) - len(states.lstrip(_HIT))
        return messages.LookupResponse(prefix=prefix, states=states, boot_id=self._boot_id)

    async def load(self, request: Any, context: Any) -> None:
        """Load blocks, and send them in pieces."""
        tenant, tenant_store = current_tenant(), self._tenant_store()
        keys = unpack_keys(request.keys, MAX_BLOCKS)
        if keys:
            sent = await self.streams.load(tenant.name, tenant_store, keys, context.write)
            self._metrics.sent(tenant.name, sent)

    async def store(self, requests: Any, _context: Any) -> Any:
        """Receive blocks in pieces, and store them."""
        tenant, tenant_store = current_tenant(), self._tenant_store()
        states, received = await self.streams.store(tenant.name, tenant_store, requests)
        self._metrics.received(tenant.name, received)
        return messages.StoreResponse(states=bytes(states), boot_id=self._boot_id)

    async def pin(self, request: Any, _context: Any) -> Any:
        """Lease the leading blocks, up to the first block that the store lacks."""
        tenant, tenant_store = current_tenant(), self._tenant_store()
        keys = unpack_keys(request.keys, MAX_BLOCKS)
        seconds = request.lease_ms / 1000
        if not keys:
            raise WireError("Pin needs keys")
        if not 0 < seconds <= MAX_LEASE_SECONDS:
            raise WireError(
                f"a lease runs 1 to {int(MAX_LEASE_SECONDS * 1000)} ms, not {request.lease_ms}"
            )
        deadline = time.monotonic() + min(seconds, _READ_SECONDS)
        lease = await self._run(
            lambda: tenant_store.pin(keys, seconds, deadline, tenant.name),
            undo=lambda granted: tenant_store.unpin(granted.number, tenant.name),
        )
        if not lease.held:
            return messages.PinResponse()
        return messages.PinResponse(lease=lease.number, prefix=len(lease.held))

    async def unpin(self, request: Any, _context: Any) -> Any:
        """End a lease early."""
        if not request.lease:
            raise WireError("Unpin needs the number of a lease, which is never zero")
        tenant, tenant_store = current_tenant(), self._tenant_store()
        was_held = await self._run_quick(
            tenant_store, lambda: tenant_store.unpin(request.lease, tenant.name)
        )
        return messages.UnpinResponse(was_held=was_held)

    async def touch(self, request: Any, _context: Any) -> Any:
        tenant_store, keys = self._tenant_store(), unpack_keys(request.keys)
        await self._run(lambda: tenant_store.touch(keys))
        return messages.TouchResponse()

    async def delete(self, request: Any, _context: Any) -> Any:
        """Delete the given blocks, or all blocks."""
        tenant_store, keys = self._tenant_store(), unpack_keys(request.keys)
        if not request.all:
            return messages.DeleteResponse(deleted=await self._run(lambda: tenant_store.drop(keys)))
        if keys:
            raise WireError("Delete takes keys or `all`, not both")
        await self._run(tenant_store.clear)
        return messages.DeleteResponse()

    async def watch(self, _request: Any, context: Any) -> None:
        """Report stored and removed blocks until the client ends the call."""
        tenant_store, tenant = self._tenant_store(), current_tenant().name
        watcher = self.watches.begin_watch(tenant_store, tenant)
        try:
            await context.write(messages.WatchEvent(boot_id=self._boot_id))
            for sequence in itertools.count(1):
                happening = await watcher.next_event()
                if happening is None:
                    return
                await context.write(
                    messages.WatchEvent(
                        sequence=sequence,
                        stored=b"".join(happening.stored),
                        removed=b"".join(happening.removed),
                        cleared=happening.cleared,
                        lost=happening.lost,
                    )
                )
        finally:
            self.watches.end_watch(tenant_store, tenant, watcher)

    async def stats(self, _request: Any, _context: Any) -> Any:
        """Return the statistics of the tenant's store, by tier."""
        tenant_store = self._tenant_store()
        tiers = [
            messages.TierStats(
                name=name,
                capacity_bytes=stats.capacity_bytes,
                used_bytes=stats.used_bytes,
                blocks=stats.blocks,
                hits=stats.hits,
                misses=stats.misses,
                stored_blocks=stats.stored_blocks,
                loaded_blocks=stats.loaded_blocks,
                evicted_blocks=stats.evicted_blocks,
            )
            for name, stats in (await self._run(tenant_store.stats)).items()
        ]
        return messages.StatsResponse(
            tiers=tiers, leases=tenant_store.num_leases, corrupt_blocks=tenant_store.corrupt_blocks
        )

    async def open_data(self, _request: Any, _context: Any) -> Any:
        """Return a ticket for the data connection."""
        self._tenant_store()
        return messages.OpenDataResponse(
            ticket=self._tickets.issue_ticket(current_caller()),
            ticket_ms=int(self._limits.ticket_seconds * 1000),
            port=self._data_plane.port,
            unix_path=self._data_plane.unix_path,
            boot_id=self._boot_id,
        )

    async def _looked_up(self, tenant_store: ServedStore, keys: list[bytes]) -> list[State]:
        """Look keys up. Up to _QUICK_KEYS keys are looked up on the event loop. More than
        _ALONE_KEYS are looked up on a thread, in one look-up of a tenant at a time. A number in
        between goes to a thread only while such a look-up runs: waking a thread takes longer."""
        if len(keys) <= _QUICK_KEYS:
            return await self._run_quick(
                tenant_store, lambda: tenant_store.lookup(keys, asked=True)
            )
        turn = self._turns[current_tenant().name]
        if len(keys) > _ALONE_KEYS or turn.locked():
            async with turn:
                return await self._run(lambda: tenant_store.lookup(keys, asked=True))
        await turn.acquire()
        try:
            return await self._run_quick(
                tenant_store, lambda: tenant_store.lookup(keys, asked=True)
            )
        finally:
            # Released later, since a look-up that has already arrived must find the lock taken.
            asyncio.get_running_loop().call_soon(turn.release)

    async def _capacity_bytes(self, tenant_store: ServedStore) -> int:
        return await self._run_quick(tenant_store, lambda: tenant_store.capacity_bytes)

    def _tenant_store(self) -> ServedStore:
        return self._tenant_stores.ready(current_tenant().tenant_store)

    async def _run_quick(self, tenant_store: ServedStore, work: Callable[[], _Result]) -> _Result:
        return await self._calls.run_quick(current_tenant().name, tenant_store, work)

    async def _run(
        self,
        work: Callable[[], _Result],
        undo: Callable[[_Result], object] | None = None,
    ) -> _Result:
        return await self._calls.run(current_tenant().name, work, undo)
