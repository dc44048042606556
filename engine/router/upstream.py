# SPDX-License-Identifier: Apache-2.0
"""An HTTP/1.1 request to a node, and the answer, which is read as fast as the client reads.

Every request has its own connection, so no request gets a kept-alive connection that the node has
just closed. If the router closes early, the node detects that the client has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

import h11

from .node_tls import NodeTls
from .router_settings import NodeAddress

Headers = Sequence[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024


class NodeError(Exception):
    """The request to a node failed. `outcome` is the value of the metrics' label `outcome`."""

    outcome = "failed"


class NodeUnreachable(NodeError):
    """The connection could not be made, so the node has not received the request."""

    outcome = "unreachable"


class NodeLost(NodeError):
    """The connection ended, or had invalid HTTP, before the answer was complete."""

    outcome = "lost"


class NodeSlow(NodeError):
    """The node sent no bytes within the router's time limit."""

    outcome = "timeout"


class BodyRest(Protocol):
    """The rest of a request body, which the client has not sent yet."""

    was_read: bool  # True: a part was passed on, so no other node can get the whole body

    async def read_more(self) -> bytes:
        """Return the body's next bytes, or b"" after the end. Raises ApiError and ClientGone."""

    def stop_reading(self) -> None:
        """Stop reading the body, because the node now answers."""

    def when_stopped(self, call: Callable[[float], None]) -> None:
        """Call `call` with the event loop's time when reading stops or has stopped."""


@dataclass(frozen=True, slots=True)
class NodeRequest:
    """A request to a node. `headers` must lack the headers that `write_request` adds."""

    method: bytes
    target: bytes
    headers: Headers = ()
    body: bytes = b""
    rest: BodyRest | None = None  # the bytes of the request body that follow `body`

    @property
    def was_relayed(self) -> bool:
        """Whether a node got bytes of the body that cannot be sent to another node."""
        return self.rest is not None and self.rest.was_read


class NodeAnswer:
    """A node's answer: status, headers, and the body in chunks. Only the kernel's buffers and one
    small buffer hold unread bytes, so a fast node with a slow client cannot fill the memory."""

    def __init__(self, connection: _Connection, head: h11.Response) -> None:
        self._connection = connection
        self.status = head.status_code
        self.headers: Headers = list(head.headers)
        names = {name for name, _ in self.headers}
        # True: the close ends the body, so a lost connection looks like the end of the answer.
        self.ends_by_closing = not names & {b"content-length", b"transfer-encoding"}
        self.is_chunked = b"transfer-encoding" in names

    @property
    def content_type(self) -> str:
        """The content type without parameters, in lower case; empty if there is none."""
        for name, value in self.headers:
            if name == b"content-type":
                return value.partition(b";")[0].strip().lower().decode("latin-1")
        return ""

    async def read_chunk(self) -> bytes:
        """Return received bytes of the body, or b"" after the end. Raises NodeLost or NodeSlow."""
        chunk = bytearray()
        while not self._connection.is_finished:
            event = self._connection.ready_event() if chunk else await self._connection.read_event()
            if not isinstance(event, h11.Data):
                self._connection.is_finished = isinstance(event, h11.EndOfMessage)
                break
            chunk += event.data
        return bytes(chunk)

    async def read_whole(self, limit: int) -> bytes:
        """Return the whole body. Raises NodeLost for a body of more than `limit` bytes."""
        body = bytearray()
        while chunk := await self.read_chunk():
            body += chunk
            if len(body) > limit:
                raise NodeLost(f"its answer is longer than {limit} bytes")
        return bytes(body)


