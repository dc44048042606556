# SPDX-License-Identifier: Apache-2.0
"""grpc.health.v1: SERVING until the server drains, then NOT_SERVING.

Health replaces the servicer of grpc's package, in which a watcher that does not read delays every
change of the status. The service needs no credentials, so Health limits the number of calls and the
time in which a request must arrive."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from ..wire.frames import WireError
from ..wire.rpc import only, stream_handler

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_WATCHERS, MAX_CHECKS = 32, 64
_REQUEST_SECONDS = 2.0
_Status = health_pb2.HealthCheckResponse


class Health:
    """Reports the status of the services `names`, and of the whole server under the empty name."""

    def __init__(self, *names: str) -> None:
        self._names = frozenset(("", *names))
        self._is_serving = True
        self._changed = asyncio.Event()
        self._watchers = 0
        self._checks = 0

    def handler(self) -> Any:
        """Return the handler for `grpc.aio.Server.add_generic_rpc_handlers`."""
        codec = {
            "request_deserializer": health_pb2.HealthCheckRequest.FromString,
            "response_serializer": _Status.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": stream_handler(self._check, server_streaming=False, **codec),
                "Watch": stream_handler(self._watch, server_streaming=True, **codec),
            },
        )

    def enter_graceful_shutdown(self) -> None:
        """Report NOT_SERVING from now on, and end each watcher's stream after this report."""
        self._is_serving = False
        self._changed.set()

    async def _check(self, requests: Any, context: Any) -> Any:
        if self._checks >= MAX_CHECKS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many ask; ask again")
        self._checks += 1
        try:
            request = await _only(requests, context)
        finally:
            self._checks -= 1
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "the server has no such service")
        return self._status(request.service)

    async def _watch(self, requests: Any, context: Any) -> None:
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; use Check")
        self._watchers += 1
        try:
            request = await _only(requests, context)
            serving = self._is_serving
            await context.write(self._status(request.service))
            await self._changed.wait()
            if serving:
                await context.write(self._status(request.service))
        finally:
            self._watchers -= 1

    def _status(self, name: str) -> Any:
        if name not in self._names:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if self._is_serving else _Status.NOT_SERVING)


async def _only(requests: Any, context: Any) -> Any:
    try:
        return await only(requests, _REQUEST_SECONDS)
    except (TimeoutError, WireError):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the call came without its request")
