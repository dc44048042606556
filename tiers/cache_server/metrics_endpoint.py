# SPDX-License-Identifier: Apache-2.0
"""An HTTP server for GET /metrics, which accepts few connections and one small request on each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ..errors import TierConfigError
from ..wire.listen import explain_bind, host_in, is_loopback, is_no_foreign_name

log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 16
_MAX_HEAD_BYTES = 8192
_SECONDS = 5.0
_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricsEndpoint:
    """The HTTP server of /metrics. Call `start`, then `close`, on one event loop."""

    def __init__(self, exposition: Callable[[], bytes]) -> None:
        self._exposition = exposition
        self._is_checking_hosts = False
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises TierConfigError if the port cannot be opened."""
        try:
            self._server = await asyncio.start_server(
                self._connected, host, port, limit=_MAX_HEAD_BYTES
            )
        except OSError as error:
            raise TierConfigError(explain_bind(error, host, port, "--metrics-port")) from error
        # On loopback, a web page whose host name resolves to this machine could read the metrics.
        self._is_checking_hosts = is_loopback(host)
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stop listening, and end open connections. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.transport.abort()
            return
        self._connections.add(task)
        try:
            async with asyncio.timeout(_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._handle_request(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError) as error:
            log.debug("a connection for metrics ended: %r", error)
            writer.transport.abort()
        finally:
            self._connections.discard(task)

    async def _handle_request(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path != b"/metrics":
            return _response("404 Not Found", b"only /metrics is here\n")
        if self._is_checking_hosts and not is_no_foreign_name(_host_of(head)):
            return _response("403 Forbidden", b"call this server by its address, or localhost\n")
        if method not in (b"GET", b"HEAD"):
            return _response("405 Method Not Allowed", b"use GET\n")
        body = await asyncio.to_thread(self._exposition)
        return _response("200 OK", body, with_body=method == b"GET")


def _host_of(head: bytes) -> str:
    """Return the host in the header Host, which every browser sends; without it, localhost."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"host":
            return host_in(value.strip())
    return "localhost"


def _response(status: str, body: bytes, *, with_body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {_TYPE}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