class _Connection:
    """A connection to a node. A read of an HTTP event waits for bytes at most `wait_seconds`."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wait_seconds: float
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._wait_seconds = wait_seconds
        self._is_sending = False  # True: the body is being sent, so `wait_seconds` does not apply
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        self.is_finished = False

    async def write_request(self, address: NodeAddress, request: NodeRequest) -> None:
        headers = [(b"host", address.authority.encode()), *request.headers]
        headers.append((b"connection", b"close"))
        if request.rest is not None:
            headers.append((b"transfer-encoding", b"chunked"))
        elif request.body or request.method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            headers.append((b"content-length", str(len(request.body)).encode()))
        try:
            head = h11.Request(method=request.method, target=request.target, headers=headers)
        except h11.LocalProtocolError as error:
            raise NodeLost(f"the request cannot be passed on: {error}") from error
        self._writer.write(self._http.send(head) or b"")
        if request.body:
            self._writer.write(self._http.send(h11.Data(data=request.body)) or b"")
        if request.rest is None:
            self._http.send(h11.EndOfMessage())
        # A node may answer and close the connection before it has read the whole request.
        with suppress(ConnectionError):
            await self._drain()

    async def write_rest(self, rest: BodyRest) -> h11.Response:
        """Send each part of `rest` when it arrives. Return the head of the answer, which may come
        before the end of the body. Raises NodeLost, NodeSlow, and the errors of `rest`."""
        self._is_sending = True
        sending = asyncio.ensure_future(self._send_rest(rest))
        reading = asyncio.ensure_future(self.read_head())
        try:
            await asyncio.wait((sending, reading), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                sending.result()
                await asyncio.wait((reading,), timeout=self._wait_seconds)
                if not reading.done():
                    raise NodeSlow(f"sent nothing for {self._wait_seconds:g} s")
            return reading.result()
        finally:
            for each in (sending, reading):
                each.cancel()
            await asyncio.gather(sending, reading, return_exceptions=True)
            self._is_sending = False

    async def _send_rest(self, rest: BodyRest) -> None:
        while chunk := await rest.read_more():
            self._writer.write(self._http.send(h11.Data(data=chunk)) or b"")
            try:
                await self._drain()
            except ConnectionError:  # the node may have answered before it closed the connection
                return
        self._writer.write(self._http.send(h11.EndOfMessage()) or b"")

    async def _drain(self) -> None:
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._writer.drain()
        except TimeoutError:
            raise NodeSlow(f"did not take the request in {self._wait_seconds:g} s") from None

    async def read_head(self) -> h11.Response:
        """Return the head of the answer. Informational (1xx) responses before it are dropped."""
        while True:
            event = await self.read_event()
            if isinstance(event, h11.Response):
                if event.status_code > 599:
                    raise NodeLost(f"answered with the status {event.status_code}")
                return event
            if not isinstance(event, h11.InformationalResponse):
                raise NodeLost("closed the connection without an answer")

    async def read_event(self) -> h11.Event:
        """Return the next HTTP event. Raises NodeLost or NodeSlow."""
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise NodeLost(f"the connection ended or held no HTTP ({error})") from None
            if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise NodeLost("closed the connection")
            if event is not h11.NEED_DATA:
                assert isinstance(event, h11.Event)
                return event
            self._http.receive_data(await self._read_bytes())

    def ready_event(self) -> h11.Event | None:
        """Return the next HTTP event if it is received, else None; leave errors to `read_event`."""
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError:
            return None  # the next call of `read_event` raises the error
        return event if isinstance(event, h11.Event) else None

    async def _read_bytes(self) -> bytes:
        try:
            async with asyncio.timeout(None if self._is_sending else self._wait_seconds):
                return await self._reader.read(_READ_BYTES)
        except TimeoutError:
            raise NodeSlow(f"sent nothing for {self._wait_seconds:g} s") from None
        except OSError as error:
            raise NodeLost(f"the connection was lost ({error})") from error


@asynccontextmanager
async def exchange(
    address: NodeAddress,
    request: NodeRequest,
    *,
    connect_seconds: float,
    wait_seconds: float,
    tls: NodeTls | None = None,
    transports: set[asyncio.WriteTransport] | None = None,
) -> AsyncIterator[NodeAnswer]:
    """Send a request, and yield the answer once its head has arrived. The connection is closed at
    the end of the block, or aborted if the answer was not read to its end. During the block,
    `transports` contains the connection's transport; if it is aborted, reads raise NodeLost."""
    context = None
    if address.is_tls:
        assert tls is not None  # an https address never gets a plain connection
        context = tls.context()
    try:
        async with asyncio.timeout(connect_seconds):
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
    except TimeoutError:
        raise NodeUnreachable(f"no connection in {connect_seconds:g} s") from None
    except (OSError, UnicodeError) as error:
        raise NodeUnreachable(f"no connection ({error})") from error
    open_ones = set() if transports is None else transports
    open_ones.add(writer.transport)
    connection = _Connection(reader, writer, wait_seconds)
    try:
        await connection.write_request(address, request)
        if request.rest is None:
            head = await connection.read_head()
        else:
            head = await connection.write_rest(request.rest)
        yield NodeAnswer(connection, head)
    finally:
        open_ones.discard(writer.transport)
        if connection.is_finished:
            writer.close()
        else:
            writer.transport.abort()
