# SPDX-License-Identifier: Apache-2.0
"""URLs of pictures: what is taken, what is refused, and that no forbidden address is dialled."""

from __future__ import annotations

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import trustme

from stratakv.engine.pictures.https_download import MAX_BODY_PARTS, MAX_HEADER_BYTES
from stratakv.engine.pictures.picture_errors import PictureError
from stratakv.engine.pictures.picture_sources import (
    PictureSources,
    bytes_of_data_url,
    resolve_host,
)
from stratakv.engine.pictures.public_address import is_public_address

BODY = b"\x89PNG and some more bytes" * 100
HOST = "pictures.example.org"
PUBLIC = "93.184.215.14"
MAX_BYTES = 100_000
AUTHORITY = trustme.CA()

REFUSED_URLS = (
    "", " ", "x", "file:///etc/passwd", "ftp://good.example/a", "gopher://good.example/",
    "http://good.example/a.png", "HTTP://good.example/a.png", "//good.example/a.png",
    "https:good.example/a", "https:/good.example/a", "https:///a.png", "https://",
    "https://evil.example/a.png", "https://good.example.evil.example/a.png",
    "https://evil.example/good.example", "https://evil.example#good.example/",
    "https://evil.example?good.example/", "https://evil.example\\@good.example/",
    "https://good.example@evil.example/a.png", "https://user@good.example/a.png",
    "https://user:secret@good.example/a.png", "https://@good.example/a.png",
    "https://good.example:secret@evil.example/", "https://good.example:80/a.png",
    "https://good.example:444/", "https://good.example:0/", "https://good.example:65979/",
    "https://good.example:99999/", "https://good.example:/a", "https://good.example:443:443/",
    "https://good.example:\uff14\uff14\uff13/", "https://ported.example/", "https://ported.example:443/",
    "https://sub.good.example/", "https://good.example../", "https://.good.example/",
    "https://good..example/", "https://good.example%2eevil.example/", "https://%67ood.example/",
    "https://good.example\t/a", "https://good.example/\na", "https://good.example/a b",
    "https://good.example/a\r\nX: y", "\thttps://good.example/", " https://good.example/",
    "https://good.example\x00.evil.example/", "https://good.example/\x00", "https://go\u00adod.exam/",
    "https://127.0.0.1/", "https://2130706433/", "https://0x7f.1/", "https://0177.0.0.1/",
    "https://[::1]/", "https://[::ffff:127.0.0.1]/", "https://[fe80::1%25eth0]/",
    "https://localhost/", "https://metadata.google.internal/", "https://good.example/\u00e4",
    "https://good\u3002evil.example/", "https://" + "a" * 300 + "/", "https://xn--a/",
    "https://good.example/" + "a" * 9000, "javascript:alert(1)", "blob:https://good.example/1",
)  # fmt: skip
REFUSED_DATA = (
    "data:", "data:,", "data:image/png", "data:image/png;base64", "data:image/png;base64,",
    "data:image/png,abcd", "data:;base64,YWJj", "data:text/html;base64,YWJj",
    "data:image/png;charset=utf-8;base64,YWJj", "data:image/png ;base64,YWJj",
    "data:image/;base64,YWJj", "data: image/png;base64,YWJj", "data://image/png;base64,YWJj",
    "data:image/png;base64,YWJ", "data:image/png;base64,YWJjZA", "data:image/png;base64,YW Jj",
    "data:image/png;base64,YWJj\n", "data:image/png;base64,YW=j", "data:image/png;base64,YWJj=",
    "data:image/png;base64,YWJjZA==YWJj", "data:image/png;base64,YW-_",
    "data:image/png;base64,====", "data:image/png;base64,YWJj====", "data:image/png;base64,YWI==",
    "data:image/png;base64,YW%4Aj", "data:image/png;base64,YWJ\u00e4",
    "data:image/png;base64,YWJj\x00", "data:image/png;base64,YWJj\x00\x00\x00\x00",
    "data:" + "image/png" * 10_000,
)  # fmt: skip
REFUSED_ADDRESSES = (
    "127.0.0.1", "127.8.9.1", "0.0.0.0", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.7", "203.0.113.9",
    "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.88.99.1",
    "::", "::1", "::ffff:127.0.0.1", "::ffff:93.184.215.14", "::127.0.0.1", "64:ff9b::7f00:1",
    "64:ff9b::5db8:d70e", "64:ff9b:1::a00:1", "2002:7f00:1::", "2002:5db8:d70e::1", "2001::1",
    "2001:db8::1", "2001:10::1", "3fff::1", "100::1", "5f00::1", "fc00::1", "fd12:3456::1",
    "fe80::1", "fe80::1%eth0", "2606:4700::1111%1", "fec0::1", "ff02::1", "ff0e::1", "",
    "localhost", "127.1", "0x7f000001", "2130706433", "1.2.3.4.5", "01.2.3.4",
)  # fmt: skip


