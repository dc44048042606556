# SPDX-License-Identifier: Apache-2.0
"""`HttpProtocol`: one HTTP connection, with limits for request heads and for slow readers."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..api_errors import ApiError, encode_error
from .lingering_transport import LingeringTransport
from .stalled_reader import StalledReader

logger = logging.getLogger(__name__)

# The only path at which a request may become a websocket. Other paths ignore the header `Upgrade`.
PARTS_PATH = "/v1/completions/parts"

# Limit of a request head: the bytes of the request line and all headers, complete or not.
MAX_HEADER_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
# The time within which a client must read some of the bytes that wait for it. The kernel reports
# reading in large steps, so a shorter time would close slow connections.
STALL_SECONDS = 300.0
_INVALID = ApiError("this is no valid HTTP request; send HTTP/1.1", code="invalid_http")


class _BoundedHeads(h11.Connection):
    """An h11 connection that limits every request head. h11 itself limits only incomplete heads."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is not h11.IDLE:
            return super().next_event()
        before = len(self.trailing_data[0])
        event = super().next_event()
        if isinstance(event, h11.Request):
            size = before - len(self.trailing_data[0])
            if size > MAX_HEADER_BYTES:
                raise h11.RemoteProtocolError(
                    f"a head of {size} bytes; {MAX_HEADER_BYTES} are taken", error_status_hint=431
                )
        return event


class HttpProtocol(H11Protocol):
    """An HTTP connection, made by uvicorn, with limits on the time without progress.

    Without time limits, a client that sends no request head or half of a head would keep the
    connection open without end, and a client that does not read would keep its answer in memory.
    Bytes that are not HTTP are answered with an error object."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _BoundedHeads(h11.SERVER, MAX_HEADER_BYTES)

    _head_timer: asyncio.TimerHandle | None = None
    _reader: StalledReader
    _lingering: LingeringTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._lingering = LingeringTransport(transport, self._is_body_unread)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._reader = StalledReader(self.loop, transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """Process received bytes. HEAD_SECONDS limit the time until a request head is whole."""
        if self._lingering.lingers:
            return
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        self._reader.stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start to watch whether the client reads, because the write buffer is over its limit."""
        super().pause_writing()
        self._reader.start_watching(STALL_SECONDS)

    def resume_writing(self) -> None:
        """Stop watching whether the client reads, unless the connection is closing."""
        if not self.transport.is_closing():
            self._reader.stop_watching()
        super().resume_writing()

    def shutdown(self) -> None:
        """Close the connection when the server ends. A TLS close waits for a reply, which an idle
        client does not send, so the transport is aborted if no bytes wait to be sent."""
        super().shutdown()
        if self.scheme != "https" or not self.transport.is_closing():
            return
        try:
            is_told = not self.transport.get_write_buffer_size()
        except AttributeError:  # asyncio raises this for a lost connection
            return
        if is_told:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Close the idle connection, and watch whether the client reads the last bytes."""
        super().timeout_keep_alive_handler()
        self._reader.start_watching(STALL_SECONDS)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Make the connection a WebSocketProtocol, which also gets the bytes after the head."""
        super().handle_websocket_upgrade(event)
        early, _ = self.conn.trailing_data
        if early and not self.transport.is_closing():
            cast(asyncio.Protocol, self.transport.get_protocol()).data_received(early)

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP with an error object, as other errors are answered."""
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

    def _is_body_unread(self) -> bool:
        return self.conn.their_state is h11.SEND_BODY

    def _should_upgrade_to_ws(self) -> bool:
        is_socket_path = self.scope["path"] == PARTS_PATH and self.scope["method"] == "GET"
        return is_socket_path and super()._should_upgrade_to_ws()

    def _unsupported_upgrade_warning(self) -> None:
        logger.debug("a client asked for another protocol and is answered in HTTP")

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_watching()
        elif self._head_timer is None and not self.transport.is_closing():
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
