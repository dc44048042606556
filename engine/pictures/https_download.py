# SPDX-License-Identifier: Apache-2.0
"""`download`: one GET request over TLS to an address that the caller has checked.

Only an answer 200 without compression and with a body within the limit is accepted; a redirect is
refused. The request uses no proxy from the environment, and sends no cookie or key."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from typing import NamedTuple

import h11

from .picture_errors import PictureError

HTTPS_PORT = 443
MAX_HEADER_BYTES = 32 * 1024
# Limit of the chunks of a body, because each chunk takes time on the event loop.
MAX_BODY_PARTS = 32_768
_READ_BYTES = 16 * 1024
_SHOWN_CHARACTERS = 60


class Place(NamedTuple):
    """The parts of an https URL."""

    host: str
    port: int
    target: str  # the path and query of the URL

    @property
    def authority(self) -> str:
        return self.host if self.port == HTTPS_PORT else f"{self.host}:{self.port}"


async def download(
    place: Place,
    addresses: Sequence[str],
    tls: ssl.SSLContext,
    *,
    max_bytes: int,
    connect_seconds: float,
) -> bytes:
    """Return the body at `place`, from the first of `addresses` that accepts a connection. Raises
    PictureError. The caller must limit the total time."""
    reader, writer = await _connect(place, addresses, tls, connect_seconds)
    try:
        return await _get(place, reader, writer, max_bytes)
    except (OSError, asyncio.IncompleteReadError, h11.ProtocolError) as error:
        raise PictureError(
            f"{place.authority} broke off or sent no proper answer ({_in_short(error)}); send the "
            "picture as a data: URL"
        ) from error
    finally:
        writer.transport.abort()


async def _connect(
    place: Place, addresses: Sequence[str], tls: ssl.SSLContext, seconds: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reason = "no address"
    try:
        async with asyncio.timeout(seconds):
            for address in addresses:
                try:
                    return await asyncio.open_connection(
                        address,
                        place.port,
                        ssl=tls,
                        server_hostname=place.host,
                        limit=_READ_BYTES,
                    )
                except (OSError, ValueError) as error:  # an invalid certificate raises an OSError
                    reason = _in_short(error)
    except TimeoutError:
        reason = f"not within {seconds:g} s"
    raise PictureError(
        f"{place.authority} cannot be connected to over TLS ({reason}); send the picture as a "
        "data: URL"
    )


async def _get(
    place: Place, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, max_bytes: int
) -> bytes:
    connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
    request = h11.Request(
        method="GET",
        target=place.target,
        headers=[
            ("Host", place.authority),
            ("User-Agent", "stratakv"),
            ("Accept", "image/png, image/jpeg, image/webp, image/gif"),
            ("Accept-Encoding", "identity"),
            ("Connection", "close"),
        ],
    )
    head = connection.send(request) or b""
    writer.write(head + (connection.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    body = bytearray()
    num_parts = num_received = 0
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            received = await reader.read(_READ_BYTES)
            num_received += len(received)
            # The received bytes also include informational answers and the framing of chunks.
            if num_received > 2 * max_bytes + MAX_HEADER_BYTES:
                raise _too_large(place, max_bytes)
            connection.receive_data(received)
        elif isinstance(event, h11.Response):
            _check_answer(place, event, max_bytes)
        elif isinstance(event, h11.Data):
            num_parts += 1
            if len(body) + len(event.data) > max_bytes or num_parts > MAX_BODY_PARTS:
                raise _too_large(place, max_bytes)
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            return bytes(body)
        elif not isinstance(event, h11.InformationalResponse):
            raise PictureError(
                f"{place.authority} closed the connection without an answer; send the picture as "
                "a data: URL"
            )


def _check_answer(place: Place, answer: h11.Response, max_bytes: int) -> None:
    """Raise PictureError unless the answer is an uncompressed 200 with a body within the limit."""
    status = answer.status_code
    if 300 <= status < 400:
        raise PictureError(
            f"{place.authority} answered {status}, and redirects are not followed; give the URL "
            "to which it leads"
        )
    if status != 200:
        raise PictureError(f"{place.authority} answered {status}, not 200; check the URL")
    for name, value in answer.headers:
        if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
            raise PictureError(
                f"{place.authority} sent a compressed body, which was not asked for; send the "
                "picture as a data: URL"
            )
        if name == b"content-length" and int(value) > max_bytes:
            raise _too_large(place, max_bytes)


def _too_large(place: Place, max_bytes: int) -> PictureError:
    return PictureError(
        f"{place.authority} sends more than {max_bytes} bytes or sends them in more than "
        f"{MAX_BODY_PARTS} parts; give the URL of a smaller picture"
    )


def _in_short(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"certificate: {error.verify_message}"[:_SHOWN_CHARACTERS]
    return type(error).__name__
