# SPDX-License-Identifier: Apache-2.0
"""`PictureSources`: reads the bytes of a picture from a `data:` URL or an allowed host.

A URL of another host is refused. The name of an allowed host is resolved once. A host with an
address that is not public is refused; else the picture is fetched from a checked address."""

from __future__ import annotations

import asyncio
import binascii
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from .https_download import HTTPS_PORT, Place, download
from .picture_errors import PictureError
from .picture_file import MAX_PICTURE_BYTES
from .public_address import is_public_address

MAX_URL_CHARACTERS = 8192
MAX_FETCHES = 8  # downloads at the same time; more downloads wait
MAX_DIALLED = 4  # addresses of a host that are tried
CONNECT_SECONDS = 3.0
TOTAL_SECONDS = 10.0
_SHOWN_CHARACTERS = 60
_DATA_START = re.compile(r"data:image/[a-z0-9.+-]{1,40};base64,", re.IGNORECASE)
_HTTPS = re.compile(
    r"https://(?P<host>[^\s/?#:@\\\[\]%]{1,253})(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[A-Za-z0-9._~:/@!$&'()*+,;=%|-]*)?(?P<query>\?[A-Za-z0-9._~:/?@!$&'()*+,;=%|-]*)?"
    r"(?:#[!-~]*)?",
    re.IGNORECASE,
)
_HOST = re.compile(r"[a-z0-9_](?:[a-z0-9._-]*[a-z0-9])?")

# Threads for name resolution only, because a name server that does not answer blocks a thread.
_RESOLVERS = ThreadPoolExecutor(4, thread_name_prefix="resolve")

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Return the IP addresses of a host, with the IPv6 zone if any. Raises OSError."""
    ask = partial(socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, ask)
    addresses = []
    for family, _, _, _, end in found:
        text = str(end[0])
        if family == socket.AF_INET6 and len(end) == 4 and end[3] and "%" not in text:
            text = f"{text}%{end[3]}"
        addresses.append(text)
    return list(dict.fromkeys(addresses))


def host_as_ascii(host: str) -> str:
    """Return a host's name in the ASCII form of DNS and in lower case. Raises ValueError."""
    name = host.encode("idna").decode("ascii").lower().removesuffix(".")
    if not _HOST.fullmatch(name) or ".." in name:
        raise ValueError(f"{host[:_SHOWN_CHARACTERS]!r} is no name of a host")
    return name


def bytes_of_data_url(url: str, max_bytes: int = MAX_PICTURE_BYTES) -> bytes:
    """Return the bytes of a `data:image/...;base64,` URL. Raises PictureError."""
    found = _DATA_START.match(url)
    if found is None:
        raise PictureError(
            "its data: URL does not begin as data:image/png;base64, does; give the type of the "
            "picture and its bytes in base64"
        )
    num_characters = len(url) - found.end()
    if num_characters > (max_bytes + 2) // 3 * 4:
        raise PictureError(
            f"its data: URL has {num_characters} characters for more than {max_bytes} bytes; send "
            "a smaller picture"
        )
    try:
        # The strict mode of a2b_base64 would accept padding after whole groups, so this is checked.
        if num_characters % 4 or url.endswith("==="):
            raise ValueError("wrong padding")
        data = binascii.a2b_base64(url[found.end() :], strict_mode=True)
    except ValueError as error:  # binascii.Error, or a character that is not ASCII
        raise PictureError(
            f"its data: URL holds no strict base64 ({str(error)[:_SHOWN_CHARACTERS]}); use the "
            "standard alphabet with padding, without line breaks"
        ) from None
    if not data or len(data) > max_bytes:
        raise PictureError(
            f"its data: URL holds {len(data)} bytes, and 1 to {max_bytes} are read; send another "
            "picture"
        )
    return data


class PictureSources:
    """Reads pictures from URLs. `domains` are the allowed hosts, with `:port` if not 443."""

    def __init__(
        self,
        domains: Sequence[str] = (),
        *,
        max_bytes: int = MAX_PICTURE_BYTES,
        connect_seconds: float = CONNECT_SECONDS,
        total_seconds: float = TOTAL_SECONDS,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve = resolve_host,
        is_allowed_address: Callable[[str], bool] = is_public_address,
    ) -> None:
        self._domains = frozenset(_host_and_port(domain) for domain in domains)
        self._max_bytes = max_bytes
        self._connect_seconds = connect_seconds
        self._total_seconds = total_seconds
        self._tls = tls
        self._resolve = resolve
        self._is_allowed_address = is_allowed_address
        self._turns = asyncio.Semaphore(MAX_FETCHES)

    async def read_picture(self, url: str) -> bytes:
        """Return the unchecked bytes of the picture at a URL. Raises PictureError."""
        if url[:5].lower() == "data:":
            return bytes_of_data_url(url, self._max_bytes)
        place = self._allowed_place(url)
        try:
            async with asyncio.timeout(self._total_seconds), self._turns:
                addresses = await self._checked_addresses(place)
                return await download(
                    place,
                    addresses,
                    self._tls_context(),
                    max_bytes=self._max_bytes,
                    connect_seconds=self._connect_seconds,
                )
        except TimeoutError:
            raise PictureError(
                f"{place.authority} did not send it within {self._total_seconds:g} s; send the "
                "picture as a data: URL"
            ) from None

    def _allowed_place(self, url: str) -> Place:
        """Return the parts of a URL whose host is allowed. Raises PictureError."""
        if not self._domains:
            raise PictureError(
                f"its URL begins with {url[:16]!r}, and this server fetches no pictures; send it "
                "as data:image/png;base64,..."
            )
        if len(url) > MAX_URL_CHARACTERS:
            raise PictureError(
                f"its URL has {len(url)} characters, and at most {MAX_URL_CHARACTERS} are read; "
                "give a shorter one"
            )
        found = _HTTPS.fullmatch(url)
        if found is None:
            raise PictureError(
                f"its URL {url[:_SHOWN_CHARACTERS]!r} is no https://host/path without a user's "
                "name; give such a URL, or the picture as data:image/png;base64,..."
            )
        try:
            host = host_as_ascii(found["host"])
        except ValueError:
            host = ""
        port = int(found["port"] or HTTPS_PORT)
        if (host, port) not in self._domains:
            raise PictureError(
                f"its URL leads to {found['host'][:_SHOWN_CHARACTERS]!r}, port {port}, from which "
                "this server fetches no pictures; send it as data:image/png;base64,..., or start "
                "the server with --media-domain and that host"
            )
        return Place(host, port, (found["path"] or "/") + (found["query"] or ""))

    async def _checked_addresses(self, place: Place) -> Sequence[str]:
        """Return the addresses of the host. Raises PictureError if an address is not allowed."""
        try:
            async with asyncio.timeout(self._connect_seconds):
                addresses = await self._resolve(place.host, place.port)
        except (OSError, UnicodeError):  # asyncio's TimeoutError is an OSError
            addresses = ()
        if not addresses:
            raise PictureError(f"{place.host} has no address; check the URL")
        if not all(self._is_allowed_address(address) for address in addresses):
            raise PictureError(
                f"{place.host} has an address that is not of the public internet, from which no "
                "picture is fetched; send it as data:image/png;base64,..."
            )
        return addresses[:MAX_DIALLED]

    def _tls_context(self) -> ssl.SSLContext:
        """Return the TLS context of all connections, made once, as reading authorities is slow."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _host_and_port(domain: str) -> tuple[str, int]:
    host, _, port = domain.partition(":")
    return host_as_ascii(host), int(port or HTTPS_PORT)
