# SPDX-License-Identifier: Apache-2.0
"""The cache server: tenant stores, gRPC calls, data connections and metrics in one process.

    start   open the tenant stores on the disk, the data plane, gRPC; report SERVING
    reload  tenants, tokens and certificates change; memory, ports and connections stay
    drain   report NOT_SERVING; refuse new calls; finish running calls; write blocks to the disk

The server checks all its addresses before it starts any part. The server refuses an address that is
in use, and an address that other machines can reach without TLS and credentials."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import grpc

from ..errors import TierConfigError
from ..wire.frames import BOOT_ID_BYTES
from ..wire.limits import Limits
from ..wire.listen import check_exposure, check_free, check_metrics_exposure, host_port
from ..wire.own_token import leave_token, take_away_token
from ..wire.rpc import SERVICE_NAME, generic_handler
from .access.call_connections import CallConnections
from .access.call_guard import CallGuard
from .access.tenants import Tenants
from .access.tickets import Tickets
from .access.tls import LiveTls, TlsFiles
from .health import MAX_CHECKS, MAX_WATCHERS, Health
from .metrics_endpoint import MetricsEndpoint
from .served_store import ServedStores
from .server_metrics import ServerMetrics
from .service import CacheService, DataPlane
from .tenant_stores import StoreSettings, TenantStores
from .transports.data_server import DataServer
from .transports.memory_server import MemoryServer
from .transports.session_server import Opened, SessionSettings

log = logging.getLogger(__name__)

DEFAULT_PORT = 9400
_LAST_SECONDS = 0.2  # time for the last messages of calls that are ended
_LOOK_AT_CERTIFICATES_SECONDS = 6 * 3600.0
_LOOK_AT_TOKEN_SECONDS = 15.0
# `reload` applies the fields in _RELOADED, and ignores the fields in _LEFT_ALONE, whose values
# differ each time the settings are read.
_RELOADED = frozenset({"tenants", "tls"})
_LEFT_ALONE = frozenset({"own_token", "secret", "mac_key"})
_REFLECTION = "grpc.reflection.v1alpha.ServerReflection"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings(StoreSettings):
    """The settings of a server. Port 0 means any free port; port None turns the part off."""

    tenants: Tenants
    # A tenant's token, which the server writes to a file for this user's clients on this machine.
    own_token: str | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    data_port: int | None = DEFAULT_PORT + 1
    shares_memory: bool = True  # whether clients of the same user may map memory
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    metrics_exposed: bool = False  # whether other machines may read metrics
    tls: TlsFiles | None = None
    insecure: bool = False
    reflection: bool = False
    drain_seconds: float = 30.0


class CacheServer:
    """The server. `start`, then `drain` are called once each, on one event loop. `tenant_stores`,
    if given, replaces the stores of the settings. Raises TierConfigError for unusable settings."""

    def __init__(self, settings: ServerSettings, tenant_stores: ServedStores | None = None) -> None:
        self.settings = settings
        self.boot_id = secrets.token_bytes(BOOT_ID_BYTES)
        self.port = 0
        self.data_plane = DataPlane()
        self.metrics_port = 0
        self.token_path: Path | None = None  # the file of `own_token`
        self._has_told_of_token = False  # whether a failed rewrite of the token was logged
        limits = settings.limits
        self.tenant_stores: ServedStores = tenant_stores or TenantStores(
            settings.tenants.quotas, settings
        )
        self._tickets = Tickets(limits.max_tickets, limits.ticket_seconds)
        self._metrics = ServerMetrics(self.tenant_stores.open_tenant_stores, self._gauges)
        num_tenants = len(settings.tenants)
        self._connections = CallConnections(limits, num_tenants, self._metrics.turned_away)
        self._guard = CallGuard(settings.tenants, limits, self._connections, self._metrics)
        self._sessions = SessionSettings(
            self.boot_id, self._resolve, limits, num_tenants, self._metrics.data_refused
        )
        self._endpoint = MetricsEndpoint(self._metrics.exposition)
        self._data: DataServer | None = None
        self._memory: MemoryServer | None = None
        self._tls: LiveTls | None = None
        self._looking: list[asyncio.Task[None]] = []  # tasks that watch certificates and the token
        self._grpc: Any = None
        self._service: CacheService | None = None
        self._health: Health | None = None

    @property
    def address(self) -> str:
        """The address `host:port` of the gRPC calls, after `start`."""
        return host_port(self.settings.host, self.port)

    async def start(self) -> None:
        """Listen and serve. If a part fails to start, all parts are stopped."""
        self._check_settings()
        try:
            await self._start_services()
        except BaseException:
            await self.drain(0.0)
            raise

    async def drain(self, seconds: float | None = None) -> bool:
        """Stop the server within about `seconds`. New calls are refused. Running calls get half of
        the time to finish; the other half is for writing blocks to the disk. Return False if a
        tenant store could not be closed. Idempotent."""
        if seconds is None:
            seconds = self.settings.drain_seconds
        end = time.monotonic() + seconds
        for task in self._looking:
            task.cancel()
        self._guard.refuse_new_calls()
        if self._health is not None:
            self._health.enter_graceful_shutdown()
        if self._service is not None:
            self._service.watches.end_all()
        # New calls still get the answer UNAVAILABLE; with grpc's own stop some would hang.
        await asyncio.gather(
            self._guard.wait_until_idle(seconds / 2),
            asyncio.to_thread(self._close_data, seconds / 2),
        )
        if self._grpc is not None:
            await self._grpc.stop(_LAST_SECONDS)
            self._grpc = None
            await asyncio.to_thread(self._connections.close)
        path, self.token_path = self.token_path, None
        if path is not None and self.settings.own_token is not None:
            take_away_token(path, self.settings.own_token)
        if self._service is not None:
            self._service.close()
        closed = await asyncio.to_thread(self.tenant_stores.close, max(0.1, end - time.monotonic()))
        await self._endpoint.close()
        return closed

    async def reload(self, read: Callable[[], ServerSettings]) -> list[str]:
        """Apply the tenants, credentials and certificates in the settings that `read` returns;
        `read` runs on a thread. A removed token becomes invalid: the tickets and data connections
        of this token are refused at their next request. Return sentences about changes that need a
        restart. Raises TierConfigError or the errors of `read`, and then changes nothing."""
        old = self.settings
        try:
            settings = await asyncio.to_thread(read)
            _check_exposure(settings)
            if (settings.tls is None) != (old.tls is None):
                raise TierConfigError(
                    "TLS cannot be begun or given up while the server runs; restart it"
                )
            fresh = None
            if settings.tls is not None and self._tls is not None:
                fresh = await asyncio.to_thread(self._tls.prepared, settings.tls)
        except BaseException:
            self._metrics.reloaded("refused")
            raise
        # All steps that can fail are done.
        if fresh is not None and self._tls is not None:
            self._tls.take_over(fresh)
            if self._data is not None:
                self._data.set_tls(self._tls.context)
        tenants = settings.tenants
        ended = old.tenants.with_fewer_credentials(tenants)
        self.settings = replace(old, tenants=tenants, tls=settings.tls)
        self._guard.set_tenants(tenants)
        self._connections.set_tenants(len(tenants))
        for server in (self._data, self._memory):
            if server is not None:
                server.set_tenants(len(tenants))
        if self._service is not None:
            self._service.set_tenants(len(tenants), ended)
        kept = await asyncio.to_thread(self.tenant_stores.set_quotas, tenants.quotas)
        self._metrics.reloaded("applied")
        left = [f"{name} has another size from the next start on" for name in kept]
        changed = [
            each.name
            for each in fields(settings)
            if each.name not in _RELOADED | _LEFT_ALONE
            and getattr(settings, each.name) != getattr(old, each.name)
        ]
        if changed:
            left.append(f"{', '.join(changed)} changed, which the next start takes up")
        return left

    def _check_settings(self) -> None:
        settings = self.settings
        _check_exposure(settings)
        if settings.metrics_port is not None:
            check_metrics_exposure(settings.metrics_host, exposed=settings.metrics_exposed)
        check_free(settings.host, settings.port, "--port")
        if settings.data_port is not None:
            check_free(settings.host, settings.data_port, "--data-port")
        if settings.metrics_port is not None:
            check_free(settings.metrics_host, settings.metrics_port, "--metrics-port")

    async def _start_services(self) -> None:
        settings = self.settings
        self._tls = None if settings.tls is None else LiveTls(settings.tls)
        credentials = None if self._tls is None else self._tls.credentials()
        self.data_plane = DataPlane(self._start_data(), self._start_memory())
        if settings.metrics_port is not None:
            self.metrics_port = await self._endpoint.start(
                settings.metrics_host, settings.metrics_port
            )
        await asyncio.to_thread(self.tenant_stores.start)
        self._service = CacheService(
            self.boot_id,
            self.tenant_stores,
            len(settings.tenants),
            settings.limits,
            self._tickets,
            self.data_plane,
            self._metrics,
        )
        self._health = Health(SERVICE_NAME)
        server = grpc.aio.server(
            interceptors=(self._guard,),
            options=_options(settings.limits),
            # The guard's limit excludes calls that it does not intercept; this limit covers all.
            maximum_concurrent_rpcs=2 * (settings.limits.max_calls + MAX_WATCHERS + MAX_CHECKS),
        )
        service = generic_handler(self._service, settings.limits.stall_seconds)
        server.add_generic_rpc_handlers((service, self._health.handler()))
        if settings.reflection:
            _add_reflection(server)
        self.port = _bind(server, settings.host, settings.port, credentials)
        if settings.own_token is not None:
            self.token_path = leave_token(self.port, settings.own_token)
        self._grpc = server
        await server.start()
        self._connections.start(self.port)
        if self._tls is not None:
            self._looking.append(asyncio.create_task(self._look_at_certificates(self._tls)))
        if settings.own_token is not None:
            self._looking.append(asyncio.create_task(self._keep_token(settings.own_token)))

    async def _look_at_certificates(self, tls: LiveTls) -> None:
        while True:
            await asyncio.sleep(_LOOK_AT_CERTIFICATES_SECONDS)
            tls.look_at_ends()

    async def _keep_token(self, token: str) -> None:
        while True:
            await asyncio.sleep(_LOOK_AT_TOKEN_SECONDS)
            try:
                await self.look_at_token(token)
            except Exception:  # the task must go on: no other task does its work
                log.exception("the token for clients of this user cannot be looked at")

    async def look_at_token(self, token: str) -> None:
        """Write the token file for this user's clients again if the file was removed."""
        path = self.token_path
        if path is None or await asyncio.to_thread(os.path.lexists, path):
            return
        try:
            self.token_path = await asyncio.to_thread(leave_token, self.port, token)
        except TierConfigError as error:
            if not self._has_told_of_token:
                log.error("the token in %s is gone and cannot be left again: %s", path, error)
            self._has_told_of_token = True
            return
        self._has_told_of_token = False
        log.warning("the token in %s was gone; it lies in %s now", path, self.token_path)

    def _start_data(self) -> int:
        settings = self.settings
        if settings.data_port is None:
            return 0
        tls = None if self._tls is None else self._tls.context
        self._data = DataServer(self._sessions, settings.host, settings.data_port, tls)
        return self._data.start()

    def _start_memory(self) -> str:
        if not self.settings.shares_memory:
            return ""
        self._memory = MemoryServer(self._sessions)
        return self._memory.start()

    def _resolve(self, ticket: bytes) -> Opened | None:
        """Invalidate a ticket. Return the `Opened` store, or None if the ticket was not valid."""
        caller = self._tickets.use_ticket(ticket)
        if caller is None or not caller.is_known_to(self.settings.tenants):
            return None
        tenant = caller.tenant
        tenant_store = self.tenant_stores.open_tenant_stores().get(tenant.tenant_store)
        if tenant_store is None:
            return None
        return Opened(tenant_store, tenant.name, lambda: caller.is_known_to(self.settings.tenants))

    def _close_data(self, seconds: float) -> None:
        """Close the data plane and wait until it has ended. Must be called on a thread."""
        end = time.monotonic() + seconds
        for server in (self._data, self._memory):
            if server is not None:
                server.close(max(0.1, end - time.monotonic()))
        self._data = self._memory = None

    def _gauges(self) -> Mapping[str, tuple[str, float]]:
        service, tenant_stores = self._service, self.tenant_stores.open_tenant_stores()
        result: dict[str, tuple[str, float]] = {
            "calls_running": ("Calls that run.", self._guard.running),
            "rooms_ready": ("Tenant stores whose memory is there.", len(tenant_stores)),
            "tickets": ("Tickets for data connections, not used yet.", len(self._tickets)),
        }
        result["certificate_end_time_seconds"] = (
            "When the first of the server's certificates, its clients' CA among them, ends.",
            0.0 if self._tls is None else self._tls.first_end,
        )
        if service is not None:
            result["watchers"] = ("Streams of Watch.", len(service.watches))
            result["stream_bytes_in_flight"] = (
                "Bytes that running gRPC streams may hold.", service.streams.bytes_in_flight,
            )  # fmt: skip
        data, memory = self._data, self._memory
        if data is not None:
            result["data_connections"] = ("Data connections.", data.num_connections)
        if memory is not None:
            result["memory_connections"] = (
                "Connections that share memory.", memory.num_connections,
            )  # fmt: skip
        return result


