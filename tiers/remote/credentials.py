# SPDX-License-Identifier: Apache-2.0
"""A client's credentials for a cache server: files with token, certificate and trusted authorities.

The files are read for each connection, so that renewed files need no restart. A client without
token and certificate uses the token file that a server of the same user has written on this machine
(`wire/own_token.py`)."""

from __future__ import annotations

import logging
import os
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import TierConfigError
from ..wire.listen import is_loopback
from ..wire.own_token import find_token, token_places
from .membership import ServerAddress

log = logging.getLogger(__name__)

_MOST_BYTES = 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Paths of credential files; a path is None if unused. `ca_file` has the authorities that sign
    the server's certificate, by default the system's. `server_name` is the name in the server's
    certificate, by default the host of the address."""

    token_file: Path | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise TierConfigError(
                "a client certificate takes two files, the certificate and its key; one was given"
            )

    def metadata(self, address: ServerAddress | None = None) -> tuple[tuple[str, str], ...]:
        """Return the metadata of calls to `address`. Raises TierConfigError for a bad token."""
        token = self._own_token(address) if self.token_file is None else self._given_token()
        if token is None:
            return ()
        return (("authorization", f"Bearer {token}"),)

    def _given_token(self) -> str:
        assert self.token_file is not None
        token = _read(self.token_file, "token").decode("ascii", "replace").strip()
        if not token or not token.isprintable() or "\ufffd" in token:
            raise TierConfigError(
                f"{self.token_file} holds no token: one line of ASCII is expected"
            )
        return token

    def _own_token(self, address: ServerAddress | None) -> str | None:
        """Return the token of this user's server; None on another machine or with a certificate."""
        if address is None or self.cert_file is not None or not is_loopback(address.host):
            return None
        return find_token(address.port)

    def missing(self, address: ServerAddress) -> str:
        """Return a hint for a refused call: the missing token file; "" if none is missing."""
        is_looked_for = self.token_file is None and self.cert_file is None
        if not is_looked_for or not is_loopback(address.host):
            return ""
        try:
            if find_token(address.port) is not None:
                return ""
        except TierConfigError:  # reported by other calls
            return ""
        places = " nor ".join(map(str, token_places(address.port))) or "any folder of this user's"
        return f"; no token of a server of this user's lies in {places}"

    def grpc(self) -> Any:
        """Return a secure channel's credentials. Raises TierConfigError for unreadable files."""
        import grpc

        ca, cert, key = (
            None if path is None else _read(path, what)
            for path, what in (
                (self.ca_file, "certificate authority"),
                (self.cert_file, "certificate"),
                (self.key_file, "key"),
            )
        )
        return grpc.ssl_channel_credentials(ca, key, cert)

    def context(self) -> ssl.SSLContext:
        """Return the context of a TLS socket. Raises TierConfigError for an unusable file."""
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            raise TierConfigError(
                f"the files for TLS cannot be used ({error}); PEM is expected"
            ) from error
        return context

    def check_files(self) -> None:
        """Read all files once, so that a wrong path is reported at the start. Raises
        TierConfigError. Logs a warning if other users can read the token or the key."""
        self.metadata()
        for path in (self.ca_file, self.cert_file, self.key_file):
            if path is not None:
                _read(path, "file")
        for path in (self.token_file, self.key_file):
            if path is not None and os.stat(path).st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                log.warning("%s can be read by other users; `chmod 600` it", path)


def _read(path: Path, what: str) -> bytes:
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES)
    except OSError as error:
        raise TierConfigError(f"the {what} in {path} cannot be read: {error.strerror}") from error
    return raw