@dataclass
class Resolver:
    """A resolver that notes what it was asked."""

    addresses: Sequence[str] = (PUBLIC,)
    asked: list[tuple[str, int]] = field(default_factory=list)

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        return self.addresses


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses that were dialled; every connection fails."""
    addresses: list[str] = []

    async def dial(host: str, *_: Any, **__: Any) -> None:
        addresses.append(host)
        raise ConnectionRefusedError

    monkeypatch.setattr(asyncio, "open_connection", dial)
    return addresses


def read_from(sources: PictureSources, url: str) -> bytes:
    return asyncio.run(sources.read_picture(url))


def test_hostile_urls_lead_nowhere(dialled: list[str]) -> None:
    resolver = Resolver()
    sources = PictureSources(("good.example", "ported.example:8443"), resolve=resolver)
    assert len(REFUSED_URLS) + len(REFUSED_DATA) > 80
    for url in (*REFUSED_URLS, *REFUSED_DATA):
        with pytest.raises(PictureError, match=r"its .*; ") as raised:
            read_from(sources, url)
        assert len(str(raised.value)) < 400 and "secret" not in str(raised.value)[60:]
    assert (resolver.asked, dialled) == ([], [])
    with pytest.raises(PictureError, match="fetches no pictures; send it as data:"):
        read_from(PictureSources(resolve=resolver), "https://good.example/")
    assert resolver.asked == []


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("https://good.example/a.png?size=1&b=%20#part", "good.example", 443),
        ("HTTPS://GOOD.example.:443", "good.example", 443),
        ("https://ported.example:8443?a", "ported.example", 8443),
        ("https://bücher.example/", "xn--bcher-kva.example", 443),
        ("https://xn--bcher-kva.example/", "xn--bcher-kva.example", 443),
    ],
)
def test_an_allowed_host_is_resolved_once_and_the_checked_addresses_are_dialled(
    url: str, host: str, port: int, dialled: list[str]
) -> None:
    resolver = Resolver((PUBLIC, "2606:4700::1111"))
    allowed = ("Good.example", "ported.example:8443", "bücher.example")
    with pytest.raises(PictureError, match="cannot be connected to"):
        read_from(PictureSources(allowed, resolve=resolver), url)
    assert resolver.asked == [(host, port)]
    assert dialled == [PUBLIC, "2606:4700::1111"]


def test_forbidden_addresses_are_never_dialled(dialled: list[str]) -> None:
    assert is_public_address(PUBLIC) and is_public_address("2606:4700::1111")
    for address in REFUSED_ADDRESSES:
        assert not is_public_address(address), address
        for addresses in ((address,), (PUBLIC, address), (address, PUBLIC)):
            sources = PictureSources((HOST,), resolve=Resolver(addresses))
            with pytest.raises(PictureError, match="not of the public internet") as raised:
                read_from(sources, f"https://{HOST}/")
            assert not address or address not in str(raised.value), "tells what is inside"
    with pytest.raises(PictureError, match="not of the public internet"):
        read_from(PictureSources(("localhost",)), "https://localhost/")
    with pytest.raises(PictureError, match="has no address"):
        read_from(PictureSources((HOST,), resolve=Resolver(())), f"https://{HOST}/")
    assert dialled == []


def test_the_system_resolver_gives_addresses() -> None:
    assert "127.0.0.1" in asyncio.run(resolve_host("127.0.0.1", 443))


def test_data_urls() -> None:
    for size in (1, 2, 3, 1000):
        data = bytes(range(256)) * 4
        text = base64.b64encode(data[:size]).decode()
        assert bytes_of_data_url(f"data:image/png;base64,{text}", size) == data[:size]
        assert bytes_of_data_url(f"DATA:Image/svg+XML;BASE64,{text}") == data[:size]
        with pytest.raises(PictureError, match=r"characters for more than|bytes, and 1 to"):
            bytes_of_data_url(f"data:image/png;base64,{text}", size - 1)
    with pytest.raises(PictureError, match="characters for more than"):  # before it is decoded
        bytes_of_data_url(f"data:image/png;base64,{text}!", 9)


Answer = Sequence[bytes | None]  # parts of an answer; None: then nothing comes any more


@dataclass
class Server:
    """A server with a certificate for HOST that gives one answer to all requests."""

    port: int = 0
    requests: list[bytes] = field(default_factory=list)
    addresses: Resolver = field(default_factory=lambda: Resolver(("127.0.0.1",)))

    def sources(self, host: str = HOST, **options: Any) -> PictureSources:
        trust = ssl.create_default_context()
        AUTHORITY.configure_trust(trust)
        options = {"tls": trust, "max_bytes": MAX_BYTES, **options}
        return PictureSources(
            (f"{host}:{self.port}",),
            resolve=self.addresses,
            is_allowed_address=lambda address: address == "127.0.0.1",
            **options,
        )

    def url(self, host: str = HOST) -> str:
        return f"https://{host}:{self.port}/a/b.png?c=d"


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[Server]:
    server = Server()

    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server.requests.append(await reader.readuntil(b"\r\n\r\n"))
            for part in answer:
                if part is None:
                    await reader.read()
                else:
                    writer.write(part)
                    await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    AUTHORITY.issue_cert(HOST).configure_cert(context)
    listener = await asyncio.start_server(reply, "127.0.0.1", 0, ssl=context)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join((f"HTTP/1.1 {status}", *lines, "", "")).encode()


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
GOOD_ANSWERS: dict[str, Answer] = {
    "length": (head(LENGTH), BODY),
    "length before a longer body": (head(LENGTH), BODY, b"more" * 1000),
    "chunks": (head(CHUNKED), chunked(BODY[:7], BODY[7:])),
    "to the end": (head("Connection: close"), BODY),
    "in pieces": (*(bytes((byte,)) for byte in head(LENGTH)), BODY),
    "interim answers": (head(status="103 Early Hints") * 3, head(LENGTH), BODY),
    "identity": (head(LENGTH, "Content-Encoding: identity"), BODY),
}
BAD_ANSWERS: dict[str, tuple[Answer, str]] = {
    "redirect": ((head("Location: /b", "Content-Length: 0", status="302 Found"),), "redirects"),
    "redirect with a body": (
        (head("Location: https://127.0.0.1/", LENGTH, status="301 Moved"), BODY), "redirects",
    ),
    "not modified": ((head(status="304 Not Modified"),), "redirects"),
    "not found": ((head(LENGTH, status="404 Not Found"), BODY), "answered 404"),
    "part": ((head(LENGTH, status="206 Partial Content"), BODY), "answered 206"),
    "key wanted": ((head(LENGTH, status="401 Unauthorized"), BODY), "answered 401"),
    "compressed": ((head(LENGTH, "Content-Encoding: gzip"), BODY), "compressed"),
    "large length": ((head("Content-Length: 100001"), None), "more than 100000"),
    "huge length": ((head(f"Content-Length: {2**63}"), None), "more than 100000"),
    "broken length": ((head("Content-Length: -1"), BODY), "no proper answer"),
    "two lengths": ((head(LENGTH, "Content-Length: 1"), BODY), "no proper answer"),
    "length that lies": ((head("Content-Length: 5000"), BODY), "no proper answer"),
    "large chunks": ((head(CHUNKED), chunked(*[BODY] * 50)), "more than 100000"),
    "endless to the end": ((head("Connection: close"), *[BODY] * 50), "more than 100000"),
    "tiny chunks": (
        (head(CHUNKED), chunked(*[b"a"] * (MAX_BODY_PARTS + 1))), "more than 100000"
    ),
    "chunks cut": ((head(CHUNKED), chunked(BODY)[:-5]), "no proper answer"),
    "large header": ((head("X: " + "y" * 3 * MAX_HEADER_BYTES), BODY), "no proper answer"),
    "endless interim": ((*[head(status="100 Continue") * 100] * 200, None), "more than 100000"),
    "endless head": ((b"HTTP/1.1 200 OK\r\n", *[b"A: " + b"b" * 9000] * 40), "no proper answer"),
    "upgrade": ((head("Upgrade: x", status="101 Switching"),), "answer"),
    "nothing": ((b"",), "no proper answer"),
    "another protocol": ((b"SSH-2.0-OpenSSH_9.0\r\n\r\n",), "no proper answer"),
    "HTTP 0.9": ((BODY,), "no proper answer"),
}  # fmt: skip


def test_an_allowed_host_gives_its_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def run() -> None:
        for name, answer in GOOD_ANSWERS.items():
            async with serving(answer) as server:
                assert await server.sources().read_picture(server.url()) == BODY, name
                [request] = server.requests
                lines = request.decode().split("\r\n")
                assert lines[0] == "GET /a/b.png?c=d HTTP/1.1"
                assert f"Host: {HOST}:{server.port}" in lines
                names = {line.partition(":")[0] for line in lines[1:] if line}
                assert names == {"Host", "User-Agent", "Accept", "Accept-Encoding", "Connection"}
                assert server.addresses.asked == [(HOST, server.port)]

    asyncio.run(run())


def test_answers_that_are_refused() -> None:
    async def run() -> None:
        for name, (answer, reason) in BAD_ANSWERS.items():
            async with serving(answer) as server:
                with pytest.raises(PictureError, match=reason) as raised:
                    await server.sources().read_picture(server.url())
                assert str(raised.value).startswith(HOST) and "; " in str(raised.value), name
                assert len(server.requests) == 1, "asked again"

    asyncio.run(run())


def test_certificates_decide() -> None:
    async def run() -> None:
        async with serving(GOOD_ANSWERS["length"]) as server:
            stranger = "stranger.example.org"
            for sources, host in (
                (server.sources(stranger), stranger),
                (server.sources(tls=None), HOST),
                (server.sources(tls=ssl.create_default_context()), HOST),
            ):
                with pytest.raises(PictureError, match="certificate: "):
                    await sources.read_picture(server.url(host))
            assert server.requests == [], "a request went to a stranger"
            server.addresses.addresses = ("127.0.0.1", "127.0.0.2")
            with pytest.raises(PictureError, match="not of the public internet"):
                await server.sources().read_picture(server.url())
            assert server.requests == []

    asyncio.run(run())


def test_deadlines() -> None:
    async def never(*_: Any) -> Sequence[str]:
        return await asyncio.get_running_loop().create_future()

    async def run() -> None:
        silent = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        short = PictureSources(
            (f"{HOST}:{port}",),
            resolve=Resolver(("127.0.0.1",)),
            is_allowed_address=bool,
            connect_seconds=0.05,
        )
        with pytest.raises(PictureError, match=r"cannot be connected to over TLS \(not within"):
            await short.read_picture(f"https://{HOST}:{port}/")
        silent.close()
        deaf = PictureSources((HOST,), resolve=never, connect_seconds=0.05)
        with pytest.raises(PictureError, match="has no address"):
            await deaf.read_picture(f"https://{HOST}/")
        async with serving((head(LENGTH), BODY[:-1], None)) as server:
            with pytest.raises(PictureError, match=r"did not send it within 0\.5 s"):
                await server.sources(total_seconds=0.5).read_picture(server.url())

    asyncio.run(run())
