# SPDX-License-Identifier: Apache-2.0
"""The server's TLS: one pair of files, for gRPC and for the data connection.

With a client CA every client must show a certificate of that CA; one that has expired ends the
handshake.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ...errors import TierConfigError

_MAX_FILE_BYTES = 1024**2


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: the server's chain, its key, and the CA of clients where they need one."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def server_credentials(self) -> Any:
        """For gRPC. Raises TierConfigError."""
        self.context()  # which says what is wrong with the files; grpc does not
        client_ca = None if self.client_ca is None else _read(self.client_ca, "--tls-client-ca")
        return grpc.ssl_server_credentials(
            [(_read(self.key, "--tls-key"), _read(self.cert, "--tls-cert"))],
            root_certificates=client_ca,
            require_client_auth=client_ca is not None,
        )

    def context(self) -> ssl.SSLContext:
        """For sockets. Raises TierConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        for path, flag in ((self.cert, "--tls-cert"), (self.key, "--tls-key")):
            _read(path, flag)
        try:
            # Without a password callback a key that has one would ask for it on the terminal.
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


def _read(path: Path, flag: str) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise TierConfigError(
            f"{flag} names {path}, which cannot be read ({error.strerror}); name a PEM file"
        ) from error
