# SPDX-License-Identifier: Apache-2.0
"""One HTTP connection: uvicorn's, with a limit on the time that a request's head may take.

A client that opens a connection and says nothing, or half a head, would hold it for ever. What is
no HTTP at all is answered with an error object, as every other fault is. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from .errors import ApiError, encode_error

HEAD_SECONDS = 30.0

_INVALID = ApiError("this is no valid HTTP request; send HTTP/1.1", code="invalid_http")


class HttpProtocol(H11Protocol):
    """Given to uvicorn, which makes one for each connection."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from here on."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """The time runs until the head is whole; the body has a limit of its own."""
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_watching()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """In the form of every other error."""
        body = encode_error(_INVALID)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=_INVALID.status, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
