# SPDX-License-Identifier: Apache-2.0
"""`WebSocketProtocol`: one websocket, with limits on the bytes that wait in either direction."""

from __future__ import annotations

import asyncio
from asyncio.transports import BaseTransport
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame
from websockets.http11 import Request

from ..api_errors import ApiError, encode_error
from .http_protocol import STALL_SECONDS
from .incoming_bytes import INCOMING, IncomingBytes
from .stalled_reader import StalledReader

# Bytes that are parsed at a time. The smallest message has 6 bytes, so at most 682 messages wait
# for the application. Other connections are served between two pieces.
PIECE_BYTES = 4096
# Limit of the fragments of one message. `ws_max_size` limits bytes, so not empty fragments.
MAX_FRAGMENTS = 16384
TOO_MANY = "too_many_requests"  # the reason in a close frame with the code TRY_AGAIN_LATER
PING_SECONDS = 20.0
_NO_HANDSHAKE = ApiError(
    "the websocket's handshake cannot be read; send at most 128 headers, of 8192 bytes each",
    code="invalid_http",
)


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A websocket connection, which HttpProtocol makes for an upgrade request.

    Bytes are parsed piece by piece. Parsing stops while a message waits for the application or the
    client does not read answers, so a flood of frames costs only one read of the socket."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._unparsed = bytearray()
        self._incoming = IncomingBytes(self.loop.time)
        self._next_parse: asyncio.Handle | None = None
        self._is_blocked = False  # the write buffer is full, because the client does not read
        self._is_lost = False
        self._has_closed = False  # the application has closed the websocket

    def connection_made(self, transport: BaseTransport) -> None:
        """Take a connection over from HttpProtocol, which then passes the upgrade request."""
        super().connection_made(transport)
        self._reader = StalledReader(self.loop, cast(asyncio.Transport, transport))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._reader.stop_watching()
        self._unparsed.clear()
        self._incoming.drop_all()
        if self._next_parse is not None:
            self._next_parse.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes. In the first call, `data` is the whole upgrade request."""
        if self.handshake_initiated:
            self._unparsed += data
            self._parse()
            return
        super().data_received(data)
        if not self.handshake_initiated and not self.transport.is_closing():
            self._refuse_handshake()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message. After the last waiting message, parsing continues."""
        message = await super().receive()
        if self.queue.empty():
            self._incoming.take_messages()
        self._parse_soon()
        return message

    async def send(self, message: Any) -> None:
        """Send a message once the write buffer has room. After a close message, the client's bytes
        are parsed and dropped until the client's own close frame. Raises ClientDisconnected if the
        connection was closed because of the client's error."""
        if self.close_sent and not self._has_closed:
            raise ClientDisconnected
        if message["type"] == "websocket.close":
            self._has_closed = True
        await super().send(message)
        if self._has_closed:
            self._parse_soon()
        elif message["type"] == "websocket.http.response.body" and self.close_sent:
            self.handshake_complete = True  # else uvicorn would log a refused handshake as an error

    def pause_writing(self) -> None:
        """Stop parsing, as each ping would add a pong, and watch whether the client reads."""
        super().pause_writing()
        self._is_blocked = True
        self._set_reading()
        self._reader.start_watching(STALL_SECONDS)

    def resume_writing(self) -> None:
        """Continue parsing, and stop watching the client unless the connection is closing."""
        super().resume_writing()
        self._is_blocked = False
        if not self.transport.is_closing():
            self._reader.stop_watching()
        self._parse_soon()

    def shutdown(self) -> None:
        """End the connection when the server ends; a running answer may finish, as with HTTP."""
        if self.close_sent or not self.handshake_initiated:
            super().shutdown()

    def on_task_complete(self, task: asyncio.Task[None]) -> None:
        """Watch whether the client reads the last bytes, after the application has ended."""
        super().on_task_complete(task)
        if not self._is_lost and self._reader.num_waiting:
            self._reader.start_watching(STALL_SECONDS)

    def keepalive_timeout(self) -> None:
        """Abort the connection of a client that sent no pong: it would not read a close frame."""
        super().keepalive_timeout()
        self.transport.abort()

    def handle_connect(self, event: Request) -> None:
        """Process the handshake, and add IncomingBytes to the application's ASGI scope."""
        super().handle_connect(event)
        if not self.close_sent:
            cast(dict[str, Any], self.scope["extensions"])[INCOMING] = self._incoming

    def handle_text(self, event: Frame) -> None:
        self._incoming.add_frame(len(event.data))
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._incoming.add_frame(len(event.data))
        super().handle_bytes(event)

    def handle_cont(self, event: Frame) -> None:
        """Count a further fragment. Close the websocket after more than MAX_FRAGMENTS fragments."""
        if self.close_sent:
            return
        self._incoming.add_frame(len(event.data))
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(
                CloseCode.MESSAGE_TOO_BIG, f"a message has more than {MAX_FRAGMENTS} fragments"
            )
            return
        super().handle_cont(event)

    def send_receive_event_to_app(self) -> None:
        """Queue a whole message for the application. Refuse a text that is not UTF-8."""
        self._incoming.end_message(is_kept=not self.close_sent)
        if self.curr_msg_data_type == "text" and not self.close_sent:
            self.frames = [b"".join(self.frames)]
            try:
                self.frames[0].decode()
            except UnicodeDecodeError as error:
                self.frames = []
                self._fail(CloseCode.INVALID_DATA, f"no UTF-8 at byte {error.start}")
                return
        super().send_receive_event_to_app()

    @property
    def _must_wait(self) -> bool:
        return self._is_blocked or self.read_paused

    def _parse_soon(self) -> None:
        if self._next_parse is None and not self._is_lost:
            self._next_parse = self.loop.call_soon(self._parse)

    def _parse(self) -> None:
        """Parse one piece of the received bytes. After the last piece, read the socket again."""
        if self._next_parse is not None:
            self._next_parse.cancel()
            self._next_parse = None
        if self.transport.is_closing():
            self._unparsed.clear()
            return
        if self._unparsed and not self._must_wait:
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            super().data_received(piece)
            self._bound_incoming()
        if self._unparsed and not self._must_wait:
            self._parse_soon()
        self._set_reading()

    def _bound_incoming(self) -> None:
        if self.transport.is_closing() or self._incoming.measure(len(self.conn.reader.buffer)):
            return
        self.frames = []
        self._incoming.drop_all()
        if self.close_sent:  # a close frame was sent already
            self.transport.abort()
        else:
            self._fail(CloseCode.TRY_AGAIN_LATER, TOO_MANY)

    def _set_reading(self) -> None:
        if self.transport.is_closing():
            return
        if self._unparsed or self._must_wait:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _fail(self, code: CloseCode, reason: str) -> None:
        self.conn.fail(code, reason)
        self.handle_parser_exception()

    def _refuse_handshake(self) -> None:
        body = encode_error(_NO_HANDSHAKE)
        head = (
            f"HTTP/1.1 {_NO_HANDSHAKE.status} Bad Request\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
