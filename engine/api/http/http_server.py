# SPDX-License-Identifier: Apache-2.0
"""`HttpServer`: uvicorn, with additional limits and time-outs.

The server's sockets are bound before the model is loaded, so a port in use is reported early."""

from __future__ import annotations

import math
import socket
import ssl

import uvicorn
from starlette.types import ASGIApp

from ....tiers.settings.values import MIB
from .http_protocol import MAX_HEADER_BYTES, STALL_SECONDS, HttpProtocol
from .websocket_protocol import PING_SECONDS, WebSocketProtocol

KEEP_ALIVE_SECONDS = 75  # longer than most load balancers wait, so that the balancer closes first
BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """The HTTP server. `serve(sockets)` runs it, and `should_exit = True` ends it gracefully."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        for sock in sockets or ():
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                # Accepted sockets inherit TCP_NODELAY from the listening socket; asyncio does not
                # set the option here. Without TCP_NODELAY tokens wait 40 ms for a delayed ACK.
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().serve(sockets)


def make_server(
    app: ASGIApp,
    *,
    log_level: str,
    shutdown_seconds: float,
    tls: ssl.SSLContext | None = None,
    max_message_bytes: int = 16 * MIB,
) -> HttpServer:
    """Return a server that does not run yet. `log_level` is one of uvicorn's names; at `info` the
    caller, not the server, logs the server's start and end. At shutdown, running requests have
    `shutdown_seconds` to finish. With `tls`, from `make_tls_context`, the server accepts only
    https. A websocket message has at most `max_message_bytes`; compressed messages are refused,
    because a few bytes could expand to that size."""
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws=WebSocketProtocol,
        ws_max_size=max_message_bytes,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=STALL_SECONDS,
        ws_per_message_deflate=False,
        lifespan="off",
        log_level="warning" if log_level == "info" else log_level,
        access_log=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=max(1, math.ceil(shutdown_seconds)),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        server_header=False,
        ssl_context_factory=None if tls is None else lambda config, default: tls,
    )
    return HttpServer(config)
