# SPDX-License-Identifier: Apache-2.0
"""HttpProtocol: one connection, with limits on its heads and on a reader that stalls."""

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

# The only path at which a request may become a websocket. Elsewhere `Upgrade` is ignored.
PARTS_PATH = "/v1/completions/parts"

# Limit on the request line and all headers together, also before they are complete.
MAX_HEADER_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
# Within it a client must take something of what waits for it. The kernel tells of a reader in large
# steps, so a shorter time would cut slow ones off.
STALL_SECONDS = 300.0
_INVALID = ApiError("this is no valid HTTP request; send HTTP/1.1", code="invalid_http")


class _BoundedHeads(h11.Connection):
    """h11 counts what has not become a whole head yet, and not one that comes at once."""

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
    """One HTTP connection, made by uvicorn, with limits on the time that it may stand still.

    Otherwise a client that sends nothing or half a head would hold the connection for ever, and one
    that reads nothing would hold its answer in memory as well. Bytes that are not HTTP are answered
    with an error object.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.conn = _BoundedHeads(h11.SERVER, MAX_HEADER_BYTES)

    _head_timer: asyncio.TimerHandle | None = None
    _reader: StalledReader
    _lingering: LingeringTransport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head is awaited from here on."""
        self._lingering = LingeringTransport(transport, self._is_body_unread)
        super().connection_made(cast(asyncio.Transport, self._lingering))
        self._reader = StalledReader(self.loop, transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """The time runs until the head is whole; the body has a limit of its own."""
        if self._lingering.lingers:
            return
        super().data_received(data)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._stop_watching()
        self._reader.stop_watching()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More waits to be read than the transport likes, so the reader is watched from here on."""
        super().pause_writing()
        self._reader.start_watching(STALL_SECONDS)

    def resume_writing(self) -> None:
        """Nearly everything was read. A connection that closes waits for the rest as well."""
        if not self.transport.is_closing():
            self._reader.stop_watching()
        super().resume_writing()

    def shutdown(self) -> None:
        """The server ends. With TLS a connection closes when the client says so too, which one that
        is idle does not; it has been told, so nothing more is waited for."""
        super().shutdown()
        if self.scheme != "https" or not self.transport.is_closing():
            return
        try:
            is_told = not self.transport.get_write_buffer_size()
        except AttributeError:  # asyncio's, of a connection that is lost and not yet told so here
            return
        if is_told:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """The connection closes, once the last of what was written has been read."""
        super().timeout_keep_alive_handler()
        self._reader.start_watching(STALL_SECONDS)

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Hand the connection over, with what came right behind the head."""
        super().handle_websocket_upgrade(event)
        early, _ = self.conn.trailing_data
        if early and not self.transport.is_closing():
            cast(asyncio.Protocol, self.transport.get_protocol()).data_received(early)

    def send_400_response(self, msg: str) -> None:
        """Answer in the form of every other error."""
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
