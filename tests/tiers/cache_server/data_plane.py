# SPDX-License-Identifier: Apache-2.0
"""The data plane without the rest of the server: a tenant store, both of its listeners, and
clients.

Every test with a plane ends with `check_idle`: nothing pinned, nothing reserved, no session left.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Sequence

from stratakv.tiers.base import StoreTier
from stratakv.tiers.block import BlockLayout
from stratakv.tiers.cache_server.key_salt import KeySalt
from stratakv.tiers.cache_server.tenant_store import TenantStore
from stratakv.tiers.cache_server.transports.data_server import DataServer
from stratakv.tiers.cache_server.transports.memory_server import MemoryServer
from stratakv.tiers.cache_server.transports.session_server import Opened, SessionSettings
from stratakv.tiers.contract import make_buffers, payload_of
from stratakv.tiers.remote.transports.block_connection import BlockConnection
from stratakv.tiers.remote.transports.data_client import DataConnection
from stratakv.tiers.remote.transports.memory_client import MemoryConnection
from stratakv.tiers.slab.cpu_slab import CpuSlab
from stratakv.tiers.wire.frames import State
from stratakv.tiers.wire.limits import Limits

from .rig import LAYOUT, SECRET, WAIT_SECONDS

BOOT_ID = bytes(range(16))
TICKET = b"t" * 32
KINDS = ("data", "memory")


class Plane:
    """`connect("data")` or `connect("memory")` gives a connection; any ticket but TICKET is bad."""

    def __init__(
        self,
        *,
        layout: BlockLayout = LAYOUT,
        slots: int = 64,
        stores: Sequence[StoreTier] = (),
        limits: Limits | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.layout = layout
        self.slab = CpuSlab(layout, slots * layout.slot_bytes)
        self.tenant_store = TenantStore(self.slab, stores, KeySalt(SECRET, "tenant"))
        settings = SessionSettings(BOOT_ID, self.resolve, limits or Limits())
        self.data = DataServer(settings, "127.0.0.1", 0, tls)
        self.memory = MemoryServer(settings)
        self.port = self.data.start()
        self.path = self.memory.start()

    def resolve(self, ticket: bytes) -> Opened | None:
        return Opened(self.tenant_store, "tenant") if ticket == TICKET else None

    def connect(
        self,
        kind: str = "data",
        ticket: bytes = TICKET,
        tls: ssl.SSLContext | None = None,
        seconds: float = WAIT_SECONDS,
    ) -> BlockConnection:
        deadline = time.monotonic() + seconds
        if kind == "memory":
            return MemoryConnection.open(self.path, ticket, self.layout, deadline)
        return DataConnection.open(
            "127.0.0.1", self.port, ticket, self.layout, deadline, tls=tls, server_name="localhost"
        )

    @property
    def num_connections(self) -> int:
        return self.data.num_connections + self.memory.num_connections

    def check_idle(self) -> None:
        """Wait until the sessions of closed connections have noticed, then look at the tenant
        store."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.num_connections and time.monotonic() < deadline:
            time.sleep(0.001)
        assert not self.num_connections
        self.check_nothing_held()

    def check_nothing_held(self) -> None:
        stats = self.slab.stats()
        assert (stats.pinned_blocks, stats.reserved_blocks) == (0, 0)

    def close(self) -> None:
        self.data.close(1.0)
        self.memory.close(1.0)
        self.check_idle()
        assert self.tenant_store.close(WAIT_SECONDS)


def put(connection: BlockConnection, keys: Sequence[bytes], layout: BlockLayout) -> list[State]:
    """Store the blocks whose bytes are `payload_of(key, layout)`."""
    buffers = make_buffers(len(keys), layout)
    for key, buffer in zip(keys, buffers, strict=True):
        buffer[: layout.page_bytes] = payload_of(key, layout)
    return connection.store(keys, buffers, [None] * len(keys), time.monotonic() + WAIT_SECONDS)


def fetch(
    connection: BlockConnection, keys: Sequence[bytes], layout: BlockLayout
) -> list[bytes | None]:
    """The blocks, None for a miss."""
    buffers = make_buffers(len(keys), layout)
    proofs = connection.load(keys, buffers, time.monotonic() + WAIT_SECONDS)
    assert len(proofs) == len(keys)
    return [
        None if proof is None else bytes(buffer[: layout.page_bytes])
        for proof, buffer in zip(proofs, buffers, strict=True)
    ]