def _check_exposure(settings: ServerSettings) -> None:
    """Raise TierConfigError if other machines could call without TLS or credentials."""
    has_credentials = not any(tenant.takes_anyone for tenant in settings.tenants)
    check_exposure(
        settings.host,
        has_tls=settings.tls is not None,
        has_credentials=has_credentials,
        insecure=settings.insecure,
    )


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_send_message_length", limits.max_message_bytes),
        ("grpc.max_allowed_incoming_connections", limits.max_connections),
        ("grpc.server_handshake_timeout_ms", int(limits.handshake_seconds * 1000)),
        ("grpc.max_concurrent_streams", limits.max_streams_per_connection),
        # Limits of calls not begun: beyond the first grpc ends some, beyond the second all.
        ("grpc.server.max_pending_requests", limits.max_calls),
        ("grpc.server.max_pending_requests_hard_limit", 2 * limits.max_calls),
        ("grpc.keepalive_time_ms", int(limits.keepalive_seconds * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_timeout_seconds * 1000)),
        ("grpc.http2.min_ping_interval_without_data_ms", int(limits.min_ping_seconds * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def _bind(server: Any, host: str, port: int, credentials: Any) -> int:
    """Bind the gRPC port and return its number. Raises TierConfigError."""
    address = host_port(host, port)
    try:
        if credentials is None:
            bound: int = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError as error:  # another process took the port after `check_free`
        raise TierConfigError(
            f"{address} cannot be opened ({error}); take another with --host and --port"
        ) from error
    return bound


def _add_reflection(server: Any) -> None:
    from grpc_reflection.v1alpha import reflection

    names = (SERVICE_NAME, "grpc.health.v1.Health", _REFLECTION)
    reflection.enable_server_reflection(names, server)
