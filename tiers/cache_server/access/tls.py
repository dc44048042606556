# SPDX-License-Identifier: Apache-2.0
"""The server's TLS files, which gRPC and the data connection use.

With a client CA every client must send a certificate; an expired certificate fails the handshake.
`LiveTls` replaces the files of a running server: later handshakes use the new files, and open
connections stay open."""

from __future__ import annotations

import base64
import logging
import re
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc

from ...errors import TierConfigError
from ...settings.file import read_ordinary

log = logging.getLogger(__name__)

WARN_DAYS = 14  # days before a certificate's end from which warnings are logged
_MAX_FILE_BYTES = 1024**2
_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----(.+?)-----END CERTIFICATE-----", re.DOTALL)
# The DER tags that are needed to find the times in a certificate.
_SEQUENCE, _VERSION, _UTC_TIME, _LONG_TIME = 0x30, 0xA0, 0x17, 0x18


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's chain, its key, and the client CA if clients need certificates."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def ends_at(self) -> dict[Path, datetime]:
        """Return the earliest certificate end in each certificate file. Raises TierConfigError."""
        files = {self.cert: "--tls-cert"}
        if self.client_ca is not None:
            files[self.client_ca] = "--tls-client-ca"
        ends = {path: end_of(_read(path, flag)) for path, flag in files.items()}
        return {path: end for path, end in ends.items() if end is not None}

    def configuration(self) -> Any:
        """Return the certificate configuration for gRPC. Raises TierConfigError."""
        self.context()  # raises for unusable files, with a reason that grpc does not give
        client_ca = None if self.client_ca is None else _read(self.client_ca, "--tls-client-ca")
        return grpc.ssl_server_certificate_configuration(
            [(_read(self.key, "--tls-key"), _read(self.cert, "--tls-cert"))],
            root_certificates=client_ca,
        )

    def context(self) -> ssl.SSLContext:
        """Return the SSL context for sockets. Raises TierConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path, flag in ((self.cert, "--tls-cert"), (self.key, "--tls-key")):
            _read(path, flag)
        try:
            # Without a callback OpenSSL would request a key's password on the terminal.
            context.load_cert_chain(self.cert, self.key, password=lambda: "")
        except (ssl.SSLError, OSError) as error:
            raise TierConfigError(
                f"{self.cert} and {self.key} are no certificate and its key ({error}); expected "
                "PEM files that belong together, the key without a password"
            ) from error
        if self.client_ca is not None:
            _read(self.client_ca, "--tls-client-ca")
            try:
                context.load_verify_locations(self.client_ca)
            except (ssl.SSLError, OSError) as error:
                raise TierConfigError(
                    f"{self.client_ca} holds no certificates ({error}); expected a PEM file"
                ) from error
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class LiveTls:
    """The TLS files of a running server. Thread-safe. Raises TierConfigError for unusable files."""

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.context = files.context()
        self.ends = files.ends_at()
        self._first = files.configuration()
        self._fresh: Any = None
        self.look_at_ends()

    def credentials(self) -> Any:
        """Return gRPC's server credentials; each handshake uses the newest configuration."""
        return grpc.dynamic_ssl_server_credentials(
            self._first,
            self._take_fresh,
            require_client_authentication=self.files.client_ca is not None,
        )

    def prepared(self, files: TlsFiles) -> LiveTls:
        """Read and check the files. Raises TierConfigError, also for an expired certificate."""
        if (files.client_ca is None) != (self.files.client_ca is None):
            raise TierConfigError(
                "whether clients need certificates (--tls-client-ca) cannot be changed while the "
                "server runs; restart it"
            )
        now = datetime.now(UTC)
        for path, end in files.ends_at().items():
            if end <= now:
                raise TierConfigError(
                    f"{path} holds a certificate that ended on {_day(end)}; put another one there"
                )
        return LiveTls(files)

    def take_over(self, other: LiveTls) -> None:
        self.files, self.context, self.ends = other.files, other.context, other.ends
        self._fresh = other._first

    def look_at_ends(self) -> None:
        """Log certificates that expire soon or have expired."""
        now = datetime.now(UTC)
        for path, end in self.ends.items():
            if end <= now:
                log.error(
                    "the certificate in %s ended on %s: clients refuse it; put another one there "
                    "and send SIGHUP", path, _day(end),
                )  # fmt: skip
            elif end - now < timedelta(days=WARN_DAYS):
                log.warning(
                    "the certificate in %s ends on %s, in %d days; put another one there and send "
                    "SIGHUP", path, _day(end), (end - now).days,
                )  # fmt: skip

    @property
    def first_end(self) -> float:
        """Return the earliest end of a certificate, in seconds since 1970; 0 if none is known."""
        return min((end.timestamp() for end in self.ends.values()), default=0.0)

    def _take_fresh(self) -> Any:
        """Return a new configuration once, and None in later calls. gRPC's threads call this."""
        fresh, self._fresh = self._fresh, None
        return fresh


def end_of(pem: bytes) -> datetime | None:
    """Return the earliest end of the certificates in a PEM file; None if no end can be read."""
    ends = []
    for match in _PEM.finditer(pem):
        try:
            ends.append(_not_after(base64.b64decode(match[1])))
        except (ValueError, IndexError):
            continue
    return min(ends, default=None)


def _not_after(der: bytes) -> datetime:
    """Return the end (notAfter) of an X.509 certificate in DER. Its inner sequence has version,
    serial number, algorithm, issuer and validity (two times). Raises ValueError, IndexError
    otherwise."""
    _, certificate, _ = _element(der, _SEQUENCE)
    _, rest, _ = _element(certificate, _SEQUENCE)
    if rest[0] == _VERSION:
        rest = _element(rest)[2]
    for _ in ("serial number", "algorithm", "issuer"):
        rest = _element(rest)[2]
    _, validity, _ = _element(rest, _SEQUENCE)
    tag, text, _ = _element(_element(validity)[2])
    if tag == _UTC_TIME:
        # Of years with two digits, 50 and above are in the twentieth century.
        century = b"19" if text[:2] >= b"50" else b"20"
        text = century + text
    elif tag != _LONG_TIME:
        raise ValueError("a certificate without an end")
    return datetime.strptime(text.decode("ascii"), "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


def _element(data: bytes, wanted: int | None = None) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first DER element, and the bytes after the element."""
    tag, length, start = data[0], data[1], 2
    if length & 0x80:
        start += length & 0x7F
        length = int.from_bytes(data[2:start])
    end = start + length
    if (wanted is not None and tag != wanted) or end > len(data):
        raise ValueError("no such element")
    return tag, data[start:end], data[end:]


def _day(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d}"


def _read(path: Path, flag: str) -> bytes:
    try:
        return read_ordinary(path, _MAX_FILE_BYTES)
    except OSError as error:
        raise TierConfigError(
            f"{flag} names {path}, which cannot be read ({error.strerror}); name a PEM file"
        ) from error
