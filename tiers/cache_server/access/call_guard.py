# SPDX-License-Identifier: Apache-2.0
"""CallGuard: the interceptor around every call, which authenticates the call, sets its deadline,
limits its tenant's calls, turns errors into a status of `wire/status.py`, and counts the call.

Calls of grpc.health.v1 need no credentials and are not intercepted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc

from ...wire.limits import Limits
from ...wire.rpc import METHODS, wrapped
from ...wire.status import REASON_KEY, Draining, Ending, TooMuch, ending_of
from ..server_metrics import ServerMetrics
from .auth import Authenticator, set_caller
from .call_connections import CallConnections
from .shares import Shares
from .tenants import Tenants

log = logging.getLogger(__name__)

_OPEN_PREFIX = "/grpc.health.v1.Health/"

_LOOK_SECONDS = 0.01  # between two checks for running calls, while the server drains

# Calls that run until their clients end them.
_ENDLESS = frozenset(method.path for method in METHODS if method.name == "Watch")


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Intercepts calls. Reports a call's tenant to `connections` and its outcome to `metrics`."""

    def __init__(
        self,
        tenants: Tenants,
        limits: Limits,
        connections: CallConnections,
        metrics: ServerMetrics,
    ) -> None:
        self._authenticator = Authenticator(tenants)
        self._call_seconds = limits.call_seconds
        self._connections = connections
        self._metrics = metrics
        self._shares = Shares(limits.max_calls, len(tenants))
        self._draining = False
        self._running = 0

    @property
    def running(self) -> int:
        return self._running

    def set_tenants(self, tenants: Tenants) -> None:
        """Admit only calls of `tenants` from now on. Running calls continue."""
        self._shares.set_tenants(len(tenants))
        self._authenticator.set_tenants(tenants)

    def refuse_new_calls(self) -> None:
        self._draining = True

    async def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no call runs. Return False if a call still runs after `seconds`."""
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(_LOOK_SECONDS)
        return not self._running

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Wrap the handler of a call with `_around`. grpc calls this method for each call."""
        handler = await continuation(handler_call_details)
        path: str = handler_call_details.method
        if handler is None or path.startswith(_OPEN_PREFIX):
            return handler
        return wrapped(handler, path, self._around)

    @asynccontextmanager
    async def _around(self, path: str, context: Any) -> AsyncIterator[None]:
        began = time.monotonic()
        code = grpc.StatusCode.OK
        self._running += 1
        try:
            caller = self._authenticator.caller_of(
                context.invocation_metadata() or (), context.auth_context() or {}
            )
            set_caller(caller)
            tenant = caller.tenant
            self._connections.note_tenant(context.peer(), tenant.name)
            if self._draining:
                raise Draining("the server is going down")
            with self._a_place_of(tenant.name):
                async with asyncio.timeout(self._seconds(path, context)):
                    yield
        except asyncio.CancelledError:
            code = grpc.StatusCode.CANCELLED
            raise
        except grpc.aio.InternalError as error:
            # The client has closed the call before the answer was written.
            code = grpc.StatusCode.CANCELLED
            raise asyncio.CancelledError(f"{path}: the client has left") from error
        except Exception as error:  # noqa: BLE001 - the border: every error becomes a status
            ending = ending_of(error)
            code = ending.code
            _log(path, error, ending)
            await _end_call(context, ending)
        finally:
            self._running -= 1
            self._metrics.call_ended(path, code.name, time.monotonic() - began)

    @contextmanager
    def _a_place_of(self, tenant: str) -> Iterator[None]:
        if not self._shares.take_place(tenant):
            raise TooMuch(f"{self._shares.places_of(tenant)} calls of {tenant} run already")
        try:
            yield
        finally:
            self._shares.give_back_place(tenant)

    def _seconds(self, path: str, context: Any) -> float | None:
        if path in _ENDLESS:
            return None
        remaining: float | None = context.time_remaining()
        return self._call_seconds if remaining is None else min(remaining, self._call_seconds)


async def _end_call(context: Any, ending: Ending) -> None:
    """Send the call's status. Raises CancelledError if the client has closed the call."""
    reason = ((REASON_KEY, ending.reason),)
    try:
        await context.abort(ending.code, ending.message, trailing_metadata=reason)
    except grpc.aio.InternalError as error:
        raise asyncio.CancelledError("the client has left") from error


def _log(path: str, error: Exception, ending: Ending) -> None:
    """Log an internal error with its traceback, and any other error at debug level."""
    if ending.code is grpc.StatusCode.INTERNAL:
        log.error("%s failed", path, exc_info=error)
    else:
        log.debug("%s ended with %s: %s", path, ending.code.name, ending.message)
